"""ProxQuant: weights are pulled to fixed centers, one pass a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.prox import prox_weights
from qupel.core.schedule import Clock, Schedule, Travel, weight_pull
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, descend_at, nearest_levels, quantizers
from qupel.tasks.task import Batch, Task


@quantizers.register("proxquant", paper="Bai, Wang, Liberty, ICLR 2019")
@dataclass(frozen=True)
class ProxQuant:
    """Fixed centers: x = prox of eta1 lambda R(., c) at the optimizer's step on f. It is `prox` with eta2 = 0.

    1 bit: the centers are -s and +s, with s = mean |x| of the layer at the start (`scale = "layer"`) or 1 (`"one"`, for
    networks whose normalization makes a layer's scale irrelevant). More bits: the centers stay where they were placed.
    """

    lam: Schedule | Travel = Travel(1.0)
    scale: Literal["layer", "one"] = "layer"
    init: Literal["paper", "range", "kmeans", "quantile"] = "paper"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        codebook = start_codebook(layout, before.x, plan, self.init)
        pairs = ((layer.of(before.x), layer.centers) for layer in codebook.layers)
        return before.x, codebook.with_centers(self._signs(u) if len(c) == 2 else c for u, c in pairs)

    def _signs(self, u: Tensor) -> Tensor:
        s = u.abs().mean() if self.scale == "layer" else u.new_ones(())
        return torch.stack((-s, s))

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        return descend_at(x, task, batch)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        for layer in codebook.layers:
            layer.put(y, prox_weights(layer.of(y), layer.centers, weight_pull(self.lam, eta1, clock, layer.centers)))
        return y, codebook, descent.info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)
