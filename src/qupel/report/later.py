"""Clients that joined later, as a table: what adapting gave each of them over the shared model as it is, and the first
method over the others. Differences are client by client, p is over seeds (`significance`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qupel.report.measure import Measure, main_measure
from qupel.report.significance import Gain, mark, over_seeds, seed_difference
from qupel.report.tables import Result, size

_LEGEND = (
    "Clients that took no part in training. adapted: the model that each of them ships; shared: the method's shared "
    "model on them, as it is, at full precision (of a method that sends nothing its first model). gain: adapted minus "
    "shared; {first} minus: its adapted models minus the method's. b/s/w: at how many clients better, the same, worse, "
    "mean over seeds."
)


@dataclass(frozen=True)
class Against:
    """Paired differences: over seeds, and at how many clients of a seed it is better, the same and worse."""

    gain: Gain
    clients: tuple[float, float, float]

    def cells(self, m: Measure) -> list[str]:
        g = self.gain
        interval = "" if g.low is None else f"{m.text(g.low, sign='+')} to {m.text(g.high, sign='+')}"
        p = "" if g.p is None else "<1e-4" if g.p < 1e-4 else f"{g.p:.4f}"
        counts = "/".join(f"{n:.0f}" for n in self.clients)
        return [f"{m.text(g.mean, sign='+')}{mark(g.p)}", interval, p, counts]


@dataclass(frozen=True)
class Late:
    """A method's clients that joined later; means over seeds."""

    label: str
    clients: int
    mean: float
    std: float | None  # over seeds
    shared: float
    file_bytes: float
    adapting: Against  # adapted minus shared
    first: Against | None  # the first method's adapted models minus these


def with_late(results: Sequence[Result]) -> list[Result]:
    """Cells that judged such clients, with their adapted models and with the shared one."""
    return [r for r in results if any(v is not None for v in r.get("unseen", {}).get("global", ()))]


def rows(results: Sequence[Result]) -> list[Late]:
    """One for each method whose cells have such clients."""
    m = main_measure(results)
    found: dict[str, dict[int, Result]] = {}
    for r in with_late(results):
        found.setdefault(r["label"], {})[r["seed"]] = r["unseen"]
    first = next(iter(found.values()), {})
    return [_row(label, cells, None if cells is first else first, m) for label, cells in found.items()]


def _row(label: str, cells: dict[int, Result], first: dict[int, Result] | None, m: Measure) -> Late:
    adapted, shared = ({s: _scores(c, key, m) for s, c in cells.items()} for key in ("test", "global"))
    means = [float(np.nanmean(v)) for v in adapted.values()]
    best = None if first is None else {s: _scores(c, "test", m) for s, c in first.items() if s in cells}
    return Late(
        label=label,
        clients=max(len(v) for v in adapted.values()),
        mean=float(np.mean(means)),
        std=float(np.std(means, ddof=1)) if len(means) > 1 else None,
        shared=float(np.mean([np.nanmean(v) for v in shared.values()])),
        file_bytes=float(np.mean([np.mean(c.get("files") or c["bytes"]) for c in cells.values()])),
        adapting=_against(adapted, shared, m),
        first=None if not best else _against(best, adapted, m),
    )


def _scores(told: Result, key: str, m: Measure) -> np.ndarray:
    """(clients,) as they are shown; NaN: without a score."""
    return np.array([np.nan if v is None else m.shown(v) for v in told[key]])


def _against(ours: dict[int, np.ndarray], others: dict[int, np.ndarray], m: Measure) -> Against:
    sign = 1 if m.higher else -1
    pairs = {seed: (sign * ours[seed], sign * others[seed]) for seed in ours}
    gain = over_seeds({seed: seed_difference(*pair) for seed, pair in pairs.items()})
    signs = [np.sign(np.round(a - b, 9)) for a, b in pairs.values()]
    counts = [float(np.mean([(s == want).sum() for s in signs])) for want in (1, 0, -1)]
    return Against(gain or Gain(float("nan")), (counts[0], counts[1], counts[2]))


def legend(results: Sequence[Result]) -> str:
    return _LEGEND.format(first=with_late(results)[0]["label"])


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    m, found = main_measure(results), rows(results)
    told = ["95 % interval", "p", "b/s/w"]
    head = ["method", f"adapted: {m.head}", "shared", "file", "gain", *told]
    several = len(found) > 1
    head += [f"{found[0].label} minus", *told] if several else []
    body = []
    for r in found:
        mean = m.text(r.mean) + ("" if r.std is None else f" ± {m.text(r.std)}")
        against = r.first.cells(m) if r.first else [""] * 4
        body.append([r.label, mean, m.text(r.shared), size(r.file_bytes), *r.adapting.cells(m)])
        body[-1] += against if several else []
    return head, body
