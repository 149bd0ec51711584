"""Figures, drawn without a screen."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qupel.report import leaderboard
from qupel.report.charts import LIGHT, Chart, Comparison, Series
from qupel.report.measure import Measure, main_measure
from qupel.report.tables import Result, Row, size
from qupel.util.errors import UserError
from qupel.util.terminal import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.", (0, (8, 3)), (0, (1, 3)))  # those of charts.DASHES
MARKS = "os^Dv*"


def split_picture(counts: np.ndarray, labels: Sequence[str], path: Path) -> None:
    """Clients x classes: the area of a dot is the number of training samples."""
    from matplotlib.figure import Figure

    check_picture(path)
    clients, classes = counts.shape
    figure = Figure(figsize=(1.2 + 0.45 * classes, 1 + 0.24 * clients), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    i, c = np.nonzero(counts)
    axes.scatter(c, i, s=140 * counts[i, c] / counts.max(), color="#3b6fb6")
    names = list(labels) or [str(k) for k in range(classes)]
    axes.set_xticks(range(classes), names, rotation=60 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(range(0, clients, max(1, clients // 20)))
    axes.invert_yaxis()
    axes.set(xlabel="class", ylabel="client", title="training samples per client and class")
    _plain(axes)
    figure.savefig(path)


def comparison_picture(results: Sequence[Result], table: Sequence[Row], path: Path) -> None:
    """Left: mean test score of the deployed models over the rounds, the band is min to max over seeds. Right: where
    each method ends, its score against the size of a model."""
    from matplotlib.figure import Figure

    measure = main_measure(results)
    figure = Figure(figsize=(9.5, 3.8), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for k, row in enumerate(table):
        color, style = LIGHT[k % len(LIGHT)], STYLES[k // len(LIGHT) % len(STYLES)]
        curves = [_curve(r, measure) for r in results if r["label"] == row.label]
        rounds = sorted(set.intersection(*(set(c) for c in curves)))
        values = np.array([[c[r] for r in rounds] for c in curves])  # (seeds, rounds)
        left.plot(rounds, values.mean(0), style, color=color, label=_name(row.label), linewidth=1.8)
        left.fill_between(rounds, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        right.errorbar(row.shipped_bytes, row.mean, yerr=row.std, fmt="o", color=color, capsize=3, markersize=7)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    left.set(xlabel="round", ylabel=_name(measure.axis), title="deployed models while they learn")
    right.set(xlabel="bytes of a client's model", title="where they end", xscale="log")
    sizes = sorted({row.shipped_bytes for row in table})
    right.set_xlim(sizes[0] / 2, sizes[-1] * 2)
    right.set_xticks(_apart(sizes), [size(s) for s in _apart(sizes)])
    right.minorticks_off()
    for axes in (left, right):
        _plain(axes)
    figure.savefig(path)


def leaderboard_picture(board: dict[str, Any]) -> Figure:
    """Score against bytes, a panel a federation: the reference at its numbers of bits, the best of the others at each,
    and the rest as dots, of which those far below are cut off."""
    from matplotlib.figure import Figure

    found = board["federations"]
    columns = min(3, len(found) + 1)
    rows = len(found) // columns + 1  # a place more, for the legend
    figure = Figure(figsize=(3.1 * columns, 2.6 * rows), layout="constrained", dpi=150)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    marks: list[Any] = []
    for axes, (title, federation) in zip(panels, found.items(), strict=False):
        axes.set(title=_name(title), ylabel=_name(leaderboard.measure_of(federation).axis), xscale="log")
        marks = _draw_federation(axes, federation, board["reference"]) or marks
        _plain(axes)
    for axes in panels[len(found) :]:
        axes.axis("off")
    names = [f"{board['reference']}, at so many bits", "the best other at the same", "the others"]
    about = {"frameon": False, "loc": "center", "title": "score against bytes of a model's file"}
    panels[len(found)].legend(marks, names, **about)
    return figure


def _draw_federation(axes: Axes, federation: dict[str, Any], reference: str) -> list[Any]:
    """What is drawn, for a legend; nothing where there is nobody to compare with."""
    ours, best, rest = [], [], []
    for _, cell, others in leaderboard.by_width(federation, reference):
        if cell is not None and others:
            ours.append(cell)
            best.append(others[0])
            rest += others[1:]
    if not ours:
        return []
    at = [(list(map(leaderboard.shipped, cells)), [c["mean"] for c in cells]) for cells in (ours, best, rest)]
    marks = [
        axes.errorbar(*at[0], [c["std"] or 0.0 for c in ours], fmt="o-", color=LIGHT[0], capsize=3, zorder=3),
        axes.plot(*at[1], "s--", color="0.35", markersize=4.5)[0],
        axes.scatter(*at[2], s=9, color="0.75"),
    ]
    for c in ours:
        axes.annotate(
            str(c["bits"]), (leaderboard.shipped(c), c["mean"]), (5, 6), textcoords="offset points", fontsize=8
        )
    m = leaderboard.measure_of(federation)
    ends = [c["mean"] + sign * (c["std"] or 0.0) for c in ours for sign in (-1, 1)] + at[1][1]
    low, high = min(ends), max(ends)
    room = (high - low or 1.0) * np.array([0.4, 0.1] if m.higher else [0.1, 0.4])
    axes.set_ylim(low - room[0], high + room[1])
    sizes = _apart(sorted(at[0][0]), 2.6)
    axes.set_xticks(sizes, [size(s) for s in sizes], fontsize=8)
    axes.minorticks_off()
    return marks


def curves_picture(lines: Sequence[dict[str, Any]], scored: str) -> Figure:
    """One run: the mean test score of the deployed models over the rounds, beside it the training losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2)
    by = 100 if "%" in scored else 1
    told = {"test": "what ships", "float_test": "before quantization", "validation": "on validation data"}
    losses = {"train_loss": "f(x)", "train_loss_quantized": "f(Q(x))"}
    for axes, names, factor in ((left, told, by), (right, losses, 1)):
        for k, (name, label) in enumerate(names.items()):
            points = [(line["round"], factor * line[name]) for line in lines if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), STYLES[k], marker=MARKS[k], label=label, color=LIGHT[k])
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
        _plain(axes)
    left.set(xlabel="round", ylabel=scored, title="test data, mean over the clients")
    right.set(xlabel="round", ylabel="loss", title="training, mean over the clients")
    return figure


