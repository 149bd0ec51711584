"""DSQ: an even grid whose ends are learned, and a rounded staircase on the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, nearest_levels, quantizers, straight_through
from qupel.tasks.task import Batch, Task

LEAST = 1e-8  # distance between two levels


@quantizers.register("dsq", paper="Gong, Liu, Jiang, Li, Hu, Lin, Yu, Yan, ICCV 2019")
@dataclass(frozen=True)
class DSQ:
    """x <- x - eta1 g dQ~/dx with g = grad f at Q(x), the nearest of l, l + d, .., u;  l and u are learned through Q~.

    Q~ = l + d h((x - l)/d),  h(z) = i + (1 + tanh(k (z - i - 1/2)) / tanh(k/2)) / 2 from i to i + 1,  with
    k = log(2/alpha - 1). l and u start at the least and the largest weight; their gradients, sums over n weights, count
    1/sqrt(n (m - 1)). alpha says how far Q~ is from the staircase: near 1 straight through within the grid, near 0
    hard. The paper learns it; here it follows a schedule.
    """

    alpha: Schedule = Schedule(0.4, decay=0.99)

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, start_codebook(layout, before.x, plan, "range")

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        descent, ends = straight_through(x, codebook, task, batch), []
        for layer in codebook.layers:
            c, g = layer.centers, layer.pulled(descent.gradient)  # (..., m), (..., n)
            last = c.shape[-1] - 1
            z = (layer.of(x) - c[..., :1]) / _step(c)  # (..., n)
            h, slope = staircase(z, last, self.alpha(clock.time))
            up = (h - slope * z.clamp(0, last)) / max(last, 1)  # dQ~/du
            down = 1 - slope - up  # dQ~/dl
            root = (layer.slot.size * max(last, 1)) ** 0.5
            ends.append(torch.stack(((g * down).sum(-1), (g * up).sum(-1)), -1) / root)  # (..., 2)
            layer.put_gradient(descent.gradient, g * slope)
        return Descent(descent.gradient, descent.info, levels=tuple(ends))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        rate, moved = eta1(clock.time), []
        for c, h in zip(codebook.centers, descent.levels, strict=True):
            low, high = c[..., :1] - rate * h[..., :1], c[..., -1:] - rate * h[..., 1:]
            last = max(c.shape[-1] - 1, 1)
            high = torch.maximum(high, low + last * LEAST)
            moved.append(low + (high - low) * torch.arange(c.shape[-1]).to(c) / last)
        return y, codebook.with_centers(moved), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)


def staircase(z: Tensor, last: int, alpha: float) -> tuple[Tensor, Tensor]:
    """h(z) and its slope for z in steps from the lowest level; 0 below the grid and `last` above it, with slope 0."""
    k = math.log(2 / min(max(alpha, 1e-12), 1 - 1e-6) - 1)
    i = z.floor().clamp(0, max(last - 1, 0))
    t, most = torch.tanh(k * (z - i - 0.5)), math.tanh(k / 2)
    within = (z >= 0) & (z <= last)
    h = torch.where(within, i + (1 + t / most) / 2, z.clamp(0, last))
    return h, torch.where(within, (1 - t.square()) * (k / (2 * most)), 0.0)


def _step(c: Tensor) -> Tensor:
    """The distance between two levels of an even grid (..., 1)."""
    return ((c[..., -1:] - c[..., :1]) / max(c.shape[-1] - 1, 1)).clamp(min=LEAST)
