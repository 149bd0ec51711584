"""Algorithm 2, QuPeL: quantized personalized learning. Each client learns its own model x and centers c, tied by a
penalty to a global model w; only w leaves the device. A client without a codebook is the paper's "QuPeL (32 bits)"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State, Upload
from qupel.parts.methods.base import OneRow, methods
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("qupel", paper="Ozkara, Singh, Data, Diggavi, 2021")
@dataclass(frozen=True)
class QuPeL(OneRow):
    """Minimize (1/n) sum_i f_i(x_i) + f_i(Q~_ci(x_i)) + lambda R(x_i, c_i) + (lambda_p/2) |x_i - w|^2.

    coupling: when given, stands for eta3 * lambda_p, the share of x that enters w a step: then lambda_p may fall to 0
    and let the personal models go while w keeps learning from them.
    enters: which coordinates of x enter w; `free` is all that are not quantized, as in the paper's fine-tuning.
    as_printed: takes the w step with the sign the paper prints, which is ascent; the default is descent.
    """

    eta1: Schedule = Schedule(0.1)
    eta3: Schedule = Schedule(5.0)
    lambda_p: Schedule = Schedule(0.025)
    coupling: float | None = None
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()
    enters: Literal["all", "free"] = "all"
    as_printed: bool = False

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        q, eta1, eta3, lambda_p = self.quantizer, *(f(clock.time) for f in (self.eta1, self.eta3, self.lambda_p))
        descent = q.gradient(s.x, s.codebook, problem.own, batch, clock)  # line 4
        g = descent.gradient.add_(s.x - s.w, alpha=lambda_p)
        y, memory = self.optimizer.step(s.x, g, s.memory, eta1)
        # lines 5 to 7: the prox of x, the gradient of c at the new x, the prox of c
        x, codebook, info = q.settle(y, s.codebook, descent, problem.own, batch, self.eta1, clock)
        share = eta3 * lambda_p if self.coupling is None else self.coupling
        toward = x - s.w if self.enters == "all" else (x - s.w) * codebook.free(x.shape[-1], x.device)
        w = torch.add(s.w, toward, alpha=-share if self.as_printed else share)  # line 8
        return State(x, w, codebook, memory), info

    def upload(self, state: State) -> Upload:
        return Upload((state.w,))  # line 10; receive is line 11, the server's mean line 15

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)  # line 19

    def tie(self, time: float) -> float:
        return self.lambda_p(time)
