"""A module's parameters as ONE flat vector, and back.

The paper writes models as x, w in R^d; so does this package. `Layout` is the only place that knows parameter names
and shapes. Buffers (BatchNorm's running statistics) are not part of the vector: they are measured on the model that
is deployed (`evaluate.calibrate`), not learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qupel.util.errors import UserError

_QUANTIZABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Slot:
    """Where one parameter lives in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def view(self, vector: Tensor) -> Tensor:
        """The parameter as a view of the vector (no copy); of a stack of vectors (k, d) the stack of its values.

        4-D weights lie in memory in channels_last order, the fast one for convolutions on CPUs; the logical order of
        their indices is the usual one.
        """
        part, clients = vector[..., self.start : self.stop], vector.shape[:-1]
        if len(self.shape) == 4:
            o, i, h, w = self.shape
            return part.view(*clients, o, h, w, i).movedim(-1, -3)
        return part.view((*clients, *self.shape))

    def flat(self, value: Tensor) -> Tensor:
        """The inverse of `view`: a value of the parameter in the order of the vector (..., size)."""
        clients = value.shape[: value.ndim - len(self.shape)]
        return (value.movedim(-3, -1) if len(self.shape) == 4 else value).reshape(*clients, self.size)


@dataclass(frozen=True)
class Layout:
    """Names and slices of a module's parameters in one vector of length `size`.

    `weights`: the layers that can be quantized, in the module's order.
    """

    slots: tuple[Slot, ...]
    weights: tuple[str, ...]

    @staticmethod
    def of(module: nn.Module, dtype: torch.dtype = torch.float32) -> Layout:
        slots, start = [], 0
        for name, p in module.named_parameters():
            if p.dtype != dtype:
                allowed = str(dtype).removeprefix("torch.")
                raise UserError(f"parameter {name!r} has type {p.dtype}; only {allowed} models can be trained")
            slots.append(Slot(name, tuple(p.shape), start, start + p.numel()))
            start += p.numel()
        known = {s.name for s in slots}
        weights = [
            f"{name}.weight" if name else "weight" for name, m in module.named_modules() if isinstance(m, _QUANTIZABLE)
        ]
        return Layout(tuple(slots), tuple(w for w in weights if w in known))

    @property
    def size(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def __getitem__(self, name: str) -> Slot:
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise UserError(f"no layer named {name!r}; this model has: {', '.join(s.name for s in self.slots)}")

    def default_layers(self) -> tuple[str, ...]:
        """The paper's choice: every Linear/Conv weight except the first and the last one."""
        return self.weights[1:-1]

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's parameters as a new vector (d,)."""
        values = dict(module.named_parameters())
        first = next(iter(values.values()))
        vector = torch.empty(self.size, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for slot in self.slots:
                slot.view(vector).copy_(values[slot.name])
        return vector

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Copy the vector into the module's parameters."""
        values = dict(module.named_parameters())
        with torch.no_grad():
            for slot in self.slots:
                values[slot.name].copy_(slot.view(vector))

    def bind(self, module: nn.Module) -> Tensor:
        """Make the module's parameters views of one new vector, and return it.

        From then on writing the vector *is* setting the model: the hot path copies one buffer, not many tensors.
        """
        values = self.flatten(module)
        parameters = dict(module.named_parameters())
        for slot in self.slots:
            parameters[slot.name].data = slot.view(values)
        return values


def choose_layers(layout: Layout, names: Iterable[str] | None) -> tuple[str, ...]:
    """The layers to quantize: the default ones, or those named, with or without `.weight`."""
    if names is None:
        return layout.default_layers()
    chosen = []
    for name in names:
        full = name if name in {s.name for s in layout.slots} else f"{name}.weight"
        if full not in layout.weights:
            raise UserError(f"no layer {name!r} to quantize; this model has: {', '.join(layout.weights)}")
        chosen.append(full)
    return tuple(chosen)
