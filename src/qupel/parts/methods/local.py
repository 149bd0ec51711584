"""Algorithm 1 at each client, no communication: centralized training with one client, Local with many.

A client without a codebook trains at full precision with the plain optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qupel.core.codebook import Plan
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.methods.base import Alone, Batch, Deployed, Gradient, State, quantized
from qupel.parts.methods.quantizer import Quantizer


@dataclass(frozen=True)
class Local(Alone):
    """Minimize f(x) + f(Q~_c(x)) + lambda R(x, c) by alternating proximal steps on x and c; deploy Q_c(x).

    quantize = False: full precision whatever the client's plan, the warm-up of a phase that quantizes.
    """

    method: Literal["local"] = "local"
    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Quantizer()
    quantize: bool = True

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        codebook = self.quantizer.start(before.codebook, before.x, plan if self.quantize else {}, layout)
        return State(before.x, before.w, codebook, self.optimizer.memory(before.x))

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        q, eta1 = self.quantizer, self.eta1(clock.time)
        g = gradient(s.x, batch)
        g = q.add_weight_gradient(g, gradient, s.x, s.codebook, batch)  # line 2
        y, memory = self.optimizer.step(s.x, g, s.memory, eta1)
        x, near = q.prox_weights(y, s.codebook, self.eta1, clock)  # line 3
        h = q.center_gradient(gradient, x, s.codebook, near, batch, clock)  # line 4, at the new x
        x, codebook = q.prox_centers(x, s.codebook, near, h, self.eta1, clock)  # line 5
        return replace(s, x=x, codebook=codebook, memory=memory)

    def deployed(self, state: State) -> Deployed:
        return quantized(state)  # output: Q_c(x)
