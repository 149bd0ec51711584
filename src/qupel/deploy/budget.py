"""Which bits fit into a budget of bytes, counting codes, centers, scales, head and everything that is not quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qupel.core.codebook import FULL_PRECISION, Plan, channel_scales, plan_bits
from qupel.core.layout import Layout, Slot, choose_layers
from qupel.core.quantize import BITS, hard, init_centers
from qupel.deploy.about import About
from qupel.deploy.file import head_for
from qupel.deploy.pack import packed_size
from qupel.deploy.packed import Rest, dtype_name, tensors_of
from qupel.util.errors import UserError

WIDTHS = (*BITS, FULL_PRECISION)
_ABOUT = 1024  # bytes set aside for what the file will say about the model, when that is not known
_EXTRA = 256  # ... and for results that are added to a known description
_SAMPLE = 4096  # weights of a layer that its sensitivity is measured on
_MEASURED = 4  # bits up to which it is measured; from there on the error falls by 4 with every bit

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Bytes: "98304", "96KiB", "1.5 MB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS or not float(found[1]) > 0:
        raise UserError(f"size {text!r}: a number greater than 0 with B, kB, MB, GB, KiB, MiB or GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape and dtype


def shapes_of(module: nn.Module) -> Shapes:
    """Shape and dtype of everything a file of this module holds."""
    return {name: (tuple(t.shape), dtype_name(name, t)) for name, t in tensors_of(module).items()}


def file_bytes(
    module: nn.Module | Shapes, levels: Mapping[str, int], about: About | None = None, rest: Rest = "fp32"
) -> int:
    """Bytes of the packed file of this module with m = levels[layer] centers: exactly what `save` will write. A `Plan`
    also tells whether channels have scales."""
    found = shapes_of(module) if isinstance(module, nn.Module) else module
    if unknown := [name for name in levels if name not in found]:
        raise UserError(f"no layer named {unknown[0]!r} in this model")
    plain = {
        name: (shape, "F16" if rest == "fp16" and kind == "F32" else kind)
        for name, (shape, kind) in found.items()
        if name not in levels
    }
    planned = {name: (found[name][0], m) for name, m in levels.items()}
    head, entries = head_for(planned, plain, about or About(), channels=getattr(levels, "channels", False))
    return len(head) + sum(entry.size for entry in entries)


@dataclass(frozen=True)
class BudgetPlan:
    """What fits: the widest uniform bits, and bits per layer by sensitivity (32: full precision).

    bytes count everything and bound the file from above. error: mean relative squared error of the planned layers'
    weights under k-means, the proxy that `bits` makes small; uniform_error: the same for the uniform plan.
    """

    budget: int
    uniform: int
    uniform_bytes: int
    uniform_error: float
    bits: dict[str, int]
    bytes: int
    error: float
    channels: bool = False  # levels are scaled by channel, and their scales are counted

    def levels(self) -> Plan:
        """Layer -> number of centers, as codebooks are planned; full-precision layers are left out."""
        levels = {name: 2**b for name, b in self.bits.items() if b != FULL_PRECISION}
        return Plan(levels, channels=self.channels)


class Planner:
    """Sizes and sensitivities of one module, measured once for any number of budgets.

    module    its weights are what sensitivity is measured on (trained ones tell more than initial ones)
    layers    that may be quantized: by default all but the first and the last, as in the paper
    about     what the file will say, if known; else 1 KiB is set aside for it
    channels  levels are scaled by channel: 4 bytes for each, and smaller errors
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layers: Iterable[str] | None = None,
        about: About | None = None,
        rest: Rest = "fp32",
        channels: bool = False,
    ) -> None:
        self.shapes, self.about, self.rest, self.channels = shapes_of(module), about, rest, channels
        self.layout = Layout.of(module)
        self.layers = choose_layers(self.layout, layers)
        if not self.layers:
            raise UserError("this model has no layer to quantize between its first and its last; name layers")
        self.reserve = _ABOUT if about is None else _EXTRA
        weights = dict(module.named_parameters())
        self.errors = {name: relative_errors(weights[name], channels) for name in self.layers}

    def bytes(self, bits: int | Mapping[str, int]) -> int:
        """An upper bound of the file's bytes with these bits, uniform or per layer."""
        table = dict.fromkeys(self.layers, bits) if isinstance(bits, int) else bits
        plan = plan_bits(self.layout, table, channels=self.channels)
        return file_bytes(self.shapes, plan, self.about, self.rest) + self.reserve

    def error(self, bits: Mapping[str, int]) -> float:
        return sum(self.errors[name][b] for name, b in bits.items()) / len(bits)

    def fit(self, budget: int) -> BudgetPlan:
        """The widest plans within `budget` bytes; an error that names the smallest size when nothing fits."""
        fitting = [b for b in WIDTHS if self.bytes(b) <= budget]
        if not fitting:
            every = ", or quantize the first and the last layer, too" if self.layers != self.layout.weights else ""
            raise UserError(f"a budget of {budget:,} bytes: even 1 bit takes {self.bytes(1):,}; raise it{every}")
        uniform = max(fitting)
        bits = self._greedy(budget)
        same = dict.fromkeys(self.layers, uniform)
        if self.error(bits) > self.error(same):  # greed can end in a corner that uniform bits avoid
            bits = same
        sizes = self.bytes(uniform), self.bytes(bits)
        errors = self.error(same), self.error(bits)
        return BudgetPlan(budget, uniform, sizes[0], errors[0], bits, sizes[1], errors[1], self.channels)

    def _greedy(self, budget: int) -> dict[str, int]:
        """From 1 bit everywhere, widen again and again the layer whose error falls most for every byte it takes."""
        bits, open_layers = dict.fromkeys(self.layers, 1), set(self.layers)
        while open_layers:
            best = max(sorted(open_layers), key=lambda name: self._gain(name, bits[name]))
            wider = bits | {best: _next(bits[best])}
            if self._gain(best, bits[best]) > 0 and self.bytes(wider) <= budget:
                bits = wider
            if bits is not wider or bits[best] == FULL_PRECISION:
                open_layers.remove(best)
        return bits

    def _gain(self, name: str, b: int) -> float:
        """By how much the error falls for every byte when the layer is widened by one step."""
        slot, wider = self.layout[name], _next(b)
        scales = slot.shape[0] if self.channels else 0
        cost = _data_bytes(slot.size, wider, scales) - _data_bytes(slot.size, b, scales)
        return (self.errors[name][b] - self.errors[name][wider]) / max(1, cost)


