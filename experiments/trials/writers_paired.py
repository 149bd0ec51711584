"""Adapted 2-bit models against others on the 50 writers who join later, over writers: the page tests over seeds,
which all have the same writers.

    python experiments/trials/writers_paired.py
"""

import json
from pathlib import Path

import numpy as np
from scipy import stats

CELLS = json.loads((Path(__file__).parents[2] / "docs/results/mnist_writers.json").read_text())["mnist_writers"][
    "cells"
]


def mean(label: str, kind: str) -> np.ndarray:
    """Each writer's accuracy in percent, mean over the seeds (50,)."""
    return 100 * np.mean([cell["unseen"][kind] for cell in CELLS if cell["label"] == label], axis=0)


for label, kind in (("FedAvg", "test"), ("QuPeL", "global"), ("FedAvg + tuning", "test"), ("Local", "test")):
    gain = np.round(mean("QuPeL", "test") - mean(label, kind), 6)  # equal means may differ in the last bits
    found = stats.ttest_1samp(gain, 0)
    low, high = found.confidence_interval()
    counts = "/".join(str(int(of.sum())) for of in (gain > 0, gain == 0, gain < 0))
    print(f"{label} ({kind}): {gain.mean():+.2f}, {low:+.2f} to {high:+.2f}, p = {found.pvalue:.4f}, {counts}")
