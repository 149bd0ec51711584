"""Ditto: the shared model is FedAvg's; beside it every client has a model of its own that is pulled to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, Upload
from qupel.parts.base import State as Common
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@dataclass(frozen=True)
class State(Common):
    """anchor: the w that came, which x is pulled to while w moves on (..., d)."""

    anchor: Tensor = field(kw_only=True)
    shared_memory: Memory = ()  # of the optimizer on w; afresh every round


@methods.register("ditto", paper="Li, Hu, Beirami, Smith, ICML 2021")
@dataclass(frozen=True)
class Ditto(OneRow):
    """w as in FedAvg;  x <- x - eta1 (grad f(x) + lambda_p (x - w)) at the w that came.  lambda_p = 0: FedAvg beside Local."""

    State: ClassVar[type[Common]] = State

    eta1: Schedule = Schedule(0.1)
    lambda_p: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def start(self, before: Common, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        memory = self.optimizer.memory(x)
        return State(x, before.w, codebook, memory, anchor=before.w, shared_memory=self.optimizer.memory(before.w))

    def receive(self, state: State, w: Rows) -> State:
        return replace(state, w=w[0], anchor=w[0], shared_memory=self.optimizer.memory(w[0]))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        found = problem.shared.gradient(s.w, batch)
        w, shared = self.optimizer.step(s.w, found.gradient, s.shared_memory, self.eta1(clock.time))
        pull = s.x - s.anchor, self.lambda_p(clock.time)
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock, pull
        )
        info = replace(info, more={**info.more, "shared_loss": found.loss})
        return State(x, w, codebook, memory, anchor=s.anchor, shared_memory=shared), info

    def upload(self, state: State) -> Upload:
        return Upload((state.w,))

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)

    def tie(self, time: float) -> float:
        return self.lambda_p(time)
