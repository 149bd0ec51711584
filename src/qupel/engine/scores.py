"""The scores of many clients beside the metrics: a line of metrics.jsonl has no room for thousands of numbers.

scores.npz    of the last evaluated round: its number, and for each judged client its number, test score (NaN: it has no
              test data), bits and bytes. Lines of up to 200 clients hold them themselves, under "clients".
In memory the last line always holds them.
"""

from __future__ import annotations

import io
import math
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qupel.util.errors import UserError
from qupel.util.files import write_atomic

MANY_CLIENTS = 200  # above this a line of metrics has no per-client lists
FILE = "scores.npz"

Line = dict[str, Any]


def short(line: Line) -> Line:
    """A line as it is written: without the lists of many clients."""
    many = len(line.get("clients", {"test": ()})["test"]) > MANY_CLIENTS
    return {k: v for k, v in line.items() if k != "clients"} if many else line


def keep(folder: Path, line: Line) -> Line:
    """Write the lists of many clients beside the metrics; the line as it is to be written."""
    written = short(line)
    if written is not line:
        told = line["clients"]
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            round=np.int64(line["round"]),
            number=np.array(told.get("number", range(len(told["test"]))), np.int64),
            test=np.array([math.nan if v is None else v for v in told["test"]], np.float64),
            bits=np.array(told["bits"], np.float64),
            bytes=np.array(told["bytes"], np.int64),
        )
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
    except (zipfile.BadZipFile, ValueError, KeyError, OSError, EOFError):
        raise UserError(f"{path} is damaged: not the scores of clients") from None
    if number != list(range(len(number))) or (clients is not None and len(number) < clients):
        told["number"] = number
    lines[-1]["clients"] = told


def copy(source: Path, target: Path) -> None:
    """Take the scores of a cell over."""
    if (source / FILE).exists():
        shutil.copy(source / FILE, target)
