"""A module's parameters as ONE flat vector, and back.

The paper writes models as x, w in R^d; so does this package. `Layout` is the only place that knows parameter names
and shapes. Buffers (BatchNorm's running statistics) are not part of the vector: they are measured on the model that
is deployed (`evaluate.calibrate`), not learned. Neither are frozen parameters (requires_grad=False): they stay in the
module as they are, and go into its file from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qupel.util.errors import UserError


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, and the names of a layer's weights. A class that is not torch's is given by its path, so that
    nobody has to load it."""

    classes: tuple[type[nn.Module] | str, ...]
    weights: Callable[[Any], Iterable[str]]
    about: str  # its weights in words, for docs/layers.md

    def __contains__(self, module: nn.Module) -> bool:
        paths = {f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__}
        return any(c in paths if isinstance(c, str) else isinstance(module, c) for c in self.classes)

    @property
    def names(self) -> list[str]:
        return [c if isinstance(c, str) else c.__name__ for c in self.classes]


def _weight(layer: nn.Module) -> tuple[str, ...]:
    return ("weight",)


def _recurrent(layer: nn.RNNBase) -> list[str]:
    return [name for name in layer._flat_weights_names if name.startswith("weight")]


def _attention(layer: nn.MultiheadAttention) -> list[str]:
    same = layer._qkv_same_embed_dim
    return ["in_proj_weight"] if same else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]


KINDS = (
    Kind((nn.Linear, nn.Bilinear, "transformers.pytorch_utils.Conv1D"), _weight, "`weight`"),
    Kind((nn.Conv1d, nn.Conv2d, nn.Conv3d), _weight, "`weight`"),
    Kind((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _weight, "`weight`"),
    Kind((nn.Embedding, nn.EmbeddingBag), _weight, "`weight`, unless it has a `max_norm`"),
    Kind((nn.LSTM, nn.GRU, nn.RNN), _recurrent, "`weight_ih_l*`, `weight_hh_l*`, also `_reverse`, `weight_hr_l*`"),
    Kind((nn.LSTMCell, nn.GRUCell, nn.RNNCell), lambda _: ("weight_ih", "weight_hh"), "`weight_ih`, `weight_hh`"),
    Kind(
        (nn.MultiheadAttention,),
        _attention,
        "`in_proj_weight`, or `q_proj_weight`, `k_proj_weight`, `v_proj_weight`; its `out_proj` is a Linear",
    ),
)  # what is quantized by default, the first and the last weight apart

VECTOR = "a vector"


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
        value = value.to_dense() if value.is_sparse else value  # a gradient of Embedding(sparse=True)
        clients = value.shape[: value.ndim - len(self.shape)]
        return (value.movedim(-3, -1) if len(self.shape) == 4 else value).reshape(*clients, self.size)


@dataclass(frozen=True)
class Layout:
    """Names and slices of a module's parameters in one vector of length `size`.

    weights  of layers that can be quantized (`KINDS`), in the module's order; of shared weights the first name
    ends     the module's first and last such weight
    barred   such a weight that cannot be quantized -> why
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
        """The paper's choice: every layer's weight but the first, the last and what is tied to them."""
        return tuple(w for w in self.weights if w not in self.ends)

    @property
    def others(self) -> tuple[str, ...]:
        """Parameters of two dimensions and more that belong to no known layer: quantized where they are named."""
        return tuple(s.name for s in self.slots if len(s.shape) > 1 and s.name not in self.weights)

    def left(self, chosen: Iterable[str]) -> dict[str, str]:
        """What stays full precision where these layers are quantized -> why; vectors, such as biases, last."""
        chosen, first, last = set(chosen), self.ends[:1], self.ends[-1:]
        why = dict.fromkeys(self.weights, "not named")
        why |= dict.fromkeys(last, "the last layer") | dict.fromkeys(first, "the first layer")
        why |= dict.fromkeys(first, "the first and the last layer") if first == last else {}
        why |= dict.fromkeys(self.others, "of no known kind of layer, not named") | dict(self.barred)
        why |= {s.name: VECTOR for s in self.slots if len(s.shape) < 2}
        return {name: reason for name, reason in why.items() if name not in chosen}

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
    """Every layer's weights by name, in the module's order, and why some of them cannot be quantized."""
    names = {id(p): name for name, p in module.named_parameters()}  # of shared ones the first
    layers, barred = [], {}
    for path, m in module.named_modules():
        for own in next((kind.weights(m) for kind in KINDS if m in kind), ()):
            weight, name = m._parameters.get(own), f"{path}.{own}" if path else own
            if weight is None:
                barred[name] = "computed from other parameters, as weight_norm does (which can be taken off before)"
            else:
                name = names[id(weight)]
                if not weight.requires_grad:
                    barred[name] = "frozen (requires_grad=False), it stays as it is"
                elif getattr(m, "max_norm", None) is not None:
                    barred[name] = "its max_norm changes it whenever it is used"
            layers.append(name)
    return layers, barred


def choose_layers(layout: Layout, names: Iterable[str] | None) -> tuple[str, ...]:
    """The layers to quantize: the default ones, or those named, with or without `.weight`; the name of a layer with
    several weights, such as an LSTM's, means all of them."""
    if names is None:
        return layout.default_layers()
    chosen: list[str] = []
    for name in names:
        chosen += _named(layout, name)
    return tuple(chosen)


def _named(layout: Layout, name: str) -> list[str]:
    full = name if name in {*layout.barred, *(s.name for s in layout.slots)} else f"{name}.weight"
    if full in layout.barred:
        raise UserError(f"layer {name!r} cannot be quantized: {layout.barred[full]}")
    if full in layout.weights or full in layout.others:
        return [full]
    within = [w for w in layout.weights if name and w.rpartition(".")[0] == name]
    if not within:
        raise UserError(f"no layer {name!r} to quantize; this model has: {', '.join(layout.weights)}")
    return within


@dataclass(frozen=True)
class Coverage:
    """How much of a model is quantized, and why the rest is not."""

    quantized: int  # numbers
    numbers: int  # in all, buffers apart
    left: Mapping[str, str]  # what is full precision -> why

    @staticmethod
    def of(layout: Layout, chosen: Iterable[str]) -> Coverage:
        chosen = tuple(chosen)
        return Coverage(sum(layout[name].size for name in chosen), layout.size + layout.frozen, layout.left(chosen))

    def __str__(self) -> str:
        """One line for people."""
        named = [f"{name.removesuffix('.weight')} ({why})" for name, why in self.left.items() if why != VECTOR]
        vectors = len(self.left) - len(named)
        rest = ", ".join(named + ([f"{vectors} biases and other vectors"] if vectors else []))
        share = f"{self.quantized:,} of {self.numbers:,} numbers ({self.quantized / max(1, self.numbers):.1%})"
        return f"{share}; full precision: {rest or 'nothing'}"
