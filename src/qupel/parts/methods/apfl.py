"""APFL: every client mixes the shared model with one of its own, and learns how much of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Memory, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload, received
from qupel.parts.methods.base import OneRow, methods
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@dataclass(frozen=True, kw_only=True)
class MixtureState(State):
    """v: the client's own model (..., d); alpha: its part in the mixture x (..., 1)."""

    v: Tensor
    alpha: Tensor
    shared_memory: Memory = received()  # of the optimizer on w


@methods.register("apfl", paper="Deng, Kamani, Mahdavi, 2020")
@dataclass(frozen=True)
class APFL(OneRow):
    """w as in FedAvg;  v <- v - eta1 alpha grad f_i(x)  at the mixture  x = alpha v + (1 - alpha) w.

    adaptive: alpha <- alpha - eta1 <grad f_i(x), v - w>, kept within 0 and 1. Where it stays as it is, 1 is Local and 0
    FedAvg. What ships is the mixture, with the newest w; it is what is quantized, and v follows where levels pull it.
    """

    state_type: ClassVar[type[State]] = MixtureState

    eta1: Schedule = Schedule(0.1)
    alpha: float = 0.5
    adaptive: bool = True
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def start(self, before: State, plan: Plan, problem: Problem) -> MixtureState:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        alpha, memory = x.new_full((*x.shape[:-1], 1), self.alpha), self.optimizer.memory(x)
        return MixtureState(x, before.w, codebook, memory, v=x, alpha=alpha, shared_memory=memory)

    def receive(self, state: MixtureState, w: Rows) -> MixtureState:
        x = _mixed(state.alpha, state.v, w[0])
        return replace(state, x=x, w=w[0], shared_memory=self.optimizer.memory(w[0]))

    def step(self, s: MixtureState, problem: Problem, batch: Batch, clock: Clock) -> tuple[MixtureState, Info]:
        rate, alpha = self.eta1(clock.time), s.alpha
        found = problem.shared.gradient(s.w, batch)
        w, shared = self.optimizer.step(s.w, found.gradient, s.shared_memory, rate)
        descent = self.quantizer.gradient(s.x, s.codebook, problem.own, batch, clock)
        slope = (descent.gradient * (s.v - s.w)).sum(-1, keepdim=True)  # df/dalpha (..., 1)
        v, memory = self.optimizer.step(s.v, alpha * descent.gradient, s.memory, rate)
        if self.adaptive:
            alpha = (alpha - rate * slope).clamp(0, 1)
        mixed = _mixed(alpha, v, w)
        x, codebook, info = self.quantizer.settle(
            mixed.clone(), s.codebook, descent, problem.own, batch, self.eta1, clock
        )
        info = replace(info, more={**info.more, "shared_loss": found.loss})
        v = v + (x - mixed)
        return MixtureState(x, w, codebook, memory, v=v, alpha=alpha, shared_memory=shared), info

    def upload(self, state: MixtureState) -> Upload:
        return Upload((state.w,))

    def deployed(self, state: MixtureState) -> Deployed:
        return self.quantizer.deployed(_mixed(state.alpha, state.v, state.w), state.codebook)


def _mixed(alpha: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """alpha v + (1 - alpha) w (..., d)."""
    return alpha * v + (1 - alpha) * w
