"""A codebook says what is quantized: layer -> sorted centers. A layer that is absent is full precision, so an empty
codebook *is* the full-precision client. Clients differ in their codebooks and in nothing else.

A stack of clients has one codebook: x (k, d), centers (k, m). Shapes are written (..., d)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.errors import UserError
from qupel.flat import Layout, Slot, choose_layers
from qupel.quantize import assign, init_centers, pick

Plan = Mapping[str, int]  # layer -> number of centers; empty: full precision
Codes = tuple[Tensor, ...]  # per quantized layer, the index of each weight's center

FULL_PRECISION = 32


@dataclass(frozen=True)
class Nearest:
    """Each weight's nearest center: which it is, a tensor of codes a quantized layer, and Q_c(x) itself (..., d)."""

    codes: Codes
    q: Tensor


@dataclass(frozen=True)
class Codebook:
    """The quantized layers' places in the vector and their centers, in the same order."""

    slots: tuple[Slot, ...] = ()
    centers: tuple[Tensor, ...] = ()  # each (..., m), sorted

    def __iter__(self) -> Iterator[tuple[Slot, Tensor]]:
        return iter(zip(self.slots, self.centers, strict=True))

    def __len__(self) -> int:
        return len(self.slots)

    def with_centers(self, centers: Iterable[Tensor]) -> Codebook:
        return Codebook(self.slots, tuple(centers))

    def assign(self, x: Tensor) -> Codes:
        return tuple(assign(x[..., slot.slice], c) for slot, c in self)

    def nearest(self, x: Tensor, codes: Codes | None = None) -> Nearest:
        """codes: taken for nearest, whatever the centers are now."""
        codes, q = self.assign(x) if codes is None else codes, x.clone()
        for (slot, c), k in zip(self, codes, strict=True):
            pick(c, k, out=q[..., slot.slice])
        return Nearest(codes, q)

    def hard(self, x: Tensor) -> Tensor:
        """Q_c(x): every weight of a quantized layer at its nearest center (..., d)."""
        return self.nearest(x).q

    def map(self, x: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """x with f(layer's weights, layer's centers) in place of every quantized layer (..., d)."""
        y = x.clone()
        for slot, c in self:
            y[..., slot.slice] = f(x[..., slot.slice], c)
        return y

    def free(self, size: int, device: torch.device | None = None) -> Tensor:
        """1 where a coordinate is full precision, 0 where it is quantized (d,)."""
        mask = torch.ones(size, device=device)
        for slot in self.slots:
            mask[slot.slice] = 0
        return mask


def plan_bits(layout: Layout, bits: int | Mapping[str, int], layers: Iterable[str] | None = None) -> dict[str, int]:
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
    for name, b in zip(choose_layers(layout, bits), bits.values(), strict=True):
        if b != FULL_PRECISION and not 1 <= b <= 8:
            raise UserError(f"bits = {b} for layer {name!r}: allowed are 1 to 8, and 32 for full precision")
        if b != FULL_PRECISION:
            plan[name] = 2**b
    return plan


def _nothing_to_quantize(layout: Layout, bits: int, named: bool) -> str:
    """Why no layer would get these bits, and what to do."""
    why = "no layer is named" if named else "it has no Linear or Conv layer"
    if layout.ends and not named:
        why = "its first and its last layer stay full precision, and there is no other"
    for reason in dict.fromkeys(layout.barred.values()):
        why += f" ({', '.join(name for name, r in layout.barred.items() if r == reason)}: {reason})"
    names = ", ".join(repr(name.removesuffix(".weight")) for name in layout.weights)
    ways = (f"name layers (layers = [{names}]), or " if names else "") + "ask for full precision (bits = 32)"
    return f"bits = {bits}: nothing of this model would be quantized: {why}; {ways}"


def start_codebook(layout: Layout, x: Tensor, plan: Plan, how: str) -> Codebook:
    """Centers for every layer of the plan, placed by `how` (see `quantize.init_centers`)."""
    slots = tuple(layout[name] for name in plan)
    centers = (init_centers(x[s.slice], how=how, levels=m) for s, m in zip(slots, plan.values(), strict=True))
    return Codebook(slots, tuple(centers))


def model_bytes(size: int, codebook: Codebook) -> int:
    """The floor of a model's file: bits x quantized weights / 8 + fp32 rest + fp32 centers."""
    packed = sum((slot.size * max(1, (len(c) - 1).bit_length()) + 7) // 8 + 4 * len(c) for slot, c in codebook)
    return packed + 4 * (size - sum(slot.size for slot in codebook.slots))


def mean_bits(codebook: Codebook) -> float:
    """Average bits per weight over the quantized layers (32 when there are none)."""
    total = sum(slot.size for slot in codebook.slots)
    return sum(slot.size * max(1, (len(c) - 1).bit_length()) for slot, c in codebook) / total if total else 32.0
