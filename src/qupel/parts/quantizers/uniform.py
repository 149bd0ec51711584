"""The plainest training with levels: an even grid that stays, one pass a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, nearest_levels, quantizers, straight_through
from qupel.tasks.task import Batch, Task


@quantizers.register("uniform", paper="Jacob, Kligys, Chen, Zhu, Tang, Howard, Adam, Kalenichenko, CVPR 2018")
@dataclass(frozen=True)
class Uniform:
    """x <- x - eta1 g with g = grad f at Q_c(x);  c even from the layer's least to its largest weight at the start."""

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, start_codebook(layout, before.x, plan, "range")

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        return straight_through(x, codebook, task, batch)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return y, codebook, descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
