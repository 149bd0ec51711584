"""BinaryRelax (Yin et al., 2018): a latent model y takes the gradient at a relaxed one, which slides to Q(y).

The published method is a phase with a growing `lam`, then one with `lam = inf` (x = Q(y) in every pass).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from qupel.algorithms.base import Alone, Batch, Deployed, Gradient, State, quantized
from qupel.codebook import Codebook, Plan, start_codebook
from qupel.flat import Layout
from qupel.optim import SGD, Optimizer
from qupel.quantize import assign, center_gradient, counts
from qupel.schedule import Clock, Schedule


@dataclass(frozen=True)
class BinaryRelax(Alone):
    """y = optimizer step on y with grad f(x),  x = (y + lam Q(y)) / (1 + lam);  deploy Q(y).  `State.x` holds y.

    Q(y) projects on the layer's nearest quantized vector: signs times mean |y| for 1 bit, else one Lloyd step a step.
    """

    method: Literal["binaryrelax"] = "binaryrelax"
    eta1: Schedule = Schedule(0.1)
    lam: Schedule = Schedule(1.0, decay=1.02)  # grows geometrically
    optimizer: Optimizer = SGD()

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        codebook = self._project(before.x, start_codebook(layout, before.x, plan, "kmeans"))
        return State(before.x, before.w, codebook, self.optimizer.memory(before.x))

    def _project(self, y: Tensor, codebook: Codebook) -> Codebook:
        return codebook.with_centers(_best_centers(y[..., slot.slice], c) for slot, c in codebook)

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        lam = self.lam(clock.time)
        quantized = s.codebook.hard(s.x)
        x = quantized if math.isinf(lam) else (s.x + lam * quantized) / (1 + lam)
        g = gradient(x, batch, None, "quantized" if s.codebook else "x")  # relaxed, at the end Q(y) itself
        y, memory = self.optimizer.step(s.x, g, s.memory, self.eta1(clock.time))
        return replace(s, x=y, codebook=self._project(y, s.codebook), memory=memory)

    def deployed(self, state: State) -> Deployed:
        return quantized(state)


def _best_centers(y: Tensor, centers: Tensor) -> Tensor:
    """1 bit: -s, +s with s = mean |y|, the exact projection. More: the mean of each center's weights (a Lloyd step)."""
    m = centers.shape[-1]
    if m == 2:
        s = y.abs().mean(-1)  # (...)
        return torch.stack((-s, s), -1)
    codes = assign(y, centers)  # (..., n)
    n = counts(codes, m)  # (..., m)
    means = center_gradient(y, codes, m) / n.clamp(min=1)
    return torch.where(n > 0, means, centers).sort().values
