"""ProxQuant (Bai, Wang, Liberty, 2019): Algorithm 1 with the centers fixed, one pass a step.

1 bit: the centers are -s and +s, with s = mean |x| of the layer at the start (`scale = "layer"`) or 1 (`"one"`, for
networks whose normalization makes a layer's scale irrelevant). More bits: the centers stay where they were placed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from qupel.core.codebook import Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Optimizer
from qupel.core.prox import prox_weights
from qupel.core.schedule import Clock, Schedule, Travel, weight_pull
from qupel.parts.methods.base import Alone, Batch, Deployed, Gradient, State, quantized


@dataclass(frozen=True)
class ProxQuant(Alone):
    """x = prox of eta1 lambda R(., c) at an optimizer step on f;  c never moves."""

    method: Literal["proxquant"] = "proxquant"
    eta1: Schedule = Schedule(0.1)
    lam: Schedule | Travel = Travel(1.0)
    optimizer: Optimizer = SGD()
    scale: Literal["layer", "one"] = "layer"
    init: Literal["paper", "range", "kmeans", "quantile"] = "paper"

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        codebook = start_codebook(layout, before.x, plan, self.init)
        centers = [self._signs(before.x[slot.slice]) if len(c) == 2 else c for slot, c in codebook]
        return State(before.x, before.w, codebook.with_centers(centers), self.optimizer.memory(before.x))

    def _signs(self, x: Tensor) -> Tensor:
        s = x.abs().mean() if self.scale == "layer" else x.new_ones(())
        return torch.stack((-s, s))

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        y, memory = self.optimizer.step(s.x, gradient(s.x, batch), s.memory, self.eta1(clock.time))
        for slot, c in s.codebook:
            t = weight_pull(self.lam, self.eta1, clock, c)
            y[..., slot.slice] = prox_weights(y[..., slot.slice], c, t)
        return replace(s, x=y, memory=memory)

    def deployed(self, state: State) -> Deployed:
        return quantized(state)
