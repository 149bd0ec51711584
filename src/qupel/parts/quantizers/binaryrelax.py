"""BinaryRelax: a latent model y takes the gradient at a relaxed one, which slides to Q(y)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import (
    Descent,
    best_levels,
    descend_at,
    nearest_levels,
    quantizers,
    straight_through,
)
from qupel.tasks.task import Batch, Task


@quantizers.register("binaryrelax", paper="Yin, Zhang, Lyu, Osher, Qi, Xin, SIAM J. Imaging Sci. 2018")
@dataclass(frozen=True)
class BinaryRelax:
    """Relaxed to hard: y takes the gradient at (y + lam Q(y)) / (1 + lam), with lam growing; what ships is Q(y).

    `State.x` holds y. Q(y) projects on the layer's nearest quantized vector: signs times mean |y| for 1 bit, else one
    Lloyd step a step. The published method is a phase with a growing lam, then one with lam = inf, Q(y) in every pass.
    """

    lam: Schedule = Schedule(1.0, decay=1.02)  # grows geometrically

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, self._project(before.x, start_codebook(layout, before.x, plan, "kmeans"))

    def _project(self, y: Tensor, codebook: Codebook) -> Codebook:
        return codebook.with_centers(best_levels(layer, y) for layer in codebook.layers)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook:
            return descend_at(x, task, batch)
        lam = self.lam(clock.time)
        if math.isinf(lam):
            return straight_through(x, codebook, task, batch)
        found = task.gradient((x + lam * codebook.hard(x)) / (1 + lam), batch)
        return Descent(found.gradient, Info(more={"relaxed_loss": found.loss}))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return y, self._project(y, codebook), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
