"""A codebook says what is quantized: layer -> sorted centers. A layer that is absent is full precision, so an empty
codebook *is* the full-precision client. Clients differ in their codebooks and in nothing else.

A stack of clients has one codebook: x (k, d), centers (k, m). Shapes are written (..., d)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qupel.core.layout import Layout, Slot, choose_layers
from qupel.core.quantize import assign, init_centers, pick
from qupel.util.errors import UserError

Codes = tuple[Tensor, ...]  # per quantized layer, the index of each weight's center

FULL_PRECISION = 32


class Plan(dict[str, int]):
    """How many centers each quantized layer gets; empty: full precision. channels: every output channel of a layer has
    a scale of its own, by which the layer's centers are multiplied."""

    def __init__(self, levels: Mapping[str, int] = MappingProxyType({}), *, channels: bool = False) -> None:
        super().__init__(levels)
        self.channels = channels and bool(levels)

    @property
    def key(self) -> tuple[object, ...]:
        """What two equal plans have in common."""
        return self.channels, *self.items()

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan, (dict(self), self.channels)


def _plan(levels: dict[str, int], channels: bool) -> Plan:
    return Plan(levels, channels=channels)


@dataclass(frozen=True)
class Nearest:
    """Each weight's nearest center: which it is, a tensor of codes a quantized layer, and Q_c(x) itself (..., d)."""

    codes: Codes
    q: Tensor


