"""TTQ: three levels, the outer two of them learned, one pass a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Codes, Layer, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.quantize import center_gradient, counts, pick
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, descend_at, level_gradients, quantizers
from qupel.tasks.task import Batch, Task

LEAST = 1e-8  # of a level's distance from 0


@quantizers.register("ttq", paper="Zhu, Han, Mao, Dally, ICLR 2017")
@dataclass(frozen=True)
class TTQ:
    """Trained ternary: Q(x) = -n where x < -D, p where x > D, else 0, with D = threshold max |x| of the layer.

    With g = grad f at Q(x):  x <- x - eta1 (g n, g, g p, by its level);  p and n by their weights' summed g (the paper)
    or its mean, with rate eta2, None that of x. They start at the mean |x| of their weights. A layer of two bits or
    more has these three levels; of one bit -n and p, with D = 0.
    """

    threshold: float = 0.05
    eta2: Schedule | None = None
    center_gradient: Literal["sum", "mean"] = "mean"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        three = Plan({name: min(m, 3) for name, m in plan.items()}, channels=getattr(plan, "channels", False))
        book = start_codebook(layout, before.x, three, "range")
        pairs = zip(book.layers, self._codes(before.x, book), strict=True)
        return before.x, book.with_centers(_means(layer, before.x, k) for layer, k in pairs)

    def _codes(self, x: Tensor, codebook: Codebook) -> Codes:
        """Each weight's level, counted from the lowest (..., n)."""
        found = []
        for layer in codebook.layers:
            u, m = layer.of(x), layer.centers.shape[-1]
            D = self.threshold * u.abs().amax(-1, keepdim=True) if m == 3 else torch.zeros_like(u[..., :1])
            above = (u > D).long()
            found.append(above if m == 2 else above + (u >= -D).long() if m == 3 else torch.zeros_like(above))
        return tuple(found)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook:
            return descend_at(x, task, batch)
        codes = self._codes(x, codebook)
        found = task.gradient(codebook.pick(x, codes), batch)
        h = level_gradients(codebook, codes, found.gradient, self.center_gradient)
        for layer, k in zip(codebook.layers, codes, strict=True):
            c = layer.centers
            factor = torch.where(c == 0, 1.0, c.abs())  # (..., m)
            layer.put_gradient(found.gradient, layer.pulled(found.gradient) * pick(factor, k))
        return Descent(found.gradient, Info(quantized_loss=found.loss), codes, h)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        rate = (self.eta2 or eta1)(clock.time)
        pairs = zip(codebook.centers, descent.levels, strict=True)
        return y, codebook.with_centers(_signed(c - rate * h) for c, h in pairs), descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return Deployed(codebook.pick(x, self._codes(x, codebook)), codebook)


def _means(layer: Layer, x: Tensor, codes: Tensor) -> Tensor:
    """The mean of each level's weights (..., m)."""
    m = layer.centers.shape[-1]
    return _signed(center_gradient(layer.of(x), codes, m) / counts(codes, m).clamp(min=1))


def _signed(c: Tensor) -> Tensor:
    """-n, 0, p with n and p above 0 (..., m)."""
    m = c.shape[-1]
    signs = torch.arange(m).to(c) * 2 - (m - 1)  # (m,)
    return torch.where(signs < 0, c.clamp(max=-LEAST), torch.where(signs > 0, c.clamp(min=LEAST), 0.0))
