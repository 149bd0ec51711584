"""FedAvg: every client trains the global model for a while, the server averages. What is deployed is the one average,
on every client, in each client's own bits. Followed by a phase of `Local` it is FedAvg + fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, Rows, State, Upload
from qupel.parts.methods.base import OneRow, methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.task import Batch, Problem


@methods.register("fedavg", paper="McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017")
@dataclass(frozen=True)
class FedAvg(OneRow):
    """One shared model: w_i = tau optimizer steps on f_i from w;  w = mean of w_i.

    The optimizer starts afresh every round. With a quantizer clients train quantization-aware: latent models are
    averaged, each client keeps levels of its own.
    """

    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = NoQuantizer()

    @property
    def keeps_state(self) -> bool:
        return self.quantizer != NoQuantizer()  # else `receive` leaves nothing of what a client had

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(replace(before, x=before.w), plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def receive(self, state: State, w: Rows) -> State:
        return replace(state, x=w[0], w=w[0], memory=self.optimizer.memory(w[0]))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def upload(self, state: State) -> Upload:
        return Upload((state.x,))

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.w, state.codebook)
