"""A module's parameters as ONE flat vector, and back.

The paper writes models as x, w in R^d; so does this package. `Layout` is the only place that knows parameter names
and shapes. Buffers (BatchNorm's running statistics) are not part of the vector: they are measured on the model that
is deployed (`evaluate.calibrate`), not learned. Neither are frozen parameters (requires_grad=False): they stay in the
module as they are, and go into its file from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qupel.util.errors import UserError

_QUANTIZABLE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


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

    weights  the layers that can be quantized, in the module's order; of shared weights the first name
    ends     the module's first and last Linear/Conv weight
    barred   a Linear/Conv weight that cannot be quantized -> why
    frozen   how many numbers of the model are in frozen parameters, outside of the vector
    """

    slots: tuple[Slot, ...]
    weights: tuple[str, ...]
    ends: tuple[str, ...] = ()
    barred: Mapping[str, str] = field(default_factory=dict)
    frozen: int = 0

    @staticmethod
    def of(module: nn.Module, dtype: torch.dtype = torch.float32) -> Layout:
        slots, start, frozen = [], 0, 0
        for name, p in module.named_parameters():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise UserError(f"parameter {name!r} has no shape yet: call the model once on an example before")
            if not p.requires_grad:
                frozen += p.numel()
                continue
            if p.dtype != dtype:
                allowed = str(dtype).removeprefix("torch.")
                raise UserError(f"parameter {name!r} has type {p.dtype}; only {allowed} models can be trained")
            slots.append(Slot(name, tuple(p.shape), start, start + p.numel()))
            start += p.numel()
        layers, barred = _layers(module)
        weights = tuple(w for w in dict.fromkeys(layers) if w not in barred)
        return Layout(tuple(slots), weights, tuple(layers[:1] + layers[-1:]), barred, frozen)

    @property
    def size(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def __getitem__(self, name: str) -> Slot:
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise UserError(f"no layer named {name!r}; this model has: {', '.join(s.name for s in self.slots)}")

    def default_layers(self) -> tuple[str, ...]:
        """The paper's choice: every Linear/Conv weight but the first, the last and what is tied to them."""
        return tuple(w for w in self.weights if w not in self.ends)

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's parameters as a new vector (d,)."""
        values = dict(module.named_parameters())
        first = values[self.slots[0].name]
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


def _layers(module: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Every Linear/Conv layer's weight by name, in the module's order, and why some of them cannot be quantized."""
    names = {id(p): name for name, p in module.named_parameters()}  # of shared ones the first
    layers, barred = [], {}
    for path, m in module.named_modules():
        if not isinstance(m, _QUANTIZABLE):
            continue
        weight, name = m._parameters.get("weight"), f"{path}.weight" if path else "weight"
        if weight is None:
            barred[name] = "computed from other parameters, as weight_norm does (which can be taken off before)"
        else:
            name = names[id(weight)]
            if not weight.requires_grad:
                barred[name] = "frozen (requires_grad=False), it stays as it is"
        layers.append(name)
    return layers, barred


def choose_layers(layout: Layout, names: Iterable[str] | None) -> tuple[str, ...]:
    """The layers to quantize: the default ones, or those named, with or without `.weight`."""
    if names is None:
        return layout.default_layers()
    chosen = []
    for name in names:
        full = name if name in {*layout.barred, *(s.name for s in layout.slots)} else f"{name}.weight"
        if full in layout.barred:
            raise UserError(f"layer {name!r} cannot be quantized: {layout.barred[full]}")
        if full not in layout.weights:
            raise UserError(f"no layer {name!r} to quantize; this model has: {', '.join(layout.weights)}")
        chosen.append(full)
    return tuple(chosen)
