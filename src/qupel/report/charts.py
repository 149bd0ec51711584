"""What the figures of a report show, as plain numbers. The page (`page.js`) and the pictures (`figures.py`) both draw
from here, so that they cannot differ.

A series is a method of a run. Its color is that of its family (the method), its dashes those of its variant (the run,
where there are several; the column, in a table of the paper).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qupel.report.measure import ACCURACY, Measure, main_measure, other_measures
from qupel.report.runs import Run, place
from qupel.report.tables import Result

# Six hues that stay apart for every common kind of color vision, at least 3:1 against white and the dark page.
LIGHT = ("#2264d8", "#d27f41", "#116108", "#5b3176", "#2fa0c6", "#b94371")
DARK = ("#3d86f0", "#fa8f0e", "#5bcfa5", "#c28ce9", "#92edfe", "#c57a92")
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "1 4")
MOST_DOTS = 20_000  # more clients than that are not drawn one by one

Chart = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """A method of a run, with its cells by seed. `family` and `variant` are indices into the lists of a Comparison."""

    label: str
    family: int
    variant: int
    results: tuple[Result, ...]

    @property
    def color(self) -> int:
        return self.family % len(LIGHT)

    @property
    def dash(self) -> int:
        return (self.variant + self.family // len(LIGHT)) % len(DASHES)


@dataclass(frozen=True)
class Comparison:
    families: tuple[str, ...]
    variants: tuple[str, ...]
    series: tuple[Series, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """The finished methods of these runs. Families and variants are those of all methods, finished or not, so that
    colors stay while a run goes on."""
    alone = len(runs) == 1
    found: list[tuple[str, str, str, tuple[Result, ...]]] = []
    for run in runs:
        for label in run.config["methods"]:
            family, variant = place(label) if run.table else (label, "")
            family = family or label  # a label without a column
            if not alone:
                variant = f"{run.name}, {variant}" if variant else run.name
            cells = tuple(r for r in run.results if r["label"] == label)
            found.append((run.name_of(label, alone), family, variant, cells))
    families = list(dict.fromkeys(f for _, f, _, _ in found))
    variants = list(dict.fromkeys(v for _, _, v, _ in found))
    series = (Series(told, families.index(f), variants.index(v), cells) for told, f, v, cells in found if cells)
    return Comparison(tuple(families), tuple(variants), tuple(series))


# --- the charts ---


def all_charts(c: Comparison) -> dict[str, Chart]:
    """Every chart that these runs have numbers for, by its name."""
    found: dict[str, Chart | None] = {}
    for k, m in enumerate(measures(c)):
        of = f":{k}" if k else ""  # of another metric, which the page lets choose
        found |= {f"accuracy{of}": accuracy(c, m), f"clients{of}": clients(c, m), f"sizes{of}": sizes(c, m)}
    told = {name: chart for name, chart in (found | {"weights": weights(c)}).items() if chart}
    return told | {f"diagnostics-{k}": chart for k, chart in enumerate(diagnostics(c))}


def measures(c: Comparison) -> list[Measure]:
    """What the clients are judged by, and every other metric that is told."""
    results = [r for s in c.series for r in s.results]
    return [main_measure(results), *other_measures(results)]


def accuracy(c: Comparison, m: Measure = ACCURACY) -> Chart:
    """Mean test score of the deployed models over epochs; the band: lowest to highest seed."""
    return {"kind": "lines", "x": "epoch", "y": m.axis, "unit": _unit(m), "log": False, "lines": _lines(c, m.of)}


def _unit(m: Measure) -> str:
    return "%" if m.percent else ""


def diagnostics(c: Comparison) -> list[Chart]:
    """One small chart for every number that the lines of metrics carry as a diagnostic; an average together with its
    bound (`qupel.paper.diagnostics`). The count of steps is no diagnostic, the count of dead centers is one."""
    told = (_diagnosed(line) for s in c.series for r in s.results for line in r["lines"])
    keys = dict.fromkeys(k for d in told for k, v in d.items() if isinstance(v, int | float))
    bounded = "G2_average" in keys and "G2_bound" in keys
    charts = []
    for key in keys:
        if key == "step" or (bounded and key == "G2_bound"):
            continue
        lines, name = _diagnostic(c, key), key.replace("_", " ")
        if bounded and key == "G2_average":
            lines, name = lines + _diagnostic(c, "G2_bound"), f"{name}, its bound above"
        values = [v for line in lines for v in line["y"] if v is not None]
        if values:
            log = min(values) > 0 and max(values) > 1000 * min(values)
            charts.append({"kind": "lines", "x": "epoch", "y": name, "log": log, "lines": lines})
    return charts


def _diagnostic(c: Comparison, key: str) -> list[Chart]:
    return _lines(c, lambda line: _diagnosed(line).get(key))


def _diagnosed(line: dict[str, Any]) -> dict[str, Any]:
    return line["diagnostics"] | {"dead_centers": line["dead_centers"]} if "diagnostics" in line else {}


def _lines(c: Comparison, value: Callable[[dict[str, Any]], float | None]) -> list[Chart]:
    """Mean, lowest and highest over the seeds of a series, at the rounds that all of them have."""
    lines = []
    for k, s in enumerate(c.series):
        curves = [{line["round"]: (line["epoch"], value(line)) for line in r["lines"]} for r in s.results]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        rounds = [r for r in rounds if all(curve[r][1] is not None for curve in curves)]
        if not rounds:
            continue
        values = np.array([[curve[r][1] for r in rounds] for curve in curves], dtype=float)  # (seeds, rounds)
        line = {"series": k, "x": _numbers(curves[0][r][0] for r in rounds), "y": _numbers(values.mean(0))}
        if len(curves) > 1:
            line |= {"low": _numbers(values.min(0)), "high": _numbers(values.max(0))}
        lines.append(line)
    return lines


def clients(c: Comparison, m: Measure = ACCURACY) -> Chart | None:
    """Every client's last test score, a row for each series and bit width, and one for clients that were kept out of
    training; None where no run tells its clients, or where they are too many to be drawn."""
    rows: list[Chart] = []
    for k, s in enumerate(c.series):
        points: dict[float, list[tuple[float, int, int]]] = {}  # bits -> (score, client, seed)
        unseen: list[tuple[float, int, int]] = []
        for r in s.results:
            told = r["lines"][-1].get("clients", {"bits": []})
            for i, (a, bits) in enumerate(zip(m.each(told), told["bits"], strict=False)):
                if a is not None and math.isfinite(a):
                    points.setdefault(bits, []).append((a, i, r["seed"]))
            late = enumerate(m.each(r.get("unseen", {})))
            unseen += [(a, i, r["seed"]) for i, a in late if a is not None and math.isfinite(a)]
        named = [(_name(s, bits, points), found) for bits, found in sorted(points.items())]
        for name, found in [*named, *([(f"{s.label}, unseen", unseen)] if unseen else [])]:
            values, who, seeds = zip(*found, strict=True)
            mean = float(np.mean(values))
            row = {"series": k, "name": name, "mean": number(mean), "shown": m.text(mean)}
            rows.append(row | {"values": _numbers(values), "clients": list(who), "seeds": list(seeds)})
    if max((max(row["clients"]) for row in rows), default=0) == 0:
        return None  # one client, or nothing told
    if sum(len(row["values"]) for row in rows) > MOST_DOTS:
        return None
    return {"kind": "dots", "x": m.axis, "unit": _unit(m), "name": m.name, "rows": rows}


def sizes(c: Comparison, m: Measure = ACCURACY) -> Chart:
    """Last test score against the bytes of a client's model: the mean over clients and seeds, with the std over
    seeds. A few series have a point for each bit width, many one each; `group`: points that a line joins."""
    points: list[Chart] = []
    few = len(c.series) <= 8
    for k, s in enumerate(c.series):
        groups: dict[float, list[tuple[float, float]]] = {}  # bits -> per seed (bytes, score)
        for r in s.results:
            for bits, size, mean in _by_width(r, few, m):
                groups.setdefault(bits, []).append((size, mean))
        for bits, per_seed in sorted(groups.items()):
            size, mean = np.array(per_seed).T
            std = float(np.std(mean, ddof=1)) if len(mean) > 1 else 0.0
            point = {
                "series": k,
                "name": _name(s, bits, groups),
                "x": number(np.mean(size)),
                "y": number(np.mean(mean)),
            }
            points.append(point | {"std": number(std), "group": k if few else s.family})
    about = {"kind": "scatter", "x": "bytes of a client's model", "y": m.axis, "unit": _unit(m), "name": m.name}
    return about | {"points": points}


def _name(s: Series, bits: float, widths: Collection[float]) -> str:
    """A series, with the bit width where it has several."""
    return f"{s.label}, {width(bits)}" if len(widths) > 1 else s.label


def _by_width(result: Result, apart: bool, m: Measure) -> list[tuple[float, float, float]]:
    """(bits, mean bytes, mean score) of the clients of each bit width; of all where they are not told, or not wanted
    apart. Bytes of the files, of their floors where no models were saved."""
    line, files = result["lines"][-1], result.get("files", ())
    told = line.get("clients")
    if not told or not apart:
        mean = m.of(line)
        size = float(np.mean(files)) if files else line["model_bytes"]
        return [] if mean is None else [(line["bits"], size, mean)]
    found: dict[float, list[tuple[float, float]]] = {}
    sizes = files if len(files) == len(told["test"]) else told["bytes"]
    for a, bits, size in zip(m.each(told), told["bits"], sizes, strict=False):
        if a is not None:
            found.setdefault(bits, []).append((size, a))
    return [(bits, float(np.mean([s for s, _ in v])), float(np.mean([a for _, a in v]))) for bits, v in found.items()]


def weights(c: Comparison) -> Chart | None:
    """How centers moved, and the weights around them before fine-tuning: a panel for every series, client and layer
    that a run tells of (its first seed). None where no run does."""
    panels = []
    for k, s in enumerate(c.series):
        lines = [line for line in s.results[0]["lines"] if line.get("weights")]
        for told in lines[-1]["weights"] if lines else []:
            mine = [(line, w) for line in lines for w in line["weights"] if w["client"] == told["client"]]
            for layer in told["centers"]:
                paths = [(line["epoch"], w["centers"][layer]) for line, w in mine if layer in w["centers"]]
                panel = {"series": k, "client": told["client"], "bits": width(told["bits"]), "layer": layer}
                panel |= {
                    "epochs": _numbers(e for e, _ in paths),
                    "centers": [_numbers(centers) for _, centers in paths],
                    "times": _magnified(np.array([centers for _, centers in paths])),
                }
                taken = [(line["epoch"], w) for line, w in mine if layer in w.get("histograms", {})]
                if taken:
                    epoch, w = taken[-1]
                    panel["histogram"] = {"epoch": number(epoch), **w["histograms"][layer]}
                    panel["histogram"]["centers"] = _numbers(w["centers"][layer])
                panels.append(panel)
    return {"kind": "weights", "panels": panels} if panels else None


def _magnified(centers: np.ndarray) -> int:
    """How many times a picture shows the ways of centers (epochs, m), so that they are seen and do not meet."""
    last = centers[-1]
    room, most = 0.4 * np.diff(last).min(initial=np.inf), np.abs(centers - last).max()
    return max((f for f in (2, 5, 10, 20, 50, 100) if most > 0 and np.isfinite(room) and f * most <= room), default=1)


# --- numbers ---


def width(bits: float) -> str:
    """2.0 -> '2-bit', 32 -> 'full precision'."""
    return "full precision" if bits >= 32 else f"{bits:.3g}-bit"


def number(value: float) -> float | None:
    """Six significant digits; None for what is not finite, which JSON has no word for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [number(v) for v in values]
