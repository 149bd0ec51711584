"""FedRep: a shared representation and each client's own head, trained in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qupel.core.layout import Layout, Slot
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Info
from qupel.parts.layers import LayersState, OwnLayers, head, merged, named_layers
from qupel.parts.methods.base import methods
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("fedrep", paper="Collins, Hassani, Mokhtari, Shakkottai, ICML 2021")
@dataclass(frozen=True)
class FedRep(OwnLayers):
    """x = (shared body, own head): steps of the head alone, then steps of the body alone;  body = mean of the bodies.

    head_steps of the one, body_steps of the other, and so on: together tau of a round, each round is as in the paper.
    layers: the head, by name; by default the last weight layer and its bias. Levels move with their layers.
    """

    eta1: Schedule = Schedule(0.1)
    head_steps: int = 5
    body_steps: int = 5
    layers: tuple[str, ...] | None = None
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def __post_init__(self) -> None:
        if self.head_steps < 0 or self.body_steps < 1:
            raise ValueError(f"head_steps = {self.head_steps}, body_steps = {self.body_steps}: at least 0 and 1")

    def own(self, layout: Layout) -> tuple[Slot, ...]:
        return head(layout) if self.layers is None else named_layers(layout, self.layers)

    def step(self, s: LayersState, problem: Problem, batch: Batch, clock: Clock) -> tuple[LayersState, Info]:
        heads = bool(s.own) and clock.step % (self.head_steps + self.body_steps) < self.head_steps
        still = [slot for slot in problem.own.layout.slots if (slot in s.own.slots) != heads]
        descent = self.quantizer.gradient(s.x, s.codebook, problem.own, batch, clock)
        for slot in still:
            descent.gradient[..., slot.slice] = 0
        y, memory = self.optimizer.step(s.x, descent.gradient, s.memory, self.eta1(clock.time))
        x, book, info = self.quantizer.settle(y, s.codebook, descent, problem.own, batch, self.eta1, clock)
        pairs = zip(book, s.codebook, strict=True)
        book = book.with_centers(old if slot in still else new for (slot, new), (_, old) in pairs)
        return replace(s, x=merged(x, s.x, still), codebook=book, memory=memory), info
