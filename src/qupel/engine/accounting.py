"""What releases with Gaussian noise cost, (epsilon, delta), by the package dp-accounting.

Who is protected is a client with all of its data. What neighbouring federations are depends on how clients are drawn:

all, poisson   one client more or less; a sum moves by up to clip                     privacy loss distributions
fixed          one client replaced by another; a sum moves by up to 2 clip            Renyi (Wang et al., AISTATS 2019)
local          one client's data replaced; its own upload moves by up to 2 clip       privacy loss distributions

With poisson every client takes part with probability q, each by its own draw; with fixed exactly so many do. Both count
on it that whoever sees the releases does not see who was drawn. Epsilon is an upper bound, beyond 30 a looser one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from qupel.util.errors import UserError

Sampling = Literal["all", "poisson", "fixed", "local"]
LOOSE = 30.0  # an epsilon beyond which nobody asks for digits, and privacy loss distributions take long
ORDERS = (*(1 + k / 4 for k in range(1, 4)), *range(2, 65), 96, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Release:
    """One sum with noise on it. noise: its deviation in clips; share: of the clients that are drawn, `of` so many."""

    noise: float
    sampling: Sampling = "all"
    share: float = 1.0
    of: int = 0

    @property
    def neighbours(self) -> str:
        return "one client more or less" if self.sampling in {"all", "poisson"} else "one client replaced"

    def event(self) -> Any:
        """As dp-accounting has it; noise there is in units of what a sum can move by."""
        dp = package()
        if self.sampling == "poisson":
            return dp.PoissonSampledDpEvent(self.share, dp.GaussianDpEvent(self.noise))
        if self.sampling == "fixed":
            drawn = round(self.share * self.of)
            return dp.SampledWithoutReplacementDpEvent(self.of, drawn, dp.GaussianDpEvent(self.noise / 2))
        return dp.GaussianDpEvent(self.noise / (2 if self.sampling == "local" else 1))


@dataclass(frozen=True)
class Budget:
    """What all releases together may cost: epsilon (None: whatever it is) at this delta."""

    delta: float
    epsilon: float | None = None


Releases = Mapping[Release, int]  # how many of each


def epsilon(releases: Releases, delta: float) -> float:
    """What these releases cost together, at this delta; whoever chose the later ones may have seen the earlier."""
    made = {release: count for release, count in releases.items() if count}
    if not made:
        return 0.0
    if len({release.neighbours for release in made}) > 1:
        raise UserError(
            "privacy: releases for fixed and for other sampling of clients cannot be added up in one ledger"
        )
    if any(release.noise == 0 for release in made):
        return math.inf
    return _epsilon(tuple(sorted(made.items(), key=lambda item: tuple(asdict(item[0]).values()))), delta)


@lru_cache(maxsize=4096)
def _epsilon(releases: tuple[tuple[Release, int], ...], delta: float) -> float:
    dp = package()
    relations, replaced = dp.NeighboringRelation, releases[0][0].neighbours != "one client more or less"
    relation = relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE

    def composed(accountant: Any) -> float:
        for release, count in releases:
            accountant.compose(release.event(), count)
        return float(accountant.get_epsilon(delta))

    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    with quiet():
        bound = composed(RdpAccountant(orders=ORDERS, neighboring_relation=relation))
        if bound > LOOSE or any(release.sampling == "fixed" for release, _ in releases):
            return bound
        # of one Gaussian both relations are the same once the noise is in units of what it hides
        return min(bound, composed(PLDAccountant(relations.ADD_OR_REMOVE_ONE)))


def noise_for(target: float, delta: float, cost: Callable[[float], Releases]) -> float:
    """The least noise, rounded up to four digits, with which the releases `cost(noise)` stay within a target."""
    low, high = 1e-3, 1.0  # too little, enough
    while (at_high := epsilon(cost(high), delta)) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise UserError(f"privacy.target_epsilon = {target:g}: no noise is enough for delta = {delta:g}")
    if (at_low := epsilon(cost(low), delta)) <= target:
        raise UserError(f"privacy.target_epsilon = {target:g}: next to no noise is enough; give a smaller one")
    side = 1
    while high / low > 1.001:  # log epsilon is nearly a line over log noise; a little to either side of it in turn
        along = math.log(at_low / target) / math.log(at_low / at_high)
        tried = low * (high / low) ** min(max(along, 0.05), 0.95) * (1 + 2e-4 * side)
        tried, side = min(max(tried, low * 1.0003), high / 1.0003), -side
        at = epsilon(cost(tried), delta)
        if at <= target:
            high, at_high = tried, at
        else:
            low, at_low = tried, at
    step = 10.0 ** (math.floor(math.log10(high)) - 3)
    return float(f"{math.ceil(high / step) * step:.4g}")


def package() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise UserError("privacy: dp-accounting is not installed; pip install 'qupel[privacy]'") from None
    return dp_accounting


@contextmanager
def quiet() -> Iterator[None]:
    """It warns of every order that it leaves out, which only makes the bound looser."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
