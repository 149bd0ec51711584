"""What a run says at its end: the comparison as a table that fits a terminal, and a picture beside its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qupel.report import figures, significance, tables
from qupel.report.measure import main_measure, told_metrics
from qupel.report.tables import Result
from qupel.util.terminal import number_table, out, shown


def show(results: Sequence[Result], folder: Path, one: bool, seconds: float) -> None:
    """one: training in one place, not a federation."""
    if any("test" not in r["lines"][-1] for r in results):
        _show_layers(results)
        out.print(f"[dim]{seconds:.0f} s; everything is in {shown(folder)}[/dim]")
        return
    rows, measure = tables.rows(results), main_measure(results)
    head, body = tables.training_table(rows, measure) if one else tables.federation_table(rows, False, measure)
    seeds = len({r["seed"] for r in results})
    title = f"test {measure.name} after the last round, mean ± std over {seeds} seed(s)"
    out.print(number_table(head, body, shown(title)))
    if told_metrics(results):
        out.print(number_table(*tables.metrics_table(results, one, vectors=False)))
    for text in (results[0]["data_note"], "" if one else tables.sentence(rows, measure), tables.privacy(results)):
        if text:
            out.print(shown(text, 2000))
    _show_layers(results)
    _show_engines(results)
    if not one:
        first = shown(rows[0].label)
        gain = f"{first} minus the method" if measure.higher else f"the method minus {first}"
        out.print(f"[dim]gain: {gain}; p: {significance.WORDS}[/dim]")
    figures.comparison_picture(results, rows, folder / "summary.png")
    out.print(f"[dim]{seconds:.0f} s; everything is in {shown(folder)}, a picture in summary.png[/dim]")
    out.print(f"[dim]a page to look at: qupel report {shown(folder)} --open[/dim]")


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