def _curve(result: dict[str, Any], measure: Measure) -> dict[int, float]:
    told = ((line["round"], measure.of(line)) for line in result["lines"])
    return {round: value for round, value in told if value is not None}


def _apart(sizes: Sequence[float], ratio: float = 1.8) -> list[float]:
    """Those sizes whose labels do not overlap on a log axis."""
    kept: list[float] = []
    for value in sizes:
        if not kept or value > ratio * kept[-1]:
            kept.append(value)
    return kept


def check_picture(path: Path) -> None:
    """What a picture can be drawn to."""
    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise UserError(f"cannot draw {path}: allowed are .png, .svg and .pdf")


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# --- the figures of a report, for a paper ---


def report_pictures(c: Comparison, told: dict[str, Chart], note: str) -> dict[str, bytes]:
    """Every chart of a report as PNG and SVG: file name -> content. note: what is to be said about the data."""
    from matplotlib import rc_context

    found: dict[str, bytes] = {}
    small = [chart for name, chart in told.items() if name.startswith("diagnostics-")]
    drawn: dict[str, Callable[[Comparison, Any], Figure]] = {
        "accuracy": _accuracy_picture,
        "clients": _clients_picture,
        "sizes": _sizes_picture,
        "weights": _weights_picture,
        "diagnostics": _diagnostics_picture,
    }
    all_told: dict[str, Any] = {**told, **({"diagnostics": small} if small else {})}
    with rc_context({"svg.hashsalt": "qupel", "font.size": 9}):  # equal runs give equal files
        for name in drawn.keys() & all_told.keys():
            figure = drawn[name](c, all_told[name])
            if note:
                figure.supxlabel(_name(note), fontsize=6.5, color="0.35")
            for kind in ("png", "svg"):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                found[f"{name}.{kind}"] = buffer.getvalue()
    return found


