"""Straight-through training of learned levels, one pass a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import (
    Descent,
    keep_or_place,
    level_gradients,
    lloyd,
    nearest_levels,
    quantizers,
    straight_through,
)
from qupel.tasks.task import Batch, Task


@quantizers.register("ste", paper="Bengio, Léonard, Courville, 2013: straight-through; levels as in this package")
@dataclass(frozen=True)
class StraightThrough:
    """x <- x - eta1 g with g = grad f at Q_c(x);  c_j <- c_j - eta2 mean_{S_j} g;  now and then c_j <- mean_{S_j} x.

    eta2 None: that of x, so that a center moves as its average weight would. lloyd: steps between two such Lloyd steps,
    0 for none.
    """

    eta2: Schedule | None = None
    lloyd: int = 10
    init: Literal["paper", "range", "kmeans", "quantile"] = "kmeans"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, keep_or_place(before, plan, layout, self.init)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        found = straight_through(x, codebook, task, batch)
        return replace(found, levels=level_gradients(codebook, found.codes, found.gradient, "mean"))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        rate = (self.eta2 or eta1)(clock.time)
        pairs = zip(codebook.centers, descent.levels, strict=True)
        codebook = codebook.with_centers((c - rate * h).sort().values for c, h in pairs)
        if self.lloyd and (clock.step + 1) % self.lloyd == 0:
            codes = codebook.assign(y)
            codebook = codebook.with_centers(
                lloyd(layer, y, k) for layer, k in zip(codebook.layers, codes, strict=True)
            )
        return y, codebook, descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
