"""Every client for itself: Algorithm 1 with the quantizer `prox`, plain training with `none`. With one client it is
training in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.methods.base import Alone, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("local", paper="Ozkara, Singh, Data, Diggavi, 2021: Algorithm 1")
@dataclass(frozen=True)
class Local(Alone):
    """Each client minimizes its own f(x) + f(Q~_c(x)) + lambda R(x, c), or what its quantizer makes of f.

    Nothing is sent. A client without a codebook trains at full precision with the plain optimizer.
    """

    any_network: ClassVar[bool] = True  # there is nobody to agree with

    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.x, state.codebook)
