"""A federation of several networks as a table: clients by network and bits, and the first method over the others at the
same clients. Differences are client by client, p is over seeds (`significance`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qupel.report.measure import Measure, main_measure
from qupel.report.significance import Gain, mark, over_seeds, seed_difference
from qupel.report.tables import Result, size

ALL = "all"
LEGEND = (
    "Clients by their network and their bits, mean ± std over seeds. {first} minus: {first} at the same clients, "
    "whatever their network there, minus the method (less is better: the other way round), with its 95 % confidence "
    "interval."
)


@dataclass(frozen=True)
class Group:
    """The clients of a method that have one network, and one number of bits, or all of them (None)."""

    label: str
    network: str
    bits: float | None
    clients: int
    mean: float
    std: float | None  # over seeds
    bytes: float
    first: Gain | None  # the first method at these clients minus these


def with_networks(results: Sequence[Result]) -> bool:
    """Whether any client has a network of its own, and clients tell their scores."""
    return any("networks" in r for r in results) and all(r["lines"][-1].get("clients") for r in results)


def groups(results: Sequence[Result]) -> list[Group]:
    m, cells = main_measure(results), dict[str, dict[int, Result]]()
    for r in results:
        cells.setdefault(r["label"], {})[r["seed"]] = r
    first = next(iter(cells.values()))
    found = []
    for label, seeds in cells.items():
        kinds = {kind for r in seeds.values() for kind in _kinds(r)}
        for network in sorted({name for name, _ in kinds}):
            widths = sorted(bits for name, bits in kinds if name == network)
            for bits in [*widths, None] if len(widths) > 1 else widths:
                found.append(_group(label, network, bits, seeds, None if seeds is first else first, m))
    return found


def _kinds(r: Result) -> list[tuple[str, float]]:
    """(network, bits) of each client."""
    told = r["lines"][-1]["clients"]
    shared = r.get("config", {}).get("model", {}).get("name") or "shared"
    names = r.get("networks") or [""] * len(told["bits"])
    return [(name or shared, bits) for name, bits in zip(names, told["bits"], strict=False)]


def _group(
    label: str, network: str, bits: float | None, seeds: dict[int, Result], first: dict[int, Result] | None, m: Measure
) -> Group:
    scores, sizes, differences = {}, [], {}
    for seed, r in seeds.items():
        at = [i for i, (name, b) in enumerate(_kinds(r)) if name == network and bits in (None, b)]
        told = r["lines"][-1]["clients"]
        files = r.get("files") or told["bytes"]
        scores[seed] = _scores(r, at, m)
        sizes += [files[i] for i in at]
        if first is not None and seed in first:
            pair = _scores(first[seed], at, m), scores[seed]
            differences[seed] = seed_difference(*(pair if m.higher else pair[::-1]))
    means = [float(np.nanmean(v)) for v in scores.values() if np.isfinite(v).any()]
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    count = max(len(v) for v in scores.values())
    mean = float(np.mean(means)) if means else float("nan")
    return Group(label, network, bits, count, mean, std, float(np.mean(sizes)), over_seeds(differences))


def _scores(r: Result, at: Sequence[int], m: Measure) -> np.ndarray:
    """Of these clients, as they are shown; NaN: without a score."""
    values = m.each(r["lines"][-1]["clients"])
    return np.array([np.nan if values[i] is None else values[i] for i in at], dtype=float)


def legend(results: Sequence[Result]) -> str:
    return LEGEND.format(first=results[0]["label"])


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    m, found = main_measure(results), groups(results)
    several = len({g.label for g in found}) > 1
    head = ["method", "network", "bits", "clients", m.head, "file"]
    head += [f"{found[0].label} minus", "95 % interval"] if several else []
    body = []
    for g in found:
        mean = m.text(g.mean) + ("" if g.std is None else f" ± {m.text(g.std)}")
        bits = ALL if g.bits is None else f"{g.bits:.3g}"
        row = [g.label, g.network, bits, str(g.clients), mean, size(g.bytes)]
        if several and g.first is not None:
            low, high = (m.text(v, sign="+") for v in (g.first.low, g.first.high))
            row += [
                f"{m.text(g.first.mean, sign='+')}{mark(g.first.p)}",
                "" if g.first.low is None else f"{low} to {high}",
            ]
        body.append(row + [""] * (len(head) - len(row)))
    return head, body
