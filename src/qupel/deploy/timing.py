"""What a run costs, in time and energy, and how sure that is. Needs no torch.

A model is run in short stretches, with 1 and with 64 inputs by turns, so that a busy moment of the machine strikes both
and is one stretch of many. A stretch gives the median of its runs: neighbouring runs are alike, and as single numbers
they would promise more than they know. What is told is the median of the stretches, with an interval of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple, TypeVar

from qupel.deploy import energy

Way = TypeVar("Way")
LEAST, MOST = 6, 20  # stretches; of fewer than six there is no interval


class Stretch(NamedTuple):
    seconds: float  # the median of its runs
    joules: float | None  # the mean of its runs; None where the machine does not tell


@dataclass(frozen=True)
class Middle:
    """A median, and the ends of a 95 % interval of it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    seconds: Middle
    joules: Middle | None


def stretch(run: Callable[[], object], seconds: float) -> Stretch:
    """Run for so long, at least once."""
    times: list[float] = []
    before = energy.counters()
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    spent = energy.joules(before, energy.counters())
    return Stretch(statistics.median(times), None if spent is None else spent / len(times))


def middle(values: Sequence[float]) -> Middle:
    """The median with [v_(r), v_(n+1-r)], the r-th smallest and the r-th largest of n independent values.

    The true median is below v_(r) when at most r - 1 values are below it, which has the probability
    P(B <= r - 1), B ~ Binomial(n, 1/2), whatever the distribution; above v_(n+1-r) likewise. r is the largest with
    2 P(B <= r - 1) <= 5 %: 1 for six values, 6 for twenty.
    """
    ordered, n = sorted(values), len(values)
    rank, ways = 0, 1  # ways: 2^n P(B <= rank)
    while 40 * ways <= 2**n:
        rank += 1
        ways += comb(n, rank)
    if not rank:
        raise ValueError(f"{n} values have no 95 % interval of their median; needed are {LEAST}")
    return Middle(statistics.median(ordered), ordered[rank - 1], ordered[n - rank])


def costs(timed: Callable[[Way, float], Stretch], ways: Sequence[Way], seconds: float = 1.0) -> list[Cost]:
    """Of each of these ways to run (such as: with how many inputs), in about so many seconds; of slow runs in more.

    timed  (way, seconds) -> a stretch; the first of each way is for warming up and not counted
    """
    length = seconds / MOST / len(ways)
    for way in ways:
        timed(way, length)
    found: list[list[Stretch]] = [[] for _ in ways]
    end = time.perf_counter() + 3 * seconds
    while len(found[0]) < LEAST or (len(found[0]) < MOST and time.perf_counter() < end):
        for way, mine in zip(ways, found, strict=True):
            mine.append(timed(way, length))
    return [_cost(mine) for mine in found]


def _cost(stretches: Sequence[Stretch]) -> Cost:
    told = [s.joules for s in stretches if s.joules is not None]
    return Cost(
        middle([s.seconds for s in stretches]),
        middle(told) if len(told) == len(stretches) else None,
    )
