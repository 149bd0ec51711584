"""From the file of a table to its runs: rows x columns at a scale, one cell for each of them and seed.

A file has [columns], [rows] and [scales.NAME]. A row and a column are parts of a method's settings; together they make
the method "row @ column". A row may name the `columns` it has. A scale holds the rest of a config, and in `rows` and
`columns` what it changes of them. `like = "table2"` takes scales and rows from that file, and `rows` then lists those
that are wanted.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from qupel.paper.published import NOTES
from qupel.report.runs import place, read_result
from qupel.run.compare import grid
from qupel.run.config import Config, merge, validate
from qupel.run.folder import read_config, result_file
from qupel.run.jobs import Cell, cells
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_json

SCALES = ("smoke", "small", "paper")
SIBLINGS = {"table2": ("table3",), "table3": ("table2",)}  # tables that share cells


def source(table: str) -> dict[str, Any]:
    """A table's file, its `like` resolved."""
    raw = tomllib.loads((files("qupel.paper.reproduce") / f"{table}.toml").read_text())
    if "like" in raw:
        base = source(raw["like"])
        raw = {**base, **raw, "rows": {name: base["rows"][name] for name in raw["rows"]}}
    return raw


def build(table: str, scale: str, seeds: int, data: Path | None = None) -> Config:
    """The config of a table at a scale, on seeds 0 to seeds - 1."""
    raw = source(table)
    settings = dict(raw["scales"][scale])
    rows = merge(raw["rows"], {k: v for k, v in settings.pop("rows", {}).items() if k in raw["rows"]})
    columns = merge(raw["columns"], settings.pop("columns", {}))
    settings |= {"seeds": list(range(seeds)), "methods": grid(rows, columns)}
    if data is not None:
        settings = merge(settings, {"data": {"folder": str(data)}})
    return validate(settings, f"{table}.toml, scale {scale}")


def folder(out: Path, table: str, scale: str) -> Path:
    return out / f"{table}-{scale}"


def describe(run: Path, table: str, scale: str, config: Config) -> None:
    """RUN/reproduce.json: which table a run directory is, for the report."""
    rows = list(dict.fromkeys(place(label)[0] for label in config.methods))
    write_json(run / "reproduce.json", {"table": table, "scale": scale, "note": NOTES[scale], "rows": rows})


def read(run: Path) -> tuple[dict[str, Any], Config]:
    """What `describe` wrote, and the config of the run."""
    try:
        return read_json(run / "reproduce.json"), read_config(run)
    except OSError:
        raise UserError(f"{run} holds no run of `qupel reproduce`") from None


def results(run: Path, config: Config) -> list[dict[str, Any]]:
    """The results of the cells that are done, in their order."""
    found = (result_file(run, cell) for cell in cells(config))
    return [read_result(path) for path in found if path.exists()]


# --- what is done and what is left ---


@dataclass(frozen=True)
class Status:
    """How far a run is. `share`: of each cell (0 to 1); `seconds`: expected for the rest, None: not known yet."""

    share: dict[Cell, float]
    seconds: float | None

    @property
    def done(self) -> int:
        return sum(share == 1 for share in self.share.values())

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """(row, cells done, cells) of the table."""
        names = dict.fromkeys(place(cell.label)[0] for cell in self.share)
        for name in names:
            shares = [s for cell, s in self.share.items() if place(cell.label)[0] == name]
            yield name, sum(s == 1 for s in shares), len(shares)


def status(run: Path, config: Config) -> Status:
    """What a run directory holds. A cell that is left is expected to take as long as the mean of those done in its row
    and column, else in its row, else of all."""
    took: dict[Cell, float] = {}
    share: dict[Cell, float] = {}
    for cell in cells(config):
        path = result_file(run, cell)
        if path.exists():
            result = read_json(path)
            share[cell] = 1.0
            if "taken_from" not in result:
                took[cell] = result["seconds"]
        else:
            share[cell] = _rounds(path.with_name("metrics.jsonl")) / config.rounds
    left = {cell: 1 - s for cell, s in share.items() if s < 1}
    if left and not took:
        return Status(share, None)
    return Status(share, sum(part * _expected(cell, took) for cell, part in left.items()))


def _expected(cell: Cell, took: dict[Cell, float]) -> float:
    same = [s for c, s in took.items() if c.label == cell.label]
    row = [s for c, s in took.items() if place(c.label)[0] == place(cell.label)[0]]
    known = same or row or list(took.values())
    return sum(known) / len(known)


def _rounds(log: Path) -> int:
    """The last round in a log of metrics, 0 if there is none."""
    try:
        lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
        return json.loads(lines[-1])["round"] if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
