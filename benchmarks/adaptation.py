"""Seconds and memory of `qupel adapt`, each time in a process of its own, for some of the clients that join later.

    python benchmarks/adaptation.py RUN [--cell QuPeL-s0] [--bits 2] [--clients 7]

RUN: a finished run whose data keep clients out of training. Writes RUN/adaptation.json, for experiments/publish.py.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from qupel.data import sources
from qupel.data.sources import Dataset
from qupel.util.files import read_json, write_json

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def timed(*given: str) -> tuple[float, float, str]:
    """(seconds, peak memory in bytes, what it printed) of one process."""
    began = time.monotonic()
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(given)} ended with {process.returncode}")
    return time.monotonic() - began, used.ru_maxrss * 1024, said


def save_client(data: Dataset, k: int, path: Path) -> None:
    """The samples of owner k as a file that `qupel adapt --data` takes."""
    found = {}
    for name, samples in (("train", data.train), ("test", data.test)):
        mine = samples.read(np.flatnonzero(samples.groups == k))
        found |= {f"{name}_inputs": np.asarray(mine.inputs), f"{name}_targets": np.asarray(mine.targets)}
    np.savez(path, **found)


def measured(run: Path, cell: str, bits: int, clients: int) -> dict[str, Any]:
    settings = read_json(run / "config.json")["data"]
    data = sources.load(settings["name"], settings["folder"], settings["limit"], settings["args"])
    seconds, peaks, inside, sizes = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        new, small = Path(folder) / "new.npz", Path(folder) / "mine.safetensors"
        for k in data.unseen[:clients]:
            save_client(data, k, new)
            options = ("--cell", cell, "--data", str(new), "--bits", str(bits), "--out", str(small))
            took, peak, said = timed(sys.executable, "-m", "qupel", "adapt", str(run), *options)
            seconds.append(took)
            peaks.append(peak)
            inside.append(float(re.findall(r"in ([\d.]+) s", said)[0]))
            sizes.append(small.stat().st_size)
    _, torch_alone, _ = timed(sys.executable, "-c", "import torch")
    return {
        "command": f"qupel adapt runs/{run.name} --cell {cell} --data new.npz --bits {bits}",
        "made_by": f"python benchmarks/adaptation.py runs/{run.name}",
        "clients": len(seconds),
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "adapting": statistics.median(inside),
        "peak_MB": max(peaks) / 1e6,
        "torch_MB": torch_alone / 1e6,
        "file_bytes": round(statistics.median(sizes)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--cell", default="QuPeL-s0")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--clients", type=int, default=7)
    asked = parser.parse_args()
    found = measured(asked.run, asked.cell, asked.bits, asked.clients)
    write_json(asked.run / "adaptation.json", found)
    print(found)
