"""A client's state as one row of float32, and back: its phase and its tensors, without what it receives at the start of
every round, w above all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor

from qupel.core.codebook import Codebook
from qupel.core.layout import Layout
from qupel.parts.base import State


@dataclass(frozen=True)
class Shape:
    """What a row holds: the client's phase, the shapes of the tensors of each field, the layers of each codebook."""

    phase: int
    parts: Mapping[str, tuple[tuple[int, ...], ...]]
    layers: Mapping[str, tuple[str, ...]]

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shapes in self.parts.values() for shape in shapes]

    @property
    def bytes(self) -> int:
        return 4 * sum(self.sizes)

    @property
    def key(self) -> tuple[object, ...]:
        """What two equal shapes have in common."""
        return self.phase, *self.parts.items(), *self.layers.items()

    def table(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Shape:
        parts = {name: tuple(map(tuple, shapes)) for name, shapes in table["parts"].items()}
        return cls(table["phase"], parts, {name: tuple(layers) for name, layers in table["layers"].items()})


@dataclass(frozen=True)
class Forms:
    """How rows are read: the layout of a client's network, and the state that the method of a phase keeps."""

    layout: Callable[[int], Layout]
    state: Callable[[int], type[State]]


def flatten(state: State, phase: int) -> tuple[Shape, list[Tensor]]:
    """A state's shape and its tensors, in the order of its fields, without what comes anew with every round."""
    parts, layers = {}, {}
    tensors: list[Tensor] = []
    for f in fields(state):
        if f.metadata.get("received"):
            continue
        value = getattr(state, f.name)
        if isinstance(value, Codebook):
            layers[f.name] = tuple(slot.name for slot in value.slots)
            value = (*value.centers, *value.scales)
        found = (value,) if isinstance(value, Tensor) else value
        parts[f.name] = tuple(tuple(t.shape) for t in found)
        tensors += found
    return Shape(phase, parts, layers), tensors


def unflatten(row: Tensor, shape: Shape, client: int, forms: Forms, w: Tensor) -> State:
    """The state of a row, whose tensors are views of it. w stands for what `receive` will fill."""
    kind: Any = forms.state(shape.phase)
    layout = forms.layout(client)
    pieces = iter(row[: sum(shape.sizes)].split(shape.sizes))
    values: dict[str, Any] = {}
    for f in fields(kind):
        if f.metadata.get("received"):
            values[f.name] = w
            continue
        found = tuple(next(pieces).view(s) for s in shape.parts[f.name])
        if f.name in shape.layers:
            slots = tuple(layout[name] for name in shape.layers[f.name])
            values[f.name] = Codebook(slots, found[: len(slots)], found[len(slots) :])
        else:
            values[f.name] = found if f.name in _tuples(kind) else found[0]
    return kind(**values)


@lru_cache(maxsize=64)
def _tuples(kind: Any) -> frozenset[str]:
    """The fields of a state that are tuples of tensors."""
    return frozenset(name for name, hint in get_type_hints(kind).items() if get_origin(hint) is tuple)


def one_row(tensors: Sequence[Tensor]) -> Tensor:
    """All of them one after the other (n,)."""
    return torch.cat([t.reshape(-1) for t in tensors])
