"""Seconds and memory of `qupel adapt`, each time in a process of its own, for some of the clients that join later.

    python benchmarks/adaptation.py RUN [--cell QuPeL-s0] [--bits 2] [--clients 7]

RUN: a finished run whose data keep clients out of training. Writes RUN/adaptation.json, for experiments/publish.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def timed(*given: str) -> tuple[float, float, str]:
    """(seconds, peak memory in bytes, what it printed) of one process.

    A child's peak is at least what its parent had when it forked: hence this process imports neither torch nor qupel.
    """
    began = time.monotonic()
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(given)} ended with {process.returncode}")
    return time.monotonic() - began, used.ru_maxrss * 1024, said


def save_clients(run: Path, count: int, folder: Path) -> None:
    """The samples of clients that joined later, each in a file that `qupel adapt --data` takes."""
    import numpy as np

    from qupel.data import sources

    about = json.loads((run / "config.json").read_text())["data"]
    data = sources.load(about["name"], about["folder"], about["limit"], about["args"])
    for k in data.unseen[:count]:
        found = {}
        for name, samples in (("train", data.train), ("test", data.test)):
            mine = samples.read(np.flatnonzero(samples.groups == k))
            found |= {f"{name}_inputs": np.asarray(mine.inputs), f"{name}_targets": np.asarray(mine.targets)}
        np.savez(folder / f"{k:04d}.npz", **found)


def measured(run: Path, cell: str, bits: int, clients: int) -> dict[str, Any]:
    seconds, peaks, inside, sizes = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        timed(sys.executable, __file__, str(run), "--clients", str(clients), "--save", folder)
        small = Path(folder) / "mine.safetensors"
        for new in sorted(Path(folder).glob("*.npz")):
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
    parser.add_argument("--save", type=Path, help="only write these clients' data to a folder")
    asked = parser.parse_args()
    if asked.save:
        save_clients(asked.run, asked.clients, asked.save)
    else:
        found = measured(asked.run, asked.cell, asked.bits, asked.clients)
        (asked.run / "adaptation.json").write_text(json.dumps(found))
        print(json.dumps(found))
