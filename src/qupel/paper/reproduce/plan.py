"""From the file of a table to its runs: rows x columns at a scale, one cell for each of them and seed.

A file has [columns], [rows] and [scales.NAME]. A row and a column are parts of a method's settings; together they make
the method "row @ column". A row may name the `columns` it has. A scale holds the rest of a config, and in `rows` and
`columns` what it changes of them. `like = "table2"` takes scales and rows from that file, and `rows` then lists those
that are wanted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from qupel.paper.published import NOTES
from qupel.report.runs import place, read_result
from qupel.run.compare import Part, grid
from qupel.run.config import Config, merge, validate
from qupel.run.folder import read_config, result_file
from qupel.run.jobs import cells
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_json

SCALES = ("smoke", "small", "long", "paper")
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
    if scale not in raw["scales"]:
        raise UserError(f"{table} has no scale {scale!r}; allowed: {', '.join(raw['scales'])}")
    settings = dict(raw["scales"][scale])
    rows = merge(raw["rows"], {k: v for k, v in settings.pop("rows", {}).items() if k in raw["rows"]})
    columns = merge(raw["columns"], settings.pop("columns", {}))
    settings |= {"seeds": list(range(seeds)), "methods": grid(rows, columns)}
    if data is not None:
        settings = merge(settings, {"data": {"folder": str(data)}})
    return validate(settings, f"{table}.toml, scale {scale}")


def part(config: Config, only: Iterable[str]) -> Part:
    """The cells that are wanted, from words: a row, a column, "seed 0"; none: all."""
    rows, columns = (dict.fromkeys(names) for names in zip(*map(place, config.methods), strict=True))
    return Part.named(only, rows, columns, config.seeds)


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
