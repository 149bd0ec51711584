"""IFCA: several shared models; each client trains the one that fits its data best."""

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
class ClusterState(State):
    """choice: which of the models is this client's (..., 1), counted from 0; models: all of them; begun: 0 at the first
    step of a round, when it chooses (..., 1)."""

    choice: Tensor
    models: Rows = received()
    begun: Tensor = received()


@methods.register("ifca", paper="Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020")
@dataclass(frozen=True)
class IFCA:
    """k = argmin_j f_i(w_j) on the round's first batch;  tau steps from w_k;  w_j = mean over the clients that chose j.

    The models start at the first one, all but one of them with noise of `spread` times the deviation of its weights.
    HypCluster (Mansour, Mohri, Ro, Suresh, 2020) is the same alternation and not here a second time.
    """

    state_type: ClassVar[type[State]] = ClusterState

    eta1: Schedule = Schedule(0.1)
    clusters: int = 2
    spread: float = 0.1
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = NoQuantizer()

    def broadcast(self, w: Tensor) -> Rows:
        noise = torch.Generator().manual_seed(0)
        deviation = self.spread * float(w.std())
        others = (w + deviation * torch.randn(w.shape, generator=noise).to(w) for _ in range(self.clusters - 1))
        return w, *others

    def start(self, before: State, plan: Plan, problem: Problem) -> ClusterState:
        x, codebook = self.quantizer.start(replace(before, x=before.w), plan, problem.own.layout)
        first = x.new_zeros(*x.shape[:-1], 1)
        return ClusterState(x, before.w, codebook, self.optimizer.memory(x), choice=first, models=(x,), begun=first)

    def receive(self, state: ClusterState, w: Rows) -> ClusterState:
        begun = torch.zeros_like(state.choice)
        return replace(state, w=_pick(w, state.choice), models=w, begun=begun, memory=self.optimizer.memory(w[0]))

    def step(self, s: ClusterState, problem: Problem, batch: Batch, clock: Clock) -> tuple[ClusterState, Info]:
        if not bool(s.begun.any()):
            values = torch.stack([torch.as_tensor(problem.own.value(w, batch)) for w in s.models], -1)  # (..., K)
            choice = values.argmin(-1, keepdim=True).to(s.x.dtype)
            s = replace(s, choice=choice, x=_pick(s.models, choice), begun=torch.ones_like(s.begun))
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def upload(self, state: ClusterState) -> Upload:
        mine = torch.arange(len(state.models), device=state.x.device) == state.choice  # (..., K)
        return Upload((state.x,) * len(state.models), mine.to(state.x.dtype))

    def deployed(self, state: ClusterState) -> Deployed:
        return self.quantizer.deployed(state.w, state.codebook)


def _pick(models: Rows, choice: Tensor) -> Tensor:
    """The chosen one of each client: choice (..., 1) -> (..., d)."""
    found = models[0]
    for k, model in enumerate(models[1:], 1):
        found = torch.where(choice == k, model, found)
    return found
