"""PARQ: a latent model takes the gradient at its proximal point, whose map bends from the identity into a staircase."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.quantize import pick
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, best_levels, descend_at, nearest_levels, quantizers, straight_through
from qupel.tasks.task import Batch, Task


@quantizers.register("parq", paper="Jin, Ma, Liu, Gromov, Defazio, Xiao, ICML 2025")
@dataclass(frozen=True)
class PARQ:
    """y <- y - eta1 grad f(prox(y));  prox(y) = clip(m + (y - m)/r, c_j, c_{j+1}) between two levels with middle m.

    `State.x` holds y. 1/r is the slope: r falls from 1 (the identity within the levels) to 0 (Q(y)) over the phase, as
    a mirrored sigmoid of this steepness between the shares `begin` and `end` of its steps; before `begin` prox(y) = y.
    Levels: signs times mean |y| for 1 bit, else one Lloyd step a step. What ships is Q(y).
    """

    steepness: float = 10.0
    begin: float = 0.0
    end: float = 0.9

    def __post_init__(self) -> None:
        if not (0 <= self.begin < self.end and self.steepness > 0):
            raise ValueError(f"begin = {self.begin} before end = {self.end}, steepness = {self.steepness} above 0")

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, self._placed(before.x, start_codebook(layout, before.x, plan, "kmeans"))

    def _placed(self, y: Tensor, codebook: Codebook) -> Codebook:
        return codebook.with_centers(best_levels(layer, y) for layer in codebook.layers)

    def inverse_slope(self, clock: Clock) -> float:
        """r: 1 up to the beginning, 0 from the end on."""
        way = (clock.step / clock.steps - self.begin) / (self.end - self.begin)
        if not 0 < way < 1:
            return float(way <= 0)
        at, first, last = (1 / (1 + math.exp(self.steepness * (t - 0.5))) for t in (way, 0.0, 1.0))
        return (at - last) / (first - last)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook or clock.step < self.begin * clock.steps:
            return descend_at(x, task, batch)
        r = self.inverse_slope(clock)
        if r == 0:
            return straight_through(x, codebook, task, batch)
        found = task.gradient(codebook.map(x, lambda u, c: affine_prox(u, c, r)), batch)
        return Descent(found.gradient, Info(more={"relaxed_loss": found.loss}))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return y, self._placed(y, codebook), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)


def affine_prox(u: Tensor, c: Tensor, r: float) -> Tensor:
    """The proximal map of the regularizer that has its kinks at the levels c: flat at each level, with slope 1/r around
    the middle of two. (..., n), (..., m) -> (..., n)."""
    above = torch.searchsorted(c.contiguous(), u.contiguous())  # the first level that is not below u
    low = pick(c, (above - 1).clamp(min=0))
    high = pick(c, above.clamp(max=c.shape[-1] - 1))
    middle = (low + high) / 2
    return torch.minimum(torch.maximum(middle + (u - middle) / r, low), high)
