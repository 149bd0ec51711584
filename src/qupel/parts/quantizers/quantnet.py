"""Quantization Networks: a sum of sigmoids that grows into a staircase, one pass a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.quantize import soft_at, soft_gradient, steepness
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, bounded, descend_at, keep_or_place, nearest_levels, quantizers
from qupel.tasks.task import Batch, Task


@quantizers.register("quantnet", paper="Yang, Shen, Xing, Tian, Li, Deng, Huang, Hua, CVPR 2019")
@dataclass(frozen=True)
class QuantNet:
    """Steps on f(Q~_c(x)), Q~_c(x) = c_1 + sum_j (c_j - c_{j-1}) sigmoid(T (x - (c_j + c_{j-1})/2) / gap), T growing.

    temperature: T, in the mean gap between levels; 4 is nearest to the identity, 50 and more a staircase. A level takes
    the mean over its weights, with x's rate. The paper has even levels with one learned factor and boundaries of their
    own; here each level is learned and boundaries lie between them. What ships is Q_c(x).
    """

    temperature: Schedule = Schedule(4.0, growth=0.25)
    init: Literal["paper", "range", "kmeans", "quantile"] = "kmeans"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, keep_or_place(before, plan, layout, self.init)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook:
            return descend_at(x, task, batch)
        T, levels = self.temperature(clock.time), []
        found = task.gradient(codebook.map(x, lambda u, c: soft_at(u, c, steepness(c, T))), batch)
        for layer, k in zip(codebook.layers, codebook.assign(x), strict=True):
            c, g = layer.centers, layer.pulled(found.gradient)
            at_x, at_c = soft_gradient(layer.of(x), c, steepness(c, T), g)
            layer.put_gradient(found.gradient, at_x)
            levels.append(bounded(at_c, k, "mean", None))
        return Descent(found.gradient, Info(more={"soft_loss": found.loss}), levels=tuple(levels))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        rate, pairs = eta1(clock.time), zip(codebook.centers, descent.levels, strict=True)
        return y, codebook.with_centers((c - rate * h).sort().values for c, h in pairs), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
