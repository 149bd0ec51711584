"""L2GD: every client has a model of its own, and now and then all of them are drawn to their mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("l2gd", paper="Hanzely, Richtárik, 2020")
@dataclass(frozen=True)
class L2GD(OneRow):
    """Minimize mean_i f_i(x_i) + (lambda/2) |x_i - w|^2 with w = mean of x_i:  x_i <- x_i + pull (w - x_i), tau steps.

    The paper tosses a coin: local steps, of mean number (1 - p)/p, then w is made and x_i drawn to it. Here the number
    is tau: p = 1/(tau + 1), and pull stands for eta1 lambda (1 - p)/p = eta1 lambda tau. pull = 0: Local; 1: FedAvg.
    """

    eta1: Schedule = Schedule(0.1)
    pull: float = 0.3
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def __post_init__(self) -> None:
        if not 0 <= self.pull <= 1:
            raise ValueError(f"pull = {self.pull}: allowed are 0 to 1")

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def receive(self, state: State, w: Rows) -> State:
        return replace(state, x=torch.lerp(state.x, w[0], self.pull), w=w[0])

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def upload(self, state: State) -> Upload:
        return Upload((state.x,))

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)
