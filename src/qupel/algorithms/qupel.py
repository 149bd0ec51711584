"""Algorithm 2, QuPeL: quantized personalized learning. Each client learns its own model x and centers c, tied by a
penalty to a global model w; only w leaves the device. A client without a codebook is the paper's "QuPeL (32 bits)"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qupel.algorithms.base import Batch, Deployed, Gradient, State, Uploads, mean, quantized
from qupel.algorithms.quantizer import Quantizer
from qupel.codebook import Plan
from qupel.flat import Layout
from qupel.optim import SGD, Optimizer
from qupel.schedule import Clock, Schedule


@dataclass(frozen=True)
class QuPeL:
    """Minimize (1/n) sum_i f_i(x_i) + f_i(Q~_ci(x_i)) + lambda R(x_i, c_i) + (lambda_p/2) |x_i - w|^2.

    `coupling`, when given, stands for eta3 * lambda_p, the share of x that enters w a step: then lambda_p may fall to 0
    and let the personal models go while w keeps learning from them.
    `as_printed` takes the w step with the sign the paper prints, which is ascent; the default is descent.
    """

    streams: ClassVar[bool] = True

    method: Literal["qupel"] = "qupel"
    eta1: Schedule = Schedule(0.1)
    eta3: Schedule = Schedule(5.0)
    lambda_p: Schedule = Schedule(0.025)
    coupling: float | None = None
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Quantizer()
    as_printed: bool = False

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        codebook = self.quantizer.start(before.codebook, before.x, plan, layout)
        return State(before.x, before.w, codebook, self.optimizer.memory(before.x))

    def receive(self, state: State, w: Tensor) -> State:
        return replace(state, w=w)  # line 11

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        q, eta1, eta3, lambda_p = self.quantizer, *(f(clock.time) for f in (self.eta1, self.eta3, self.lambda_p))
        g = gradient(s.x, batch)
        g = q.add_weight_gradient(g, gradient, s.x, s.codebook, batch)  # line 4
        g = g.add_(s.x - s.w, alpha=lambda_p)
        y, memory = self.optimizer.step(s.x, g, s.memory, eta1)
        x, near = q.prox_weights(y, s.codebook, self.eta1, clock)  # line 5
        h = q.center_gradient(gradient, x, s.codebook, near, batch, clock)  # line 6, at the new x
        x, codebook = q.prox_centers(x, s.codebook, near, h, self.eta1, clock)  # line 7
        share = eta3 * lambda_p if self.coupling is None else self.coupling
        w = torch.add(s.w, x - s.w, alpha=-share if self.as_printed else share)  # line 8
        return State(x, w, codebook, memory)

    def upload(self, state: State) -> Tensor:
        return state.w  # line 10

    def aggregate(self, w: Tensor, uploads: Uploads) -> Tensor:
        return mean(uploads)  # line 15

    def deployed(self, state: State) -> Deployed:
        return quantized(state)  # line 19
