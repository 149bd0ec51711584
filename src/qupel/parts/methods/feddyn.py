"""FedDyn: each client's loss is tilted so that all of them have the server's minimum. Two rows: the model and the sum
of what it has moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload, received
from qupel.parts.methods.base import methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem


@dataclass(frozen=True, kw_only=True)
class DynState(State):
    """next_tilt: g_i after this round's steps; tilt: g_i at its start; moved: the server's -h/alpha; told: what the
    server hears of it; all (..., d)."""

    next_tilt: Tensor
    tilt: Tensor = received()
    moved: Tensor = received()
    told: Tensor = received()


@methods.register("feddyn", paper="Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, ICLR 2021")
@dataclass(frozen=True)
class FedDyn:
    """x ~ argmin f_i(x) - <g_i, x> + (alpha/2) |x - w|^2;  g_i <- g_i - alpha (x - w);  w <- mean x + sum mean (x - w).

    The sum is the server's -h/alpha, over all rounds; S of N clients taking part, a round's term counts S/N. alpha = 0:
    the clients are FedAvg's, the server is FedAvgM's with Nesterov momentum 1; so a server with a momentum of its own
    overdoes it. What ships is the shared w.
    """

    state_type: ClassVar[type[State]] = DynState
    models: ClassVar[int] = 1  # the sum is averaged, whatever the server

    eta1: Schedule = Schedule(0.1)
    alpha: float = 0.1
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = NoQuantizer()

    def broadcast(self, w: Tensor) -> Rows:
        return w, torch.zeros_like(w)

    def start(self, before: State, plan: Plan, problem: Problem) -> DynState:
        x, codebook = self.quantizer.start(replace(before, x=before.w), plan, problem.own.layout)
        zero = torch.zeros_like(x)
        memory = self.optimizer.memory(x)
        return DynState(x, before.w, codebook, memory, next_tilt=zero, tilt=zero, moved=zero, told=zero)

    def receive(self, state: DynState, w: Rows) -> DynState:
        memory = self.optimizer.memory(w[0])
        return replace(state, x=w[0], w=w[0], memory=memory, tilt=state.next_tilt, moved=w[1], told=w[1])

    def step(self, s: DynState, problem: Problem, batch: Batch, clock: Clock) -> tuple[DynState, Info]:
        model, pull = (s.x, s.codebook, s.memory), (self.alpha * (s.x - s.w) - s.tilt, 1.0)
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock, pull
        )
        way = x - s.w
        tilt, told = s.tilt - self.alpha * way, s.moved + clock.share * way
        return replace(s, x=x, codebook=codebook, memory=memory, next_tilt=tilt, told=told), info

    def upload(self, state: DynState) -> Upload:
        return Upload((state.x + state.told, state.told))

    def deployed(self, state: DynState) -> Deployed:
        return self.quantizer.deployed(state.w, state.codebook)
