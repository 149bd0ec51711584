"""A finished run as files to commit: the table as Markdown, CSV and LaTeX with command and machine, its raw numbers as
JSON, or the figure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qupel.paper import published as paper
from qupel.paper.reproduce import plan
from qupel.report import charts, figures
from qupel.report.runs import load_runs
from qupel.run.config import Config
from qupel.util.errors import UserError
from qupel.util.files import write_atomic

Result = dict[str, Any]


def write_tables(run: Path) -> paper.Grid:
    """RUN/table.md, table.csv and table.tex: the paper's table with the results that are there."""
    about, config = plan.read(run)
    grid = paper.grid(about["table"], plan.results(run, config), about["rows"], paper.NOTES[about["scale"]])
    for suffix, text in (("md", paper.as_markdown(grid)), ("csv", paper.as_csv(grid)), ("tex", paper.as_latex(grid))):
        write_atomic(run / f"table.{suffix}", text)
    return grid


DRAWN = {"figure1": "accuracy", "diagnostics": "diagnostics"}
DIAGNOSED = ("travel", "dead centers", "distance", "spread", "kappa", "drift")


def draw(run: Path, what: str) -> list[Path]:
    """RUN/WHAT.png and .svg from the cells of Table 2 that are done. figure1: accuracy over epochs. diagnostics: of the
    paper's method, with and without a federation."""
    _, config = plan.read(run)
    if not plan.results(run, config):
        raise UserError(f"{run} has no finished cell to draw; run `qupel reproduce table2` first")
    runs = load_runs([run])
    c = charts.compare(runs)
    told = {"accuracy": charts.accuracy(c)}
    if what == "diagnostics":
        c = replace(c, series=tuple(s for s in c.series if c.families[s.family] in (paper.LOCAL, paper.QUPEL)))
        told = diagnosed(c)
        if not told:
            raise UserError(f"{run}: no finished cell of the paper's method tells diagnostics")
    for name, content in figures.report_pictures(c, told, runs[0].note).items():
        write_atomic(run / name.replace(DRAWN[what], what), content)
    return [run / f"{what}.png", run / f"{what}.svg"]


def diagnosed(c: charts.Comparison) -> dict[str, charts.Chart]:
    """Charts of those diagnostics that say why a method stands where it does."""
    found = {chart["y"]: chart for chart in charts.diagnostics(c)}
    return {f"diagnostics-{k}": found[name] for k, name in enumerate(DIAGNOSED) if name in found}


def publish(run: Path, what: str, target: Path) -> list[Path]:
    """Write a run's table, or its figure, to a folder; the files are named after it and its scale."""
    about, config = plan.read(run)
    done = plan.results(run, config)
    if not done:
        raise UserError(f"{run} has no finished cell to publish")
    target.mkdir(parents=True, exist_ok=True)
    name = f"{what}-{about['scale']}"
    if what in DRAWN:
        return [Path(shutil.copy(path, target / f"{name}{path.suffix}")) for path in draw(run, what)]
    raw = target / f"{name}.json"
    write_atomic(raw, json.dumps(_raw(about, config, done)) + "\n")
    return [*rewrite(raw), raw]


def rewrite(raw: Path) -> list[Path]:
    """The table as Markdown, CSV and LaTeX from its published numbers, beside them."""
    about = json.loads(raw.read_text())
    note = about["data_note"]
    done = [{**c, "data_note": note, "lines": [{"clients": c["clients"]}]} for c in about["cells"]]
    grid = paper.grid(about["table"], done, about["rows"], paper.NOTES[about["scale"]])
    head = f"# {about['table']}, scale {about['scale']}\n\n{_origin(about)}\n"
    texts = {".md": head + paper.as_markdown(grid), ".csv": paper.as_csv(grid), ".tex": paper.as_latex(grid)}
    for suffix, text in texts.items():
        write_atomic(raw.with_suffix(suffix), text)
    return [raw.with_suffix(suffix) for suffix in texts]


def _origin(about: dict[str, Any]) -> str:
    """Where the numbers come from: command, seeds, machine, time, code."""
    done = about["cells"]
    own = [r for r in done if "taken_from" not in r]
    machine = done[0]["machine"]
    commits = ", ".join(sorted({str(r["machine"]["commit"]) for r in done}))
    taken = f", {len(done) - len(own)} of them taken over from another table" if len(own) < len(done) else ""
    return (
        f"`qupel reproduce {about['table']} --scale {about['scale']} --seeds {len(about['config']['seeds'])}`; "
        f"{len(done)} cells{taken}; "
        f"{machine['cpus']} CPUs ({machine['processor']}), Python {machine['python']}, torch {machine['torch']}, "
        f"commit {commits}; {sum(r['seconds'] for r in own) / 60:.0f} minutes of training.\n"
    )


def _raw(about: dict[str, Any], config: Config, done: Sequence[Result]) -> dict[str, Any]:
    """Every cell's curve and last accuracies by client; the settings once."""
    shared = json.loads(config.model_dump_json(exclude={"methods"}))
    phases = {r["label"]: r["phases"] for r in done}
    curve = ["round", "epoch", "method", "quantizer", "train_loss", "train_loss_quantized"]
    curve += ["test", "float_test", "bits"]
    cells = [
        {k: r[k] for k in ("label", "seed", "fingerprint", "seconds", "finished", "machine", "taken_from") if k in r}
        | {"clients": r["lines"][-1]["clients"], "lines": [{k: x[k] for k in curve if k in x} for x in r["lines"]]}
        for r in done
    ]
    note = next((r["data_note"] for r in done if r["data_note"]), "")
    return {**about, "data_note": note, "config": shared, "phases": phases, "cells": cells}