@dataclass(frozen=True)
class Layer:
    """One quantized layer: its place, its centers (..., m) and, with channels, the scales (..., o) of its channels.

    Weights are looked at in units of their channel's scale: u = x / s, Q(x) = s Q_c(u), df/du = s df/dx."""

    slot: Slot
    centers: Tensor
    scale: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """This layer's weights u in a vector x (..., d) -> (..., n): a view of x where there are no scales."""
        v = x[..., self.slot.slice]
        return v if self.scale is None else self._by_channel(v, torch.div)

    def put(self, x: Tensor, u: Tensor) -> None:
        """Write the weights u (..., n) into x (..., d)."""
        x[..., self.slot.slice] = u if self.scale is None else self._by_channel(u, torch.mul)

    def pulled(self, g: Tensor) -> Tensor:
        """df/du (..., n) of a gradient df/dx (..., d)."""
        v = g[..., self.slot.slice]
        return v if self.scale is None else self._by_channel(v, torch.mul)

    def put_gradient(self, g: Tensor, h: Tensor) -> None:
        """Write df/du = h (..., n) into a gradient df/dx (..., d): the inverse of `pulled`."""
        g[..., self.slot.slice] = h if self.scale is None else self._by_channel(h, torch.div)

    def _by_channel(self, v: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        assert self.scale is not None
        apart = v.unflatten(-1, (self.scale.shape[-1], -1))  # (..., o, n/o): a weight's first index is its channel
        return how(apart, self.scale.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class Codebook:
    """The quantized layers' places in the vector, their centers and, with channels, their scales, in the same order."""

    slots: tuple[Slot, ...] = ()
    centers: tuple[Tensor, ...] = ()  # each (..., m), sorted
    scales: tuple[Tensor, ...] = ()  # each (..., o), positive; none: one scale, 1, for all

    def __iter__(self) -> Iterator[tuple[Slot, Tensor]]:
        return iter(zip(self.slots, self.centers, strict=True))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def layers(self) -> Iterator[Layer]:
        return map(Layer, self.slots, self.centers, self.scales or [None] * len(self.slots))

    def with_centers(self, centers: Iterable[Tensor]) -> Codebook:
        return Codebook(self.slots, tuple(centers), self.scales)

    def to(self, place: torch.device | torch.dtype | str) -> Codebook:
        return Codebook(self.slots, tuple(c.to(place) for c in self.centers), tuple(s.to(place) for s in self.scales))

    def assign(self, x: Tensor) -> Codes:
        return tuple(assign(layer.of(x), layer.centers) for layer in self.layers)

    def nearest(self, x: Tensor, codes: Codes | None = None) -> Nearest:
        """codes: taken for nearest, whatever the centers are now."""
        codes = self.assign(x) if codes is None else codes
        return Nearest(codes, self.pick(x, codes))

    def pick(self, x: Tensor, codes: Codes) -> Tensor:
        """x with the centers of these codes in place of every quantized layer (..., d)."""
        y = x.clone()
        for layer, k in zip(self.layers, codes, strict=True):
            if self.scales:
                layer.put(y, pick(layer.centers, k))
            else:
                pick(layer.centers, k, out=y[..., layer.slot.slice])
        return y

    def hard(self, x: Tensor) -> Tensor:
        """Q_c(x): every weight of a quantized layer at its nearest center (..., d)."""
        return self.nearest(x).q

    def map(self, x: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """x with f(layer's weights, layer's centers) in place of every quantized layer (..., d)."""
        y = x.clone()
        for layer in self.layers:
            layer.put(y, f(layer.of(x), layer.centers))
        return y

    def free(self, size: int, device: torch.device | None = None) -> Tensor:
        """1 where a coordinate is full precision, 0 where it is quantized (d,)."""
        mask = torch.ones(size, device=device)
        for slot in self.slots:
            mask[slot.slice] = 0
        return mask


def plan_bits(
    layout: Layout, bits: int | Mapping[str, int], layers: Iterable[str] | None = None, channels: bool = False
) -> Plan:
    """How many centers each layer gets: 2^bits for the chosen layers; 32 bits is full precision, an empty plan.

    `bits` may also be a table layer -> bits; layers it leaves out stay full precision. Fewer bits for no layer at all
    are refused: nobody asks for that.
    """
    if isinstance(bits, int):
        chosen = choose_layers(layout, layers)
        if not chosen and bits != FULL_PRECISION:
            raise UserError(_nothing_to_quantize(layout, bits, named=layers is not None))
        bits = dict.fromkeys(chosen, bits)
    plan = {}
    for name, b in ((name, b) for given, b in bits.items() for name in choose_layers(layout, [given])):
        if b != FULL_PRECISION and not 1 <= b <= 8:
            raise UserError(f"bits = {b} for layer {name!r}: allowed are 1 to 8, and 32 for full precision")
        if b != FULL_PRECISION:
            plan[name] = 2**b
    return Plan(plan, channels=channels)


def _nothing_to_quantize(layout: Layout, bits: int, named: bool) -> str:
    """Why no layer would get these bits, and what to do."""
    why = "no layer is named" if named else "it has no layer of a kind that can be"
    if layout.ends and not named:
        why = "its first and its last layer stay full precision, and there is no other"
    for reason in dict.fromkeys(layout.barred.values()):
        why += f" ({', '.join(name for name, r in layout.barred.items() if r == reason)}: {reason})"
    names = ", ".join(repr(name.removesuffix(".weight")) for name in layout.weights)
    ways = (f"name layers (layers = [{names}]), or " if names else "") + "ask for full precision (bits = 32)"
    return f"bits = {bits}: nothing of this model would be quantized: {why}; {ways}"


def start_codebook(layout: Layout, x: Tensor, plan: Mapping[str, int], how: str) -> Codebook:
    """Centers for every layer of the plan, placed by `how` (see `quantize.init_centers`). With channels: on weights in
    units of their channel's scale, the mean of |x|."""
    slots = tuple(layout[name] for name in plan)
    scales = tuple(channel_scales(x[s.slice], s) for s in slots) if getattr(plan, "channels", False) else ()
    blank = Codebook(slots, tuple(x[:0] for _ in slots), scales)
    pairs = zip(blank.layers, plan.values(), strict=True)
    return blank.with_centers(init_centers(layer.of(x), how=how, levels=m) for layer, m in pairs)


def channel_scales(x: Tensor, slot: Slot) -> Tensor:
    """The mean of |x| over each output channel of a layer, 1 for a channel of zeros. (n,) -> (o,)."""
    s = x.abs().unflatten(-1, (slot.shape[0], -1)).mean(-1)
    return torch.where(s > 0, s, 1.0)


def model_bytes(size: int, codebook: Codebook) -> int:
    """The floor of a model's file: bits x quantized weights / 8 + fp32 rest + fp32 centers and scales."""
    packed = sum((slot.size * code_bits(len(c)) + 7) // 8 + 4 * len(c) for slot, c in codebook)
    packed += 4 * sum(s.numel() for s in codebook.scales)
    return packed + 4 * (size - sum(slot.size for slot in codebook.slots))


def code_bits(levels: int) -> int:
    """Bits that a code of so many levels takes."""
    return max(1, (levels - 1).bit_length())


def mean_bits(codebook: Codebook) -> float:
    """Average bits per weight over the quantized layers (32 when there are none)."""
    total = sum(slot.size for slot in codebook.slots)
    return sum(slot.size * code_bits(len(c)) for slot, c in codebook) / total if total else 32.0
