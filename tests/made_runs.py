"""Run directories for tests of the report, made of numbers, without training."""

import json
import math
from pathlib import Path

from qupel.engine.scores import over_clients
from qupel.tasks.metrics import ACCURACY, Kind

BITS = (2.0, 3.0)
SIZES = {2.0: 33_000, 3.0: 47_000, 32.0: 500_000}
LAYERS = ("conv2.weight", "fc1.weight")


def line(label: str, seed: int, round: int, rounds: int, clients: int, bits=BITS, weights: bool = True) -> dict:
    """Accuracies that grow with the rounds and differ a little between methods, seeds and clients."""
    base = 0.5 + 0.4 * round / rounds - 0.01 * len(label) + 0.02 * seed + 1e-4 * math.sin(7 * seed * len(label))
    widths = [bits[i % len(bits)] for i in range(clients)]
    scores = [base + 0.05 * math.sin(3 * i + seed) + 0.01 * math.sin(5 * i * len(label)) for i in range(clients)]
    mean = sum(scores) / clients
    found = {
        "round": round, "phase": 0, "method": "qupel", "quantizer": "prox", "step": 10 * round, "epoch": 2.0 * round,
        "bits": sum(widths) / clients, "model_bytes": sum(SIZES[b] for b in widths) / clients, "upload_bytes": 500_000,
        "dead_centers": 0, "refused": [], "test": mean, "test_loss": 1.0, "seconds": 1.0 * round,
        "train_loss": 1 / round,
        "clients": {"test": scores, "bits": widths, "bytes": [SIZES[b] for b in widths]},
    }  # fmt: skip
    if weights and bits != (32.0,):
        found["weights"] = [told(i, bits[i], round, round == rounds - 1) for i in range(len(bits))]
    return found


def told(client: int, bits: float, round: int, with_histogram: bool) -> dict:
    count = 2 ** int(bits)
    centers = {name: [(j - (count - 1) / 2) * 0.1 + 0.004 * round for j in range(count)] for name in LAYERS}
    found = {"client": client, "bits": bits, "centers": centers}
    if with_histogram:
        counts = [1 + (k % 25) ** 2 for k in range(200)]
        found["histograms"] = {name: {"low": -1.0, "high": 1.0, "on": 0.25, "counts": counts} for name in LAYERS}
    return found


def result(label: str, seed: int, rounds: int = 10, clients: int = 20, bits=BITS, weights: bool = True) -> dict:
    lines = [line(label, seed, r, rounds, clients, bits, weights) for r in range(1, rounds + 1)]
    return {
        "label": label, "seed": seed, "method": {"recipe": "qupel"},
        "phases": [{"rounds": rounds, "method": "qupel", "quantizer": {"name": "prox"}}],
        "seconds": 10.0, "machine": {"python": "3.11", "cpus": 2}, "data_note": "", "lines": lines,
    }  # fmt: skip


def with_metrics(result: dict, judge_by: str = "accuracy", unseen: int = 0) -> dict:
    """The same cell of a run that was asked for a share, an error and a vector of two; judged by one of them. unseen:
    so many clients were kept out of training."""
    kinds = {
        "macro_f1": Kind("macro_f1", percent=True),
        "mae": Kind("mae", higher=False),
        "each.0": Kind("each.0", percent=True, vector="each"),
        "each.1": Kind("each.1", percent=True, vector="each"),
    }
    for line in result["lines"]:
        told = line["clients"]
        told["count"] = [10 + i for i in range(len(told["test"]))]
        told |= _metrics(told["test"])
        main = {"accuracy": ACCURACY, **kinds}[judge_by]
        if judge_by != "accuracy":
            told["test"] = list(told[judge_by])
        line["over_clients"] = over_clients(told, {"test": main, **kinds})
        line["test"] = line["over_clients"]["test"]["mean"]
        line |= {f"test_{name}": line["over_clients"][name]["mean"] for name in kinds}
    if unseen:
        test = [0.6 + 0.01 * i + 0.02 * result["seed"] for i in range(unseen)]
        result["unseen"] = {"test": test, "count": [5] * unseen, **_metrics(test)}
    return result


def _metrics(test: list[float]) -> dict:
    half = [v if i % 2 else None for i, v in enumerate(test)]
    return {"macro_f1": [0.9 * v for v in test], "mae": [3 - 2 * v for v in test], "each.0": list(test), "each.1": half}


def write_run(folder: Path, results: list[dict], kind: str = "classes", **config) -> Path:
    """RUN/config.json and RUN/cells/*/result.json of these results."""
    methods = {r["label"]: {"recipe": "qupel", "eta1": 0.1, "bits": None} for r in results}
    settings = {
        "seeds": sorted({r["seed"] for r in results}), "data": {"name": "digits", "folder": None},
        "split": {"kind": kind, "clients": 20, "classes": 4, "alpha": 0.5}, "model": {"name": "cnn5"},
        "rounds": 10, "local_steps": 10, "methods": methods, **config,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    for k, r in enumerate(results):
        cell = folder / "cells" / f"{k:03d}"
        cell.mkdir(parents=True)
        (cell / "result.json").write_text(json.dumps(r))
    return folder
