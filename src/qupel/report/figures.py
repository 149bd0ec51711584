"""Figures, drawn without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qupel.errors import UserError
from qupel.report.paper import TABLES, place
from qupel.report.tables import Result, Row, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", (0, (6, 1)), (0, (5, 1, 1, 1)), (0, (4, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
COLORS = ("#1f5fa8", "#d1603d", "#5b8c3e", "#8a5aa8", "#c29a1b", "#3a9a9a", "#a8405f", "#666666")


def split_picture(counts: np.ndarray, labels: Sequence[str], path: Path) -> None:
    """Clients x classes: the area of a dot is the number of training samples."""
    from matplotlib.figure import Figure

    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise UserError(f"cannot draw {path}: allowed are .png, .svg and .pdf")
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
    """Left: mean test accuracy of the deployed models over the rounds, the band is min to max over seeds. Right: where
    each method ends, accuracy against the size of a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.8), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for k, row in enumerate(table):
        color = COLORS[k % len(COLORS)]
        curves = [_curve(r) for r in results if r["label"] == row.label]
        rounds = sorted(set.intersection(*(set(c) for c in curves)))
        values = np.array([[c[r] for r in rounds] for c in curves])  # (seeds, rounds)
        left.plot(rounds, values.mean(0), color=color, label=row.label, linewidth=1.8)
        left.fill_between(rounds, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        right.errorbar(row.model_bytes, row.mean, yerr=row.std, fmt="o", color=color, capsize=3, markersize=7)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    left.set(xlabel="round", ylabel="test accuracy, %", title="deployed models while they learn")
    right.set(xlabel="bytes of a client's model", title="where they end", xscale="log")
    sizes = sorted({row.model_bytes for row in table})
    right.set_xlim(sizes[0] / 2, sizes[-1] * 2)
    right.set_xticks(_apart(sizes), [size(s) for s in _apart(sizes)])
    right.minorticks_off()
    for axes in (left, right):
        _plain(axes)
    figure.savefig(path)


def epochs_picture(results: Sequence[Result], path: Path) -> None:
    """The paper's Figure 1: mean test accuracy of the deployed models over epochs, all schemes in one plot; the band is
    min to max over seeds. Color: the row of the table; line style and shade: its column."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.2), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(r["label"] for r in results))
    rows = list(dict.fromkeys(place(label)[0] for label in labels))
    columns = [c for c in TABLES["table2"].columns if any(place(label)[1] == c for label in labels)]
    for label in sorted(labels, key=lambda name: (rows.index(place(name)[0]), columns.index(place(name)[1]))):
        row, column = place(label)
        k = columns.index(column)
        curves = [{line["epoch"]: 100 * line["test"] for line in r["lines"]} for r in results if r["label"] == label]
        epochs = sorted(set.intersection(*(set(c) for c in curves)))
        values = np.array([[c[e] for e in epochs] for c in curves])  # (seeds, epochs)
        color = COLORS[rows.index(row) % len(COLORS)]
        shade = 1 - 0.13 * k
        axes.plot(
            epochs,
            values.mean(0),
            color=color,
            alpha=shade,
            linestyle=_DASHES[k],
            linewidth=1.6,
            label=f"{row}, {column}",
        )
        axes.fill_between(epochs, values.min(0), values.max(0), color=color, alpha=0.05, linewidth=0)
    axes.set(xlabel="epoch", ylabel="mean test accuracy of the clients, %")
    if note := next((r["data_note"] for r in results if r["data_note"]), ""):
        axes.set_title(note, fontsize=8, loc="left", color="#555555")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    _plain(axes)
    figure.savefig(path)


def _curve(result: dict[str, Any]) -> dict[int, float]:
    return {line["round"]: 100 * line["test"] for line in result["lines"]}


def _apart(sizes: Sequence[float]) -> list[float]:
    """Those sizes whose labels do not overlap on a log axis."""
    kept: list[float] = []
    for value in sizes:
        if not kept or value > 1.8 * kept[-1]:
            kept.append(value)
    return kept


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
