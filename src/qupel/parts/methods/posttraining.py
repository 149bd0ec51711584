"""Post-training quantization, the honest floor: train at full precision, place the centers at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qupel.core.codebook import Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Optimizer
from qupel.core.quantize import init_centers
from qupel.core.schedule import Clock, Schedule
from qupel.parts.methods.base import Alone, Batch, Deployed, Gradient, State


@dataclass(frozen=True)
class PostTraining(Alone):
    """Optimizer steps on f alone; deploy Q_c(x) with c placed on the trained layer: `range` (nearest point of the
    min-max grid) or `kmeans`."""

    method: Literal["posttraining"] = "posttraining"
    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    init: Literal["range", "kmeans", "quantile", "paper"] = "kmeans"

    def start(self, before: State, plan: Plan, layout: Layout) -> State:
        codebook = start_codebook(layout, before.x, plan, self.init)
        return State(before.x, before.w, codebook, self.optimizer.memory(before.x))

    def step(self, s: State, gradient: Gradient, batch: Batch, clock: Clock) -> State:
        x, memory = self.optimizer.step(s.x, gradient(s.x, batch), s.memory, self.eta1(clock.time))
        return replace(s, x=x, memory=memory)

    def deployed(self, state: State) -> Deployed:
        placed = (init_centers(state.x[slot.slice], how=self.init, levels=len(c)) for slot, c in state.codebook)
        codebook = state.codebook.with_centers(placed)
        return Deployed(codebook.hard(state.x), codebook)
