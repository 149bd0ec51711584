"""EMG without its test data: of every person's three training recordings of a gesture two are trained on, the third is
what is tested on. Windows of one recording are too alike to be split at random.

    python experiments/trials/emg_recordings.py OUT.npz        # emg.npz in the folder QUPEL_DATA
"""

import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np


def third_recordings(targets: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """True for the windows of each person's third recording of a gesture; a recording is a run of equal targets."""
    held = np.zeros(len(targets), bool)
    for person in np.unique(groups):
        rows = np.flatnonzero(groups == person)
        edges = np.flatnonzero(np.diff(targets[rows])) + 1
        seen: dict[int, int] = {}
        for begin, end in pairwise([0, *edges, len(rows)]):
            gesture = int(targets[rows[begin]])
            seen[gesture] = seen.get(gesture, 0) + 1
            held[rows[begin:end]] = seen[gesture] == 3
    return held


def main() -> None:
    data = np.load(Path(os.environ["QUPEL_DATA"]) / "emg" / "emg.npz")
    held = third_recordings(data["train_targets"], data["train_groups"])
    parts = {"train": ~held, "test": held}
    kinds = ("inputs", "targets", "groups")
    found = {f"{name}_{kind}": data[f"train_{kind}"][rows] for name, rows in parts.items() for kind in kinds}
    np.savez(sys.argv[1], classes=data["classes"], **found)


if __name__ == "__main__":
    main()
