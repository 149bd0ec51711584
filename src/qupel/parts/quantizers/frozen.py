"""Fixed assignments, the last epochs of the paper's training: every weight stays with its center, and the centers and
the unquantized parameters go on learning. There is no R term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, level_gradients, nearest_levels, quantizers
from qupel.tasks.task import Batch, Task


@quantizers.register("frozen", paper="Ozkara, Singh, Data, Diggavi, 2021: fine-tuning")
@dataclass(frozen=True)
class Frozen:
    """Fine-tuning: c - eta2 sum_{S_j} df/dx (or the mean over S_j), x = c[frozen codes].

    It goes on with the codebook of the phase before; without one, at full precision.
    """

    eta2: Schedule = Schedule(1e-4)
    center_gradient: Literal["sum", "mean"] = "sum"
    clip: float | None = None

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.codebook.hard(before.x), before.codebook

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        near = codebook.nearest(x)  # x itself, with its frozen assignment; after a method has put w in its place, Q(w)
        found = task.gradient(near.q, batch)
        h = level_gradients(codebook, near.codes, found.gradient, self.center_gradient, self.clip)
        info = Info(found.loss if torch.equal(near.q, x) else None, found.loss if codebook else None)
        return Descent(found.gradient, info, near.codes, h)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        eta2 = self.eta2(clock.time)
        moved = codebook.with_centers(c - eta2 * h for c, h in zip(codebook.centers, descent.levels, strict=True))
        x = moved.pick(y, descent.codes)
        return x, moved.with_centers(c.sort().values for c in moved.centers), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
