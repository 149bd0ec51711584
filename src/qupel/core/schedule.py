"""How hyperparameters change over a run: a value per epoch, the clock that says where a run is, and prox strengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from qupel.core.prox import Pull


@dataclass(frozen=True)
class Clock:
    """Where a phase is. `step` counts from 0 and follows the server's round, not a local counter."""

    step: int
    steps: int  # of the whole phase
    epoch_steps: int  # steps that make an epoch

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 1 (as in the paper's lambda(t) = 1e-4 t)."""
        return 1 + self.step // self.epoch_steps

    @property
    def time(self) -> float:
        """The same with its fraction: 1.5 is half way through the first epoch."""
        return 1 + self.step / self.epoch_steps


@dataclass(frozen=True)
class Schedule:
    """value(time) = (start + growth e) decay^(e-1) factor^(drops passed) cosine, e = the epoch at time + offset.

    Epochs count from 1. `cosine` > 0: a half cosine from 1 to 0 over that many epochs. A drop at k holds from k + 1 on.
    """

    start: float = 0.0
    growth: float = 0.0
    decay: float = 1.0
    drops: tuple[int, ...] = ()
    factor: float = 0.1
    cosine: float = 0.0
    offset: float = 0.0

    def __call__(self, time: float) -> float:
        e = math.floor(time + self.offset + 1e-9)
        value = (self.start + self.growth * e) * self.decay ** (e - 1)
        value *= self.factor ** sum(e > drop for drop in self.drops)
        if self.cosine:
            value *= 0.5 * (1 + math.cos(math.pi * min((time + self.offset - 1) / self.cosine, 1)))
        return value

    @staticmethod
    def constant(value: float) -> Schedule:
        """What a number in a config stands for."""
        return Schedule(value)

    def later(self, epochs: float) -> Schedule:
        """The same schedule seen from `epochs` epochs later: a phase goes on where the one before it stopped."""
        return replace(self, offset=self.offset + epochs)


@dataclass(frozen=True)
class Travel:
    """A prox strength relative to the layer: the total prox travel of a weight over the phase, sum_t eta1 lambda(t)/2,
    is `travel` times the layer's half-gap between centers. lambda grows linearly with the epoch, as in the paper.
    A setting given this way does not depend on the budget or on the layer's width."""

    travel: float


@dataclass(frozen=True)
class Follow:
    """A center-prox strength relative to the layer: a center with an average share of the layer's weights may move at
    most `follow` half-gaps a step toward the median of its weights."""

    follow: float


@lru_cache(maxsize=64)
def _total_ramp(eta1: Schedule, first: int, steps: int, epoch_steps: int) -> float:
    """sum over the phase's first steps of eta1 * epoch."""
    clocks = (Clock(step, steps, epoch_steps) for step in range(first))
    return sum(eta1(clock.time) * clock.epoch for clock in clocks)


def half_gap(centers: Tensor) -> Pull:
    """Half of the mean distance between neighbouring centers. (m,) -> a number, (k, m) -> (k, 1)."""
    gaps = 2 * (centers.shape[-1] - 1)
    if gaps == 0:
        return 0.0
    if centers.ndim == 1:
        return float(centers[-1] - centers[0]) / gaps
    return (centers[:, -1:] - centers[:, :1]).double() / gaps


def weight_pull(strength: Schedule | Travel, eta1: Schedule, clock: Clock, centers: Tensor) -> Pull:
    """t = eta1 * lambda of one step for one layer; `prox_weights` moves a weight by t/2."""
    if isinstance(strength, Schedule):
        return eta1(clock.time) * strength(clock.time)
    total = _total_ramp(eta1, clock.steps, clock.steps, clock.epoch_steps)
    share = eta1(clock.time) * clock.epoch / total if total > 0 else 0.0
    return 2 * strength.travel * half_gap(centers) * share


def travelled(strength: Schedule | Travel, eta1: Schedule, clock: Clock, centers: Tensor) -> float:
    """Prox travel of a weight up to this step, sum_t eta1 lambda(t)/2, in half-gaps of a layer with these centers."""
    gap = float(half_gap(centers))
    if isinstance(strength, Schedule):
        return _total_pull(strength, eta1, clock) / (2 * gap) if gap else 0.0
    total = _total_ramp(eta1, clock.steps, clock.steps, clock.epoch_steps)
    return strength.travel * _total_ramp(eta1, clock.step + 1, clock.steps, clock.epoch_steps) / total if total else 0.0


@lru_cache(maxsize=64)
def _total_pull(strength: Schedule, eta1: Schedule, clock: Clock) -> float:
    """sum over the phase's steps up to this one of eta1 * lambda."""
    clocks = (Clock(step, clock.steps, clock.epoch_steps) for step in range(clock.step + 1))
    return sum(eta1(c.time) * strength(c.time) for c in clocks)


def center_pull(strength: Schedule | Follow, eta2: Schedule, clock: Clock, centers: Tensor, size: int) -> Pull:
    """t = eta2 * lambda_c of one step for one layer of `size` weights."""
    if isinstance(strength, Schedule):
        return eta2(clock.time) * strength(clock.time)
    return 2 * strength.follow * half_gap(centers) * centers.shape[-1] / size
