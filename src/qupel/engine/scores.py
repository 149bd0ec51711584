"""The scores of many clients beside the metrics: a line of metrics.jsonl has no room for thousands of numbers.

scores.npz    of the last evaluated round: its number, and for each judged client its number, test score (NaN: it has no
              test data), bits and bytes; where metrics are asked for, its test samples and every metric. Lines of up to
              200 clients hold them themselves, under "clients".
In memory the last line always holds them.
"""

from __future__ import annotations

import io
import math
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qupel.util.errors import UserError
from qupel.util.files import write_atomic

if TYPE_CHECKING:
    from qupel.tasks.metrics import Kind

MANY_CLIENTS = 200  # above this a line of metrics has no per-client lists
FILE = "scores.npz"

MORE = "of "  # before the name of a list that runs do not always have
LISTS = frozenset({"test", "bits", "bytes", "number"})

Line = dict[str, Any]


# --- over clients ---


def mean(values: Sequence[float], unknown: bool = False) -> float:
    """Of all; unknown: of those that are known, NaN if none is."""
    if unknown:
        values = [v for v in values if not math.isnan(v)]
    return float(np.mean(values)) if len(values) else math.nan


def worst(values: np.ndarray, higher: bool = True) -> float:
    """The mean of the worst tenth (n,), at least one; higher: more is better."""
    ordered = np.sort(values) if higher else -np.sort(-values)
    return float(ordered[: max(1, round(len(values) / 10))].mean())


def over_clients(clients: Mapping[str, Sequence[Any]], kinds: Mapping[str, Kind]) -> dict[str, dict[str, Any]]:
    """What clients' lists say together, by key: the plain mean, the mean weighted by test samples, the worst tenth, the
    spread (std), and how to read them. Clients for which a number is not defined count nowhere."""
    found, counts = {}, np.array(clients["count"], float)
    for key, kind in kinds.items():
        values = as_array(clients[key])
        there = ~np.isnan(values)
        values, weights = values[there], counts[there]
        if len(values):
            told = {
                "mean": float(values.mean()),
                "weighted": float((values * weights).sum() / weights.sum()),
                "worst": worst(values, kind.higher),
                "spread": float(values.std()),
            }
            found[key] = {**asdict(kind), **told}
    return found


def as_array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if v is None else v for v in values], np.float64)


# --- many of them ---


def short(line: Line) -> Line:
    """A line as it is written: without the lists of many clients."""
    many = len(line.get("clients", {"test": ()})["test"]) > MANY_CLIENTS
    return {k: v for k, v in line.items() if k != "clients"} if many else line


def keep(folder: Path, line: Line) -> Line:
    """Write the lists of many clients beside the metrics; the line as it is to be written."""
    written = short(line)
    if written is not line:
        told = line["clients"]
        arrays = {
            "round": np.int64(line["round"]),
            "number": np.array(told.get("number", range(len(told["test"]))), np.int64),
            "test": as_array(told["test"]),
            "bits": np.array(told["bits"], np.float64),
            "bytes": np.array(told["bytes"], np.int64),
        }
        arrays |= {f"{MORE}{name}": as_array(told[name]) for name in told if name not in LISTS}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_atomic(folder / FILE, buffer.getvalue())
    return written


def attach(folder: Path, lines: Sequence[Line], clients: int | None = None) -> None:
    """Give the last line the lists that `keep` wrote for it. clients: of the run; there may be more than judged."""
    path = folder / FILE
    if not lines or "clients" in lines[-1] or not path.exists():
        return
    try:
        with np.load(path, allow_pickle=False) as found:
            if int(found["round"]) != lines[-1]["round"]:
                return
            test, number = found["test"].tolist(), found["number"].tolist()
            told = {
                "test": [None if math.isnan(v) else v for v in test],
                "bits": found["bits"].tolist(),
                "bytes": found["bytes"].tolist(),
            }
            for key in found.files:
                if key.startswith(MORE):
                    told[key.removeprefix(MORE)] = [None if math.isnan(v) else v for v in found[key].tolist()]
            if "count" in told:
                told["count"] = [int(v) for v in told["count"]]
    except (zipfile.BadZipFile, ValueError, KeyError, OSError, EOFError):
        raise UserError(f"{path} is damaged: not the scores of clients") from None
    if number != list(range(len(number))) or (clients is not None and len(number) < clients):
        told["number"] = number
    lines[-1]["clients"] = told


def copy(source: Path, target: Path) -> None:
    """Take the scores of a cell over."""
    if (source / FILE).exists():
        shutil.copy(source / FILE, target)
