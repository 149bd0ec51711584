"""How hyperparameters change over a run: a value per epoch, the clock that says where a run is, and prox strengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from qupel.core.prox import Pull


@dataclass(frozen=True)
class Clock:
    """Where a phase is. `step` counts from 0 and follows the server's round, not a local counter."""

    step: int
    steps: int  # of the whole phase
    epoch_steps: float  # steps that make an epoch
    share: float = 1.0  # of the phase's steps, that a client is expected to make

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 1 (as in the paper's lambda(t) = 1e-4 t)."""
        return math.floor(self.time + 1e-9)

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
    A setting given this way does not depend on the budget or on the layer's width. Where clients are sampled, the sum
    is over the steps that a client is expected to make."""

    travel: float


@dataclass(frozen=True)
class Follow:
    """A center-prox strength relative to the layer: a center with an average share of the layer's weights may move at
    most `follow` half-gaps a step toward the median of its weights."""

    follow: float


@lru_cache(maxsize=64)
def _total_ramp(eta1: Schedule, steps: int, epoch_steps: float) -> float:
    """sum over the phase's steps of eta1 * epoch."""
    clocks = (Clock(step, steps, epoch_steps) for step in range(steps))
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
    total = clock.share * _total_ramp(eta1, clock.steps, clock.epoch_steps)
    share = eta1(clock.time) * clock.epoch / total if total > 0 else 0.0
    return 2 * strength.travel * half_gap(centers) * share


def travelled(
    strength: Schedule | Travel, eta1: Schedule, clock: Clock, centers: Tensor, made: np.ndarray | None = None
) -> float:
    """Prox travel of a weight up to this step, sum_t eta1 lambda(t)/2, in half-gaps of a layer with these centers; over
    the steps of the phase that a client made, by default all so far."""
    gap = float(half_gap(centers))
    if not gap:
        return 0.0
    pulls = _pulls(strength, eta1, clock.steps, clock.epoch_steps, clock.share)  # (steps,)
    total = float(pulls[slice(clock.step + 1) if made is None else made].sum()) / 2
    return total / gap if isinstance(strength, Schedule) else total


@lru_cache(maxsize=64)
def _pulls(strength: Schedule | Travel, eta1: Schedule, steps: int, epoch_steps: float, share: float) -> np.ndarray:
    """`weight_pull` at each step of a phase, for a layer whose half-gap is 1 (steps,)."""
    one = torch.tensor([-1.0, 1.0])
    return np.array([weight_pull(strength, eta1, Clock(k, steps, epoch_steps, share), one) for k in range(steps)])


def center_pull(strength: Schedule | Follow, eta2: Schedule, clock: Clock, centers: Tensor, size: int) -> Pull:
    """t = eta2 * lambda_c of one step for one layer of `size` weights."""
    if isinstance(strength, Schedule):
        return eta2(clock.time) * strength(clock.time)
    return 2 * strength.follow * half_gap(centers) * centers.shape[-1] / size