@dataclass(frozen=True)
class Choice:
    """A network that fits into a budget, at its widest uniform bits."""

    network: str
    bits: int
    bytes: int


def choices(planners: Mapping[str, Planner], budget: int) -> list[Choice]:
    """Of several networks those that fit, each at its widest uniform bits: who uses most of the budget first. An error
    that names the smallest size where none fits."""
    found = []
    for name, planner in planners.items():
        widths = [b for b in WIDTHS if planner.bytes(b) <= budget]
        if widths:
            found.append(Choice(name, max(widths), planner.bytes(max(widths))))
    if not found:
        least = min(planners, key=lambda name: planners[name].bytes(1))
        size = planners[least].bytes(1)
        raise UserError(f"a budget of {budget:,} bytes: the smallest, {least} at 1 bit, takes {size:,}; raise it")
    return sorted(found, key=lambda choice: -choice.bytes)


def _next(bits: int) -> int:
    return WIDTHS[WIDTHS.index(bits) + 1]


def _data_bytes(size: int, bits: int, scales: int) -> int:
    """Codes, centers and scales of a layer, without its part of the head."""
    return 4 * size if bits == FULL_PRECISION else packed_size(size, bits) + 4 * (2**bits + scales)


def plan_budget(
    module: nn.Module,
    budget: int,
    *,
    layers: Iterable[str] | None = None,
    about: About | None = None,
    rest: Rest = "fp32",
    channels: bool = False,
) -> BudgetPlan:
    """Which bits fit into `budget` bytes; see `Planner`, which is cheaper for several budgets."""
    return Planner(module, layers=layers, about=about, rest=rest, channels=channels).fit(budget)


@torch.no_grad()
def relative_errors(weight: torch.Tensor, channels: bool = False) -> dict[int, float]:
    """|W - Q(W)|^2 / |W|^2 for every width, with k-means centers on a sample of the weights; channels: of weights in
    units of their channel's scale.

    Measured for 1 to 4 bits; beyond, the squared error of a fine quantizer falls by 4 with every bit.
    """
    x = weight.detach().flatten()
    scale = torch.ones_like(x)
    if channels:
        slot = Slot("", tuple(weight.shape), 0, len(x))
        scale = channel_scales(x, slot).repeat_interleave(len(x) // len(weight))
    step = -(-len(x) // _SAMPLE)
    x, scale = x[::step], scale[::step]
    u, total = x / scale, float(x.square().sum()) or 1.0
    levels = {b: init_centers(u, b, "kmeans") for b in BITS[:_MEASURED]}
    errors = {b: float((x - scale * hard(u, c)).square().sum()) / total for b, c in levels.items()}
    for b in BITS[_MEASURED:]:
        errors[b] = errors[b - 1] / 4
    errors[FULL_PRECISION] = 0.0
    return errors
