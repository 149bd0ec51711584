"""Methods that share some layers of a model and leave the others to each client: which layers these are, and how the
two are put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout, Slot
from qupel.core.optim import Optimizer
from qupel.parts.base import Deployed, Rows, State, Upload
from qupel.parts.methods.base import OneRow
from qupel.parts.quantizers import Quantizer
from qupel.tasks.task import Problem
from qupel.util.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LayersState(State):
    """own: the client's own layers, as a codebook without levels; x has their values, and the shared ones beside."""

    own: Codebook


class OwnLayers(OneRow):
    """What such methods have in common: the server's w takes the place of all but the client's own layers, and these
    never leave it: in their place w goes back as it came. What ships is the newest w with the client's own layers."""

    state_type: ClassVar[type[State]] = LayersState

    optimizer: Optimizer
    quantizer: Quantizer

    def own(self, layout: Layout) -> tuple[Slot, ...]:
        """The layers that stay with the client."""
        raise NotImplementedError

    def start(self, before: State, plan: Plan, problem: Problem) -> LayersState:
        slots = self.own(problem.own.layout)
        before = replace(before, x=merged(before.w, before.x, slots))
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        nothing = tuple(x.new_zeros(*x.shape[:-1], 0) for _ in slots)
        return LayersState(x, before.w, codebook, self.optimizer.memory(x), own=Codebook(slots, nothing))

    def receive(self, state: LayersState, w: Rows) -> LayersState:
        x = merged(w[0], state.x, state.own.slots)
        return replace(state, x=x, w=w[0], memory=self.optimizer.memory(x))

    def upload(self, state: LayersState) -> Upload:
        return Upload((merged(state.x, state.w, state.own.slots),))

    def deployed(self, state: LayersState) -> Deployed:
        return self.quantizer.deployed(merged(state.w, state.x, state.own.slots), state.codebook)


def merged(x: Tensor, other: Tensor, slots: Iterable[Slot]) -> Tensor:
    """x with the other's values in these places (..., d)."""
    y = x.expand(torch.broadcast_shapes(x.shape, other.shape)).clone()
    for slot in slots:
        y[..., slot.slice] = other[..., slot.slice]
    return y


def named_layers(layout: Layout, names: Sequence[str]) -> tuple[Slot, ...]:
    """The parameters of these layers: a name is that of a parameter, of a layer, or of what contains layers."""
    found = [[s for s in layout.slots if s.name == name or s.name.startswith(f"{name}.")] for name in names]
    for name, slots in zip(names, found, strict=True):
        if not slots:
            raise UserError(f"no layer named {name!r}; this model has: {', '.join(s.name for s in layout.slots)}")
    chosen = {slot for slots in found for slot in slots}
    return tuple(slot for slot in layout.slots if slot in chosen)


def head(layout: Layout) -> tuple[Slot, ...]:
    """The last weight layer and its bias."""
    last = next(reversed(layout.ends or layout.weights), "")
    return tuple(slot for slot in layout.slots if slot.name in {last, _bias(last)})


def norms(layout: Layout) -> tuple[Slot, ...]:
    """Weights and biases of normalizations: told by a weight of one dimension, or of its bias's shape."""
    known, shapes = {*layout.weights, *layout.barred}, {slot.name: slot.shape for slot in layout.slots}
    scales = {
        name
        for name, shape in shapes.items()
        if name.rpartition(".")[2] == "weight" and name not in known
        if len(shape) == 1 or shapes.get(_bias(name)) == shape
    }
    return tuple(slot for slot in layout.slots if slot.name in scales | {_bias(name) for name in scales})


def _bias(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"
