"""Ditto: the shared model is FedAvg's; beside it every client has a model of its own that is pulled to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload, received
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@dataclass(frozen=True, kw_only=True)
class DittoState(State):
    """anchor: the w that came, which x is pulled to while w moves on (..., d)."""

    anchor: Tensor = received()
    shared_memory: Memory = received()  # of the optimizer on w


@methods.register("ditto", paper="Li, Hu, Beirami, Smith, ICML 2021")
@dataclass(frozen=True)
class Ditto(OneRow):
    """w as in FedAvg;  x <- x - eta1 (grad f(x) + lambda_p (x - w)) at the w that came.

    lambda_p = 0: FedAvg beside Local.
    """

    state_type: ClassVar[type[State]] = DittoState

    eta1: Schedule = Schedule(0.1)
    lambda_p: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def start(self, before: State, plan: Plan, problem: Problem) -> DittoState:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        memory = self.optimizer.memory(x)
        return DittoState(x, before.w, codebook, memory, anchor=before.w, shared_memory=self.optimizer.memory(before.w))

    def receive(self, state: DittoState, w: Rows) -> DittoState:
        return replace(state, w=w[0], anchor=w[0], shared_memory=self.optimizer.memory(w[0]))

    def step(self, s: DittoState, problem: Problem, batch: Batch, clock: Clock) -> tuple[DittoState, Info]:
        found = problem.shared.gradient(s.w, batch)
        w, shared = self.optimizer.step(s.w, found.gradient, s.shared_memory, self.eta1(clock.time))
        pull = s.x - s.anchor, self.lambda_p(clock.time)
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock, pull
        )
        info = replace(info, more={**info.more, "shared_loss": found.loss})
        return DittoState(x, w, codebook, memory, anchor=s.anchor, shared_memory=shared), info

    def upload(self, state: DittoState) -> Upload:
        return Upload((state.w,))

    def deployed(self, state: DittoState) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)

    def tie(self, time: float) -> float:
        return self.lambda_p(time)