def _new(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _color(s: Series) -> str:
    return LIGHT[s.color]


def _name(text: str) -> str:
    """A label as it is written: no formula begins at a $, and a leading underscore does not hide it from the legend."""
    text = plain(text).replace("$", r"\$")
    return " " + text if text.startswith("_") else text


def _draw_lines(axes: Axes, c: Comparison, chart: Chart) -> None:
    for line in chart["lines"]:
        s = c.series[line["series"]]
        x, y = (np.array(line[key], dtype=float) for key in ("x", "y"))  # None, which is no number, becomes nan
        marker = "o" if len(x) <= 40 else ""
        axes.plot(x, y, linestyle=STYLES[s.dash], marker=marker, markersize=3, color=_color(s), label=_name(s.label))
        if "low" in line:
            low, high = (np.array(line[key], dtype=float) for key in ("low", "high"))
            axes.fill_between(x, low, high, color=_color(s), alpha=0.13, linewidth=0)
    axes.set(xlabel=chart["x"], ylabel=_name(chart["y"]), yscale="log" if chart["log"] else "linear")
    _plain(axes)


def _accuracy_picture(c: Comparison, chart: Chart) -> Figure:
    many = len(c.series) > 8
    figure = _new(7.5 if many else 6, 4.2)
    axes = figure.add_subplot()
    _draw_lines(axes, c, chart)
    if many:
        axes.legend(frameon=False, fontsize=6.5, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=3)
    else:
        axes.legend(frameon=False, fontsize=8, handlelength=3)
    return figure


def _diagnostics_picture(c: Comparison, small: Sequence[Chart]) -> Figure:
    across = min(3, len(small))
    down = -(-len(small) // across)
    figure = _new(3.2 * across, 2.4 * down)
    for k, chart in enumerate(small):
        _draw_lines(figure.add_subplot(down, across, k + 1), c, chart)
    named = {text: line for axes in figure.axes for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = min(3, len(named))
    figure.legend(
        named.values(), named, loc="outside upper center", ncols=columns, frameon=False, fontsize=7, handlelength=3
    )
    return figure


def _clients_picture(c: Comparison, chart: Chart) -> Figure:
    rows = chart["rows"]
    figure = _new(6, 0.9 + 0.34 * len(rows))
    axes = figure.add_subplot()
    for k, row in enumerate(rows):
        s, values = c.series[row["series"]], np.array(row["values"])
        spread = np.random.default_rng(k).uniform(-0.28, 0.28, len(values))
        axes.scatter(values, k + spread, s=7, color=_color(s), alpha=0.6, linewidths=0)
        axes.plot([row["mean"]] * 2, [k - 0.38, k + 0.38], color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [_name(r["name"]) for r in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(xlabel=_name(chart["x"]))
    _plain(axes)
    return figure


def _sizes_picture(c: Comparison, chart: Chart) -> Figure:
    figure = _new(6, 4)
    axes = figure.add_subplot()
    points = [p for p in chart["points"] if p["x"] is not None and p["y"] is not None]
    groups = list(dict.fromkeys(p["group"] for p in points))
    for k, group in enumerate(groups):
        mine = sorted((p for p in points if p["group"] == group), key=lambda p: p["x"])
        s = c.series[mine[0]["series"]]
        label = s.label if len({p["series"] for p in mine}) == 1 else c.families[s.family]
        x = np.array([p["x"] for p in mine]) * 1.015 ** (k - (len(groups) - 1) / 2)  # bars side by side
        y, std = [p["y"] for p in mine], [p["std"] for p in mine]
        look = f"{MARKS[s.dash]}-"
        axes.errorbar(x, y, std, fmt=look, color=_color(s), label=_name(label), capsize=2.5, markersize=5, linewidth=1)
    axes.set(xlabel=chart["x"], ylabel=_name(chart["y"]), xscale="log")
    if points:
        ends = [min(p["x"] for p in points) / 1.5, max(p["x"] for p in points) * 2]
        shown = _apart(sorted({p["x"] for p in points}), 1.2)
        axes.set_xlim(*ends)
        axes.set_xticks(shown, [size(v) for v in shown])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
    _plain(axes)
    return figure


def _weights_picture(c: Comparison, chart: Chart) -> Figure:
    """Of the first series that tells its weights: a row for each client, a column for each of its first four layers."""
    told = [p for p in chart["panels"] if "histogram" in p] or chart["panels"]
    first = [p for p in told if p["series"] == told[0]["series"]]
    who = list(dict.fromkeys(p["client"] for p in first))[:3]
    layers = list(dict.fromkeys(p["layer"] for p in first))[:4]
    figure = _new(0.6 + 2.6 * max(2, len(layers)), 2.9 * len(who))
    ratios = [1.2, 1] * len(who)
    grid = figure.subplots(2 * len(who), len(layers), squeeze=False, height_ratios=ratios, sharex=False)
    for p in first:
        if p["client"] not in who or p["layer"] not in layers:
            continue
        row, column = 2 * who.index(p["client"]), layers.index(p["layer"])
        _draw_panel(grid[row][column], grid[row + 1][column], p, _color(c.series[p["series"]]))
        grid[row][column].set_title(_name(f"{p['layer']}, {p['bits']}"), fontsize=8)
    for k in range(len(who)):
        grid[2 * k][0].set_ylabel("epoch")
        grid[2 * k + 1][0].set_ylabel("share, % (sqrt)")
    for axes in grid[-1]:
        axes.set_xlabel("weight")
    figure.suptitle(_name(c.series[told[0]["series"]].label), fontsize=9)
    return figure


def _draw_panel(above: Axes, below: Axes, panel: Chart, color: str) -> None:
    centers, times = np.array(panel["centers"]), panel["times"]  # (epochs, m)
    ways = centers[-1] + times * (centers - centers[-1])
    above.plot(ways, panel["epochs"], marker="o", markersize=2, linewidth=1.2, color=color)
    if times > 1:
        above.annotate(f"moves shown {times} times", (1, 1), xycoords="axes fraction", ha="right", va="top", fontsize=6)
    above.invert_yaxis()
    above.tick_params(labelbottom=False)
    _plain(above)
    _plain(below)
    found = panel.get("histogram")
    if not found:
        below.set_visible(False)
        return
    edges = np.linspace(found["low"], found["high"], len(found["counts"]) + 1)
    share = np.sqrt(100 * np.array(found["counts"]) / sum(found["counts"]))
    below.stairs(share, edges, fill=True, color=color, alpha=0.6)
    for center in found["centers"]:
        below.axvline(center, color="black", linewidth=0.6, linestyle=":")
    ends = [min(found["low"], ways.min()), max(found["high"], ways.max())]
    room = 0.02 * (ends[1] - ends[0]) or 1.0
    for axes in (above, below):
        axes.set_xlim(ends[0] - room, ends[1] + room)
    top = [v for v in (0.1, 1, 4, 9, 25, 49, 100) if np.sqrt(v) <= share.max()]
    below.set_yticks(np.sqrt(top), [f"{v:g}" for v in top])
