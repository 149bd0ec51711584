"""Models of clients that joined later as ONNX files, judged in ONNX Runtime on their own test data.

    python benchmarks/exported.py RUN [--cells "QuPeL*"]

Exports them as `qupel export RUN --cell CELL --unseen --all --to onnx` does, for every such cell,
compares each file's accuracy with the one that the run reports, and writes RUN/exported.json, for
experiments/publish.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from qupel.data import sources
from qupel.deploy.commands import export
from qupel.deploy.predict import accuracy, open_model


def judged(run: Path, cell: Path, data: sources.Dataset) -> dict[str, Any]:
    """How many files, how far their accuracy is from what is reported at most, and their mean bytes."""
    told = json.loads((cell / "result.json").read_text())
    apart, sizes = [], []
    with tempfile.TemporaryDirectory() as folder:
        export(run, "onnx", None, True, True, cell.name, Path(folder))
        for k, file in enumerate(sorted(Path(folder).glob("*.onnx"))):
            mine = data.test.read(np.flatnonzero(data.test.groups == data.unseen[k]))
            reached = accuracy(open_model(file, trust=True, threads=1), mine.inputs, mine.targets)
            apart.append(abs(reached - told["unseen"]["test"][k]))
            sizes.append(file.stat().st_size)
    return {"label": told["label"], "files": len(sizes), "apart": max(apart), "bytes": float(np.mean(sizes))}


def main(run: Path, cells: str) -> None:
    about = json.loads((run / "config.json").read_text())["data"]
    data = sources.load(about["name"], about["folder"], about["limit"], about["args"])
    found = []
    for cell in sorted(path.parent for path in run.glob(f"cells/{cells}/result.json")):
        found.append(judged(run, cell, data))
        print(found[-1])
    (run / "exported.json").write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--cells", default="*", help="which of the run's cells, a pattern")
    asked = parser.parse_args()
    main(asked.run, asked.cells)
