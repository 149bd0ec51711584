"""SCAFFOLD: control variates take the clients' drift away. Two rows go up and down: the model and the control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qupel.core.codebook import Plan
from qupel.core.optim import SGD
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload, received
from qupel.parts.methods.base import methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(State):
    """next_control: c_i after this round's steps; control: c_i at its start; shared: the server's c; all (..., d).
    travelled: the sum of the round's step sizes (..., 1); told: what the server hears of the control (..., d)."""

    next_control: Tensor
    control: Tensor = received()
    shared: Tensor = received()
    travelled: Tensor = received()
    told: Tensor = received()


@methods.register("scaffold", paper="Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020")
@dataclass(frozen=True)
class Scaffold:
    """x <- x - eta1 (g - c_i + c);  c_i <- c_i - c + (w - x) / (tau eta1);  c <- c + S/N mean (new c_i - c_i).

    The paper's option II; S of N clients take part in a round. With c_i = c = 0 a round is FedAvg's.
    """

    state_type: ClassVar[type[State]] = ScaffoldState
    models: ClassVar[int] = 1  # the control is averaged, whatever the server

    eta1: Schedule = Schedule(0.1)
    quantizer: Quantizer = NoQuantizer()

    def broadcast(self, w: Tensor) -> Rows:
        return w, torch.zeros_like(w)

    def start(self, before: State, plan: Plan, problem: Problem) -> ScaffoldState:
        x, codebook = self.quantizer.start(replace(before, x=before.w), plan, problem.own.layout)
        zero = torch.zeros_like(x)
        nothing = x.new_zeros(*x.shape[:-1], 1)
        return ScaffoldState(
            x, before.w, codebook, next_control=zero, control=zero, shared=zero, travelled=nothing, told=zero
        )

    def receive(self, state: ScaffoldState, w: Rows) -> ScaffoldState:
        nothing = state.x.new_zeros(*state.x.shape[:-1], 1)
        return replace(state, x=w[0], w=w[0], control=state.next_control, shared=w[1], travelled=nothing, told=w[1])

    def step(self, s: ScaffoldState, problem: Problem, batch: Batch, clock: Clock) -> tuple[ScaffoldState, Info]:
        model, drift = (s.x, s.codebook, ()), (s.shared - s.control, 1.0)
        x, codebook, _, info = quantized_step(self.quantizer, SGD(), self.eta1, model, problem.own, batch, clock, drift)
        travelled = s.travelled + self.eta1(clock.time)
        control = s.control - s.shared + (s.w - x) / travelled
        told = s.shared + clock.share * (control - s.control)
        return replace(s, x=x, codebook=codebook, next_control=control, travelled=travelled, told=told), info

    def upload(self, state: ScaffoldState) -> Upload:
        return Upload((state.x, state.told))

    def deployed(self, state: ScaffoldState) -> Deployed:
        return self.quantizer.deployed(state.w, state.codebook)
