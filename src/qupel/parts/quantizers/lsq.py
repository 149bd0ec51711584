"""LSQ: an even grid of levels whose step size is learned, one pass a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, descend_at, nearest_levels, quantizers
from qupel.tasks.task import Batch, Task

LEAST = 1e-8  # step size: a layer of zeros has one, too


@quantizers.register("lsq", paper="Esser, McKinstry, Bablani, Appuswamy, Modha, ICLR 2020")
@dataclass(frozen=True)
class LSQ:
    """Learned step size: Q(x) = s clip(round(x / s), -m/2, m/2 - 1).

    The gradient at Q(x) goes straight to x within the grid and is 0 beyond it;  s <- s - eta1 ds,  with ds = sum_k of
    g_k (Q(x_k) - x_k)/s within and g_k Q(x_k)/s beyond, times 1/sqrt(n (m/2 - 1)). Two levels are -s and s. It starts
    at s = 2 mean |x| / sqrt(m/2 - 1).
    """

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        book = start_codebook(layout, before.x, plan, "range")
        means = (2 * layer.of(before.x).abs().mean() / _most(layer.centers) ** 0.5 for layer in book.layers)
        pairs = zip(means, book.centers, strict=True)
        return before.x, book.with_centers(s.clamp(min=LEAST) * _grid(c) for s, c in pairs)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook:
            return descend_at(x, task, batch)
        q = codebook.hard(x)
        found = task.gradient(q, batch)
        steps = []
        for layer in codebook.layers:
            u, level, g, c = layer.of(x), layer.of(q), layer.pulled(found.gradient), layer.centers  # (..., n), (..., m)
            within = (u > c[..., :1]) & (u < c[..., -1:])
            s = c[..., -1:] / _most(c)  # (..., 1)
            ds = (g * torch.where(within, level - u, level)).sum(-1, keepdim=True) / s  # (..., 1)
            steps.append(ds / (layer.slot.size * _most(c)) ** 0.5)
            layer.put_gradient(found.gradient, torch.where(within, g, 0.0))
        return Descent(found.gradient, Info(quantized_loss=found.loss), levels=tuple(steps))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        rate, moved = eta1(clock.time), []
        for c, ds in zip(codebook.centers, descent.levels, strict=True):
            s = c[..., -1:] / _most(c)
            moved.append((s - rate * ds).clamp(min=LEAST) * _grid(c))
        return y, codebook.with_centers(moved), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)


def _most(c: Tensor) -> int:
    """The largest level, in steps."""
    return max((c.shape[-1] - 1) // 2, 1)


def _grid(c: Tensor) -> Tensor:
    """The levels in steps (m,): -m/2 .. m/2 - 1, of two levels -1 and 1."""
    m = c.shape[-1]
    levels = torch.tensor([-1.0, 1.0]) if m == 2 else torch.arange(m) - m // 2
    return levels.to(c)
