"""python compare_onnx.py RUN FOLDER: each client's ONNX file, in ONNX Runtime on the client's own test data, against
the scores that the client has reported."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from my_metrics import lateness

from qupel.data.natural import emg
from qupel.deploy.predict import open_model


def scores(folder: Path, clients: int) -> dict[str, list[float]]:
    """What ONNX Runtime gives, by name of the metric, a number a client."""
    data = emg()
    assert data.test.groups is not None
    found: dict[str, list[float]] = {"test": [], "my_metrics:lateness": []}
    for client in range(clients):
        mine = data.test.read(np.flatnonzero(data.test.groups == client))
        model = open_model(folder / f"client-{client:03}.onnx", trust=True)  # our own: in this process
        outputs = torch.from_numpy(model.run(model.ready(mine.inputs)))
        found["test"].append(float((outputs.argmax(1) == mine.targets).double().mean()))
        found["my_metrics:lateness"].append(lateness(outputs, mine.targets))
    return found


if __name__ == "__main__":
    run, folder = map(Path, sys.argv[1:])
    (metrics,) = run.glob("cells/*/metrics.jsonl")
    told = json.loads(metrics.read_text().splitlines()[-1])["clients"]
    for name, values in scores(folder, len(told["test"])).items():
        equal = sum(a == b for a, b in zip(values, told[name], strict=True))
        print(f"{name}: {equal} of {len(values)} files have their client's score")
