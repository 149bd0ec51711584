"""FedPer: the body of the network is shared, its head is each client's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qupel.core.layout import Layout, Slot
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Info
from qupel.parts.layers import LayersState, OwnLayers, head, named_layers
from qupel.parts.methods.base import methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("fedper", paper="Arivazhagan, Aggarwal, Singh, Choudhary, 2019")
@dataclass(frozen=True)
class FedPer(OwnLayers):
    """x = (shared body, own head): tau steps on f_i(x) from it;  body = mean of the clients' bodies.

    layers: the client's own ones, by name; by default the last weight layer and its bias. None of them (an empty list)
    is FedAvg, all of them Local, and the lower ones LG-FedAvg (Liang et al., 2020).
    """

    eta1: Schedule = Schedule(0.1)
    layers: tuple[str, ...] | None = None
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def own(self, layout: Layout) -> tuple[Slot, ...]:
        return head(layout) if self.layers is None else named_layers(layout, self.layers)

    def step(self, s: LayersState, problem: Problem, batch: Batch, clock: Clock) -> tuple[LayersState, Info]:
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info
