"""Fine-tuning, the last epochs: quantize hard, freeze every weight's center, go on training the centers and the
unquantized parameters. Weights move with their center; there is no R term. In a federation the pull to w and the
synchronization go on for the unquantized coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qupel.algorithms.base import Batch, Deployed, Gradient, State, Uploads, mean, quantized
from qupel.codebook import Plan
from qupel.flat import Layout
from qupel.optim import SGD, Optimizer
from qupel.quantize import center_gradient, counts, pick
from qupel.schedule import Clock, Schedule


@dataclass(frozen=True)
class FineTune:
    """c - eta2 sum_{S_j} df/dx (or the mean over S_j), x = c[frozen codes];  the rest: x - eta1 (g + lambda_p (x - w)).

    lambda_p None: no federation, nothing is sent; `coupling` as in QuPeL. A client without a codebook goes on at full
    precision.
    """

    streams: ClassVar[bool] = True

    method: Literal["finetune"] = "finetune"
    eta1: Schedule = Schedule(0.1)
    eta2: Schedule = Schedule(1e-4)
    eta3: Schedule = Schedule(5.0)
    lambda_p: Schedule | None = None
    coupling: float | None = None
    optimizer: Optimizer = SGD()
    gradient: Literal["sum", "mean"] = "sum"
    clip: float | None = None

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        x = before.codebook.hard(before.x)
        return State(x, before.w, before.codebook, self.optimizer.memory(x))

    def receive(self, state: State, w: Tensor) -> State:
        return State(state.x, w, state.codebook, state.memory)

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        eta1, eta2, eta3 = (f(clock.time) for f in (self.eta1, self.eta2, self.eta3))
        lambda_p = self.lambda_p(clock.time) if self.lambda_p else 0.0
        g = gradient(s.x, batch, None, "both" if s.codebook else "x")
        codes = s.codebook.assign(s.x)  # every weight sits exactly on its center, so this is its frozen assignment
        moved = []
        for (slot, c), k in zip(s.codebook, codes, strict=True):
            m = c.shape[-1]
            h = center_gradient(g[..., slot.slice], k, m)  # (..., m)
            if self.gradient == "mean":
                h = h / counts(k, m).clamp(min=1)
            if self.clip is not None:
                h = h.clamp(-self.clip, self.clip)
            moved.append(c - eta2 * h)
        share = eta3 * lambda_p if self.coupling is None else self.coupling
        if lambda_p:
            g = g.add_(s.x - s.w, alpha=lambda_p)
        x, memory = self.optimizer.step(s.x, g, s.memory, eta1)
        for slot, c, k in zip(s.codebook.slots, moved, codes, strict=True):
            pick(c, k, out=x[..., slot.slice])
        codebook = s.codebook.with_centers(c.sort().values for c in moved)
        w = torch.add(s.w, (x - s.w) * s.codebook.free(x.shape[-1], x.device), alpha=share) if self.lambda_p else s.w
        return State(x, w, codebook, memory)

    def upload(self, state: State) -> Tensor | None:
        return state.w if self.lambda_p else None

    def aggregate(self, w: Tensor, uploads: Uploads) -> Tensor:
        return mean(uploads) if self.lambda_p else w

    def deployed(self, state: State) -> Deployed:
        return quantized(state)
