"""FedAvg (McMahan et al., 2017): every client trains the global model for a while, the server averages.

What is deployed is the one average, on every client. Followed by a phase of `Local` it is FedAvg + fine-tuning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from qupel.algorithms.base import Batch, Deployed, Gradient, State, Uploads, mean
from qupel.codebook import Codebook, Plan
from qupel.flat import Layout
from qupel.optim import SGD, Optimizer
from qupel.schedule import Clock, Schedule


@dataclass(frozen=True)
class FedAvg:
    """w_i = tau optimizer steps on f_i from w;  w = mean of w_i. The optimizer starts afresh every round."""

    keeps_state: ClassVar[bool] = False  # `receive` leaves nothing of what a client had
    streams: ClassVar[bool] = True

    method: Literal["fedavg"] = "fedavg"
    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        return State(before.w, before.w, Codebook(), self.optimizer.memory(before.w))

    def receive(self, state: State, w: Tensor) -> State:
        return replace(state, x=w, w=w, memory=self.optimizer.memory(w))

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        x, memory = self.optimizer.step(s.x, gradient(s.x, batch), s.memory, self.eta1(clock.time))
        return replace(s, x=x, memory=memory)

    def upload(self, state: State) -> Tensor:
        return state.x

    def aggregate(self, w: Tensor, uploads: Uploads) -> Tensor:
        return mean(uploads)

    def deployed(self, state: State) -> Deployed:
        return Deployed(state.w, state.codebook)
