"""Measured against bound, on log axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qupel.report.charts import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
_RULES = {"exact": "exact center prox", "first_order": "first order", "paper": "sign as printed"}


def theorem1_picture(rows: Sequence[Row], path: Path) -> None:
    """A row of panels for each problem: the running average of |G|^2 and its bounds; F above its least value seen; in
    how many steps it rose so far."""
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys(row["problem"] for row in rows))
    figure = Figure(figsize=(13, 3.4 * len(problems)), layout="constrained", dpi=120)
    panels = figure.subplots(len(problems), 3, squeeze=False)
    for (left, middle, right), problem in zip(panels, problems, strict=True):
        mine = [row for row in rows if row["problem"] == problem]
        least = min(min(row["curve"]["objective"]) for row in mine)
        for row, color in zip(mine, LIGHT, strict=False):
            curve, exact = row["curve"], row["rule"] == "exact"
            for axes, values in (
                (left, curve["average"]),
                (middle, [max(value - least, 1e-14) for value in curve["objective"]]),
                (right, curve["increases"]),
            ):  # thick: curves that agree with it lie on top
                axes.plot(curve["T"], values, color=color, label=_RULES[row["rule"]], linewidth=3.5 if exact else 1.4)
            if exact:
                left.plot(curve["T"], curve["bound"], color="black", linestyle="--", label="Theorem 1")
                left.plot(curve["T"], curve["sharp"], color="black", linestyle=":", label="sharper, same proof")
        left.set(xlabel="T", yscale="log", title=f"{problem}: average of |G|² over T steps")
        middle.set(xlabel="step", yscale="log", ylim=(1e-7, None), title=f"{problem}: F − {least:.4f}")
        right.set(xlabel="step", yscale="symlog", title=f"{problem}: steps so far in which F rose")
        for axes in (left, middle, right):
            axes.set_xscale("log")
            _finish(axes)
    _save(figure, path)


def theorem2_picture(rows: Sequence[Row], path: Path) -> None:
    """Left: the average of |G|^2 over runs of T steps, one curve for each share of own data, with its bounds. Right:
    the floor that it falls to, against kappa."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    for row, color in zip(rows, LIGHT, strict=False):
        label = f"{100 * row['share']:.0f} % of one own class"
        left.loglog(row["T"], row["average"], "o-", color=color, label=label, linewidth=1.8, markersize=4)
        left.loglog(row["T"], row["bound"], "--", color=color, linewidth=0.9)
        left.loglog(row["T"], row["sharp"], ":", color=color, linewidth=0.9)
        if row["kappa"][-1] > 1e-20:
            right.loglog(row["kappa"][-1], row["floor"], "o", color=color, markersize=7)
            right.loglog(row["kappa"][-1], row["sharp"][-1], "_", color=color, markersize=12)
    T = rows[0]["T"]
    guide = [0.5 * min(row["average"][0] for row in rows) * (t / T[0]) ** -0.5 for t in T]
    left.loglog(T, guide, color="black", linewidth=1, label="1/√T")
    left.set(xlabel="T", title="average of |G|²; -- Theorem 2, ·· sharper")
    kappas = sorted(row["kappa"][-1] for row in rows if row["kappa"][-1] > 1e-20)
    if kappas:
        right.loglog([kappas[0] / 2, kappas[-1] * 2], [kappas[0] / 2, kappas[-1] * 2], color="black", linewidth=1)
    right.set(xlabel="κ", title=f"floor at T = {T[-1]}; line: κ, bar: sharper bound")
    for axes in (left, right):
        _finish(axes)
    _save(figure, path)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    """PNG and SVG beside each other, each complete or absent."""
    for suffix in (".png", ".svg"):
        temporary = path.with_name(f".{path.name}{suffix}")
        figure.savefig(temporary, format=suffix[1:])
        temporary.replace(path.with_suffix(suffix))
