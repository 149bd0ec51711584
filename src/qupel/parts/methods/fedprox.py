"""FedProx: FedAvg whose clients are held back to the w that came."""

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


@methods.register("fedprox", paper="Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020")
@dataclass(frozen=True)
class FedProx(OneRow):
    """w_i = tau steps on f_i(x) + (mu/2) |x - w|^2 from w;  w = mean of w_i.  mu = 0: FedAvg."""

    eta1: Schedule = Schedule(0.1)
    mu: Schedule = Schedule(0.01)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = NoQuantizer()

    @property
    def keeps_state(self) -> bool:
        return self.quantizer != NoQuantizer()

    def start(self, before: State, plan: Plan, problem: Problem) -> State:
        x, codebook = self.quantizer.start(replace(before, x=before.w), plan, problem.own.layout)
        return State(x, before.w, codebook, self.optimizer.memory(x))

    def receive(self, state: State, w: Rows) -> State:
        return replace(state, x=w[0], w=w[0], memory=self.optimizer.memory(w[0]))

    def step(self, s: State, problem: Problem, batch: Batch, clock: Clock) -> tuple[State, Info]:
        model, pull = (s.x, s.codebook, s.memory), (s.x - s.w, self.mu(clock.time))
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock, pull
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info

    def upload(self, state: State) -> Upload:
        return Upload((state.x,))

    def deployed(self, state: State) -> Deployed:
        return self.quantizer.deployed(state.w, state.codebook)

    def tie(self, time: float) -> float:
        return self.mu(time)
