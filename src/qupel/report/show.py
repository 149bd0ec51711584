"""What a run says at its end: the comparison as a table that fits a terminal, and a picture beside its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qupel.report import figures, significance, tables
from qupel.report.tables import Result
from qupel.util.terminal import number_table, out, shown


def show(results: Sequence[Result], folder: Path, one: bool, seconds: float) -> None:
    """one: training in one place, not a federation."""
    if not tables.labelled(results):
        _show_losses(results)
        out.print(f"[dim]{seconds:.0f} s; everything is in {shown(folder)}[/dim]")
        return
    rows = tables.rows(results)
    head, body = tables.training_table(rows) if one else tables.federation_table(rows, intervals=False)
    seeds = len({r["seed"] for r in results})
    out.print(number_table(head, body, f"test accuracy after the last round, mean ± std over {seeds} seed(s)"))
    for text in (results[0]["data_note"], "" if one else tables.sentence(rows)):
        if text:
            out.print(shown(text, 2000))
    _show_layers(results)
    _show_engines(results)
    if not one:
        out.print(f"[dim]gain: {shown(rows[0].label)} minus the method; p: {significance.WORDS}[/dim]")
    figures.comparison_picture(results, rows, folder / "summary.png")
    out.print(f"[dim]{seconds:.0f} s; everything is in {shown(folder)}, a picture in summary.png[/dim]")
    out.print(f"[dim]a page to look at: qupel report {shown(folder)} --open[/dim]")


def _show_losses(results: Sequence[Result]) -> None:
    """Where targets are numbers: the mean test loss, and what else was asked for."""
    labels = dict.fromkeys(r["label"] for r in results)
    last = {label: [r["lines"][-1] for r in results if r["label"] == label] for label in labels}
    names = [key for key in results[0]["lines"][-1] if key.startswith("test_")]
    body = [[label, *(f"{np.mean([line[k] for line in lines]):.4g}" for k in names)] for label, lines in last.items()]
    head = ["method", *(key.removeprefix("test_").replace("_", " ") for key in names)]
    out.print(number_table(head, body, "on test data after the last round, mean over clients and seeds"))
    _show_layers(results)


def _show_layers(results: Sequence[Result]) -> None:
    if layers := dict.fromkeys(name for r in results for name in r.get("quantized", ())):
        told = dict.fromkeys(r["precision"] for r in results if "precision" in r) or {
            "all else is full precision": None
        }
        out.print(f"[dim]quantized: {shown(', '.join(layers), 400)}[/dim]", highlight=False)
        for text in told:
            out.print(f"[dim]{shown(text, 2000)}[/dim]", highlight=False)


def _show_engines(results: Sequence[Result]) -> None:
    engines = {r["label"]: r["engine"] for r in results if "engine" in r}
    for stacked, how in ((True, "in stacks"), (False, "one by one, stacks gain too little")):
        chosen = {k: e["ratio"] for k, e in engines.items() if e["stacked"] == stacked and (stacked or e["ratio"])}
        told = ", ".join(f"{label} ({ratio:.1f} x)" if ratio else label for label, ratio in chosen.items())
        if told:
            out.print(f"[dim]clients were trained {how}: {shown(told, 2000)}[/dim]", highlight=False)
