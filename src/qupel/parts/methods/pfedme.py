"""pFedMe: the shared model moves toward the clients' own, which are proximal points of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State, Upload
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("pfedme", paper="Dinh, Tran, Nguyen, NeurIPS 2020")
@dataclass(frozen=True)
class PFedMe(OneRow):
    """x ~ argmin f_i(x) + (lambda_p/2) |x - w_i|^2 by `inner` steps from w_i;  w_i <- w_i - rate (w_i - x).

    The inner steps see one batch; rate stands for eta lambda_p of the paper. Its server's (1 - beta) w + beta mean is
    `fedavgm` with momentum 0 and rate beta. What ships is x, never w.
    """

    eta1: Schedule = Schedule(0.1)
    lambda_p: Schedule = Schedule(1.0)
    rate: float = 0.1
    inner: int = 5
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return State(x, before.w, codebook)

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        x, codebook, memory, info = s.w, s.codebook, self.optimizer.memory(s.w), Info()
        for _ in range(self.inner):
            pull = x - s.w, self.lambda_p(clock.time)
            x, codebook, memory, info = quantized_step(
                self.quantizer, self.optimizer, self.eta1, (x, codebook, memory), problem.own, batch, clock, pull
            )
        w = torch.add(s.w, x - s.w, alpha=self.rate)
        return replace(s, x=x, w=w, codebook=codebook), info

    def upload(self, state: State) -> Upload:
        return Upload((state.w,))

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)

    def tie(self, time: float) -> float:
        return self.lambda_p(time)
