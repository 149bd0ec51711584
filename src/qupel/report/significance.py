"""Is a difference between two methods more than chance?

Clients of one seed share class draws, a first model and a federation: they are not independent, and twenty of them do
not count as twenty. Seeds are independent. So a seed gives one number, the mean over its clients of the paired
differences, and a two-sided t-test over these numbers, with n - 1 degrees of freedom for n seeds, gives p and the
interval. It holds whatever the clients of a seed have in common, and speaks about new seeds: other class draws, other
first models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

WORDS = (
    "t-test over seeds: a seed counts once, with the mean of its clients' paired differences; not corrected for the "
    "number of comparisons"
)


@dataclass(frozen=True)
class Gain:
    """A mean difference over seeds with its 95 % confidence interval and p; one seed has neither."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def seed_difference(ours: ArrayLike, others: ArrayLike) -> float | None:
    """The mean of ours - others over the clients of one seed that both could judge (NaN: not); None: there is none."""
    d = np.asarray(ours, dtype=float) - np.asarray(others, dtype=float)
    d = d[np.isfinite(d)]
    return float(d.mean()) if len(d) else None


def over_seeds(differences: Mapping[int, float | None]) -> Gain | None:
    """From a seed's difference to the gain: mean, mean -+ t s / sqrt(n), p. Without spread there is nothing to judge a
    mean by, unless nothing differs at all."""
    d = np.array([v for v in differences.values() if v is not None])
    if not len(d):
        return None
    mean, n = float(d.mean()), len(d)
    if n < 2:
        return Gain(mean)
    if np.ptp(d) < 1e-9:  # equal but for rounding
        return Gain(mean, mean, mean, 1.0) if abs(mean) < 1e-9 else Gain(mean)
    error = float(d.std(ddof=1)) / math.sqrt(n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return Gain(mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, n - 1)))


def mark(p: float | None) -> str:
    """* p < 0.05, ** p < 0.01, *** p < 0.001."""
    return "" if p is None else "*" * sum(p < level for level in (0.05, 0.01, 0.001))
