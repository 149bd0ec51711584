"""FedBN: everything is shared but the normalizations, which fit each client's own features."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qupel.core.layout import Layout, Slot
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Info
from qupel.parts.layers import LayersState, OwnLayers, named_layers, norms
from qupel.parts.methods.base import methods, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Problem


@methods.register("fedbn", paper="Li, Jiang, Zhang, Kamp, Dou, ICLR 2021")
@dataclass(frozen=True)
class FedBN(OwnLayers):
    """x = (shared layers, own normalizations): tau steps on f_i(x) from it;  shared = mean of the clients' shared ones.

    Running statistics are each client's own in every method here. layers: the client's own ones, by name; by default
    the weights and biases of all normalizations. A network without any: FedAvg.
    """

    eta1: Schedule = Schedule(0.1)
    layers: tuple[str, ...] | None = None
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Prox()

    def own(self, layout: Layout) -> tuple[Slot, ...]:
        return norms(layout) if self.layers is None else named_layers(layout, self.layers)

    def step(self, s: LayersState, problem: Problem, batch: Batch, clock: Clock) -> tuple[LayersState, Info]:
        model = s.x, s.codebook, s.memory
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, model, problem.own, batch, clock
        )
        return replace(s, x=x, codebook=codebook, memory=memory), info
