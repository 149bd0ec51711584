"""A finished run as files to commit: the table as Markdown, CSV and LaTeX with command and machine, its raw numbers as
JSON, or the figure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
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


def draw_figure(run: Path) -> list[Path]:
    """RUN/figure1.png and .svg, from the cells of Table 2 that are done."""
    _, config = plan.read(run)
    if not plan.results(run, config):
        raise UserError(f"{run} has no finished cell to draw; run `qupel reproduce table2` first")
    runs = load_runs([run])
    compared = charts.compare(runs)
    pictures = figures.report_pictures(compared, {"accuracy": charts.accuracy(compared)}, runs[0].note)
    for name, content in pictures.items():
        write_atomic(run / name.replace("accuracy", "figure1"), content)
    return [run / "figure1.png", run / "figure1.svg"]


def publish(run: Path, what: str, target: Path) -> list[Path]:
    """Write a run's table, or its figure, to a folder; the files are named after it and its scale."""
    about, config = plan.read(run)
    done = plan.results(run, config)
    if not done:
        raise UserError(f"{run} has no finished cell to publish")
    target.mkdir(parents=True, exist_ok=True)
    name = f"{what}-{about['scale']}"
    if what == "figure1":
        return [Path(shutil.copy(path, target / f"{name}{path.suffix}")) for path in draw_figure(run)]
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
