"""BinaryConnect: signs in every pass, a real model behind them that is kept within them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Layer, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, nearest_levels, quantizers, straight_through
from qupel.tasks.task import Batch, Task


@quantizers.register("binaryconnect", paper="Courbariaux, Bengio, David, NeurIPS 2015")
@dataclass(frozen=True)
class BinaryConnect:
    """x <- clip(x - eta1 g, -s, s) with g = grad f at Q(x) = s sign(x).

    scale: s is 1 (`"one"`, the paper's, for networks with BatchNorm) or the mean of |x| in the layer at the start, for
    signs; more levels are an even grid from -s to s, with s the largest |x| at the start. s stays.
    """

    scale: Literal["layer", "one"] = "layer"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        book = start_codebook(layout, before.x, plan, "range")
        book = book.with_centers(self._levels(layer, before.x) for layer in book.layers)
        return self._clipped(before.x.clone(), book), book

    def _levels(self, layer: Layer, x: Tensor) -> Tensor:
        u, m = layer.of(x).abs(), layer.centers.shape[-1]
        s = u.new_ones(()) if self.scale == "one" else u.mean() if m == 2 else u.max()
        return s * torch.linspace(-1, 1, m).to(u) if m > 1 else u.new_zeros(1)

    def _clipped(self, x: Tensor, codebook: Codebook) -> Tensor:
        for layer in codebook.layers:
            c = layer.centers
            layer.put(x, layer.of(x).clamp(c[..., :1], c[..., -1:]))
        return x

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        return straight_through(x, codebook, task, batch)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        return self._clipped(y, codebook), codebook, descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
