"""BinaryRelax: a latent model y takes the gradient at a relaxed one, which slides to Q(y)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Layer, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.quantize import assign
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, descend_at, lloyd, nearest_levels, quantizers
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
        return codebook.with_centers(_best_centers(layer, y) for layer in codebook.layers)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook:
            return descend_at(x, task, batch)
        lam, q = self.lam(clock.time), codebook.hard(x)
        if math.isinf(lam):
            found = task.gradient(q, batch)
            return Descent(found.gradient, Info(quantized_loss=found.loss))
        found = task.gradient((x + lam * q) / (1 + lam), batch)
        return Descent(found.gradient, Info(more={"relaxed_loss": found.loss}))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return y, self._project(y, codebook), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)


def _best_centers(layer: Layer, y: Tensor) -> Tensor:
    """1 bit: -s, +s with s = mean |y|, the exact projection. More: one Lloyd step. (..., m)."""
    if layer.centers.shape[-1] > 2:
        return lloyd(layer, y, assign(layer.of(y), layer.centers))
    s = layer.of(y).abs().mean(-1)  # (...)
    return torch.stack((-s, s), -1)
