"""A data set much larger than memory: 20 GB of inputs in a sparse file, memory-mapped, trained on by several clients.

Prints the most memory that the process ever held, as the system counts it. Rows are read from the file when a batch
needs them; the file takes next to no room on the disk, as what was never written is zeros.

    python benchmarks/large_data.py [--gigabytes 20] [--clients 10] [--rounds 10] [--workers 1]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

import qupel

FEATURES = 4096  # 16 kB a sample


def made(folder: Path, gigabytes: float) -> tuple[np.memmap, np.ndarray]:
    """(inputs float32 (n, 4096) in a file of which only some rows were written, labels (n,))"""
    count = int(gigabytes * 1e9 / (4 * FEATURES))
    inputs = np.lib.format.open_memmap(folder / "inputs.npy", "w+", np.float32, (count, FEATURES))
    labels = np.arange(count) % 2
    rng = np.random.default_rng(0)
    for row in rng.choice(count, min(count, 2000), replace=False):
        inputs[row] = rng.standard_normal(FEATURES) + labels[row]
    inputs.flush()
    del inputs
    return np.load(folder / "inputs.npy", mmap_mode="r"), labels


def measured(gigabytes: float, clients: int, rounds: int, workers: int) -> dict[str, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        inputs, labels = made(Path(folder), gigabytes)
        taken = os.stat(Path(folder) / "inputs.npy").st_blocks * 512
        began = time.monotonic()
        edges = np.linspace(0, len(inputs), clients + 1).astype(int)
        people = [
            qupel.Client(inputs[a : b - 200], labels[a : b - 200], inputs[b - 200 : b], labels[b - 200 : b])
            for a, b in pairwise(edges)
        ]
        net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        found = qupel.fit(net, people, rounds=rounds, local_steps=10, batch=100, workers=workers, standardize="client")
        assert len(found.models) == clients
        seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "file_GB": inputs.nbytes / 1e9,
        "disk_GB": taken / 1e9,
        "peak_GB": peak / 1e9,
        "worker_peak_GB": children / 1e9 if workers > 1 else 0.0,
        "samples_read": rounds * 10 * 100 * clients,
        "seconds": seconds,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1)
    print(json.dumps(measured(**vars(parser.parse_args()))))
