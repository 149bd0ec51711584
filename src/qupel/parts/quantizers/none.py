"""Full precision, whatever a client's plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, descend_at, quantizers
from qupel.tasks.task import Batch, Task


@quantizers.register("none")
@dataclass(frozen=True)
class NoQuantizer:
    """Full precision: Q(x) = x."""

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, Codebook()

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        return descend_at(x, task, batch)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return y, codebook, descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return Deployed(x, codebook)
