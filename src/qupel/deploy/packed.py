"""A model as codes: what a packed file holds, and how it goes into an nn.Module and comes out of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qupel.core.codebook import Codebook
from qupel.core.layout import Layout
from qupel.core.quantize import LEVELS, assign, pick
from qupel.deploy import own
from qupel.deploy.about import About
from qupel.deploy.header import DTYPES, FormatError
from qupel.deploy.own import NOTHING, Allowed
from qupel.deploy.pack import Bytes, Floats, bits_for, decode, pack, unpack
from qupel.tasks import zoo
from qupel.util.errors import UserError

DTYPE_OF = {dtype: name for name, dtype in DTYPES.items()}
Rest = Literal["fp32", "fp16"]

_COUNTER = "num_batches_tracked"  # BatchNorm's training counter: no part of what a model computes, not stored


@dataclass(frozen=True, eq=False)
class Layer:
    """One quantized layer: weight = centers[codes], in C order; with scales, times that of the weight's channel, which
    is its first index."""

    name: str
    shape: tuple[int, ...]
    centers: Floats  # (m,), sorted
    packed: Bytes
    scales: Floats | None = None  # (o,), positive

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        return bits_for(len(self.centers))

    @property
    def bytes(self) -> int:
        """Of codes, centers and scales."""
        return len(self.packed) + self.centers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def codes(self) -> Bytes:
        """Which center each weight is, (size,)."""
        return unpack(self.packed, self.size, self.bits)

    def weights(self) -> Floats:
        """The dense weights, in the layer's shape."""
        dense = decode(self.packed, self.size, self.centers)
        if self.scales is not None:
            rows = dense.reshape(len(self.scales), -1)
            np.multiply(rows, self.scales[:, None], out=rows)
        return dense.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Packed:
    """A model as it lies in the file: quantized layers as codes, the rest as arrays."""

    layers: tuple[Layer, ...]
    rest: dict[str, np.ndarray]
    about: About

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def channels(self) -> bool:
        """Whether levels are scaled by channel."""
        return any(layer.scales is not None for layer in self.layers)

    @property
    def parameters(self) -> int:
        """How many numbers the model has, buffers included."""
        return sum(layer.size for layer in self.layers) + sum(value.size for value in self.rest.values())

    @property
    def floor(self) -> int:
        """Bytes no file can do without: codes, centers, scales and rest."""
        return sum(layer.bytes for layer in self.layers) + sum(value.nbytes for value in self.rest.values())

    def check(self, module: nn.Module) -> None:
        """Refuse a module whose parameters and buffers are not exactly those of the file."""
        held = {layer.name: (layer.shape, "F32") for layer in self.layers}
        held |= {name: (value.shape, DTYPE_OF[value.dtype]) for name, value in self.rest.items()}
        wanted = {name: (tuple(t.shape), dtype_name(name, t)) for name, t in tensors_of(module).items()}
        if missing := [name for name in wanted if name not in held]:
            raise FormatError(f"the file does not hold {', '.join(missing[:5])}, which the model has")
        if extra := [name for name in held if name not in wanted]:
            raise FormatError(f"the file holds {', '.join(extra[:5])}, which the model does not have")
        for name, (shape, dtype) in wanted.items():
            there, kind = held[name]
            if there != shape or (kind != dtype and (kind, dtype) != ("F16", "F32")):
                raise FormatError(f"{name}: {kind} {list(there)} in the file, {dtype} {list(shape)} in the model")

    def into(self, module: nn.Module) -> nn.Module:
        """Copy everything into the module, bit for bit (fp16 is widened to fp32), and return it."""
        self.check(module)
        tensors = tensors_of(module)
        with torch.no_grad():
            for layer in self.layers:
                tensors[layer.name].copy_(torch.from_numpy(layer.weights()))
            for name, value in self.rest.items():
                tensors[name].copy_(torch.tensor(value))
        return module

    def with_rest(self, rest: Rest) -> Packed:
        """The same with what is not quantized as fp16; "fp32": as it is."""
        halved = {name: _half(name, value) for name, value in self.rest.items()} if rest == "fp16" else self.rest
        return replace(self, rest=halved)

    def codebook(self, layout: Layout) -> Codebook:
        """Centers and scales at their places in the layout of the model."""
        centers = tuple(torch.from_numpy(layer.centers.copy()) for layer in self.layers)
        scales = tuple(torch.from_numpy(s.copy()) for layer in self.layers if (s := layer.scales) is not None)
        return Codebook(tuple(layout[name] for name in self.names), centers, scales)

    def empty_model(self) -> nn.Module:
        """The network of ours that the file names, on the meta device: it has shapes, which are checked, and no
        memory."""
        about = self.about
        if not about.input_shape or not about.classes:
            raise FormatError("the file does not say the input shape and the number of classes")
        own.check_args(about, len(self.layers) + len(self.rest))
        try:
            with empty():
                module = zoo.build(about.model, about.input_shape, about.classes, 0, about.args)
        except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as error:
            raise FormatError(f"no {about.model} can be built for inputs {about.input_shape}: {error}") from None
        self.check(module)
        return module

    def network(self, allowed: Allowed = NOTHING) -> nn.Module:
        """The network that the file names, to be filled: one of ours, which takes no memory yet, or one of the user's
        own, which only `allowed` lets us import."""
        if self.about.model in zoo.networks and not allowed.name:
            return self.empty_model()
        module = own.build(self.about, allowed)
        self.check(module)
        return module

    def model(self, allowed: Allowed = NOTHING) -> nn.Module:
        """The network that the file names, with its weights, in evaluation mode."""
        module = self.network(allowed)
        if any(p.is_meta for p in module.parameters()):
            module = module.to_empty(device="cpu")
            for name, buffer in module.named_buffers():
                if name.endswith(_COUNTER):
                    buffer.zero_()
        self.into(module)
        return module.eval()


class _NoRandomValues(TorchFunctionMode):
    """Initial values are not drawn. On the meta device they mean nothing, yet torch would import 70 MiB of symbolic
    algebra to draw them, which a small device feels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_"):
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def empty() -> Iterator[None]:
    """Networks that are built in this context have shapes but no memory: `with empty(): module = Net()`."""
    with torch.device("meta"), _NoRandomValues():
        yield


def known_as(module: nn.Module, input_shape: tuple[int, ...], classes: int) -> str:
    """The name under which `models` builds exactly this network, "" if there is none."""
    for name in zoo.networks:
        try:
            with empty():
                ours = zoo.build(name, input_shape, classes, seed=0)
        except (RuntimeError, TypeError, ValueError, OverflowError):  # not for such inputs
            continue
        if _structure(ours) == _structure(module):
            return name
    return ""


def _structure(module: nn.Module) -> list[object]:
    layers = [(name, type(m), m.extra_repr()) for name, m in module.named_modules()]
    return [*layers, *((name, tuple(t.shape)) for name, t in tensors_of(module).items())]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; of shared ones the first name, as in `flat.Layout`."""
    kept = set(module.state_dict(keep_vars=True))
    found = dict(module.named_parameters()) | {n: b for n, b in module.named_buffers() if n in kept}
    return {name: t for name, t in found.items() if name.rpartition(".")[2] != _COUNTER}


def dtype_name(name: str, tensor: Tensor) -> str:
    try:
        return DTYPE_OF[np.dtype(str(tensor.dtype).removeprefix("torch."))]
    except (TypeError, KeyError):
        raise UserError(f"{name!r} has type {tensor.dtype}; a packed file holds {', '.join(DTYPES)}") from None


def pack_model(module: nn.Module, codebook: Codebook, about: About | None = None, rest: Rest = "fp32") -> Packed:
    """The module as codes and rest. Every quantized layer must lie exactly on its centers."""
    if rest not in ("fp32", "fp16"):
        raise UserError(f"rest = {rest!r}: allowed are fp32 and fp16")
    tensors = {name: t.detach().cpu() for name, t in tensors_of(module).items()}
    layers = []
    for (slot, centers), scale in zip(codebook, codebook.scales or [None] * len(codebook), strict=True):
        if slot.name not in tensors:
            raise UserError(f"the codebook names {slot.name!r}, which the model does not have")
        scale = None if scale is None else scale.detach().cpu()
        layers.append(_layer(slot.name, tensors.pop(slot.name), centers.detach().cpu(), scale))
    held = {}
    for name, tensor in tensors.items():
        dtype = DTYPES[dtype_name(name, tensor)]
        held[name] = tensor.contiguous().numpy().astype(dtype)
    return Packed(tuple(layers), held, about or About()).with_rest(rest)


def _half(name: str, value: np.ndarray) -> np.ndarray:
    """float32 rounded to fp16; any other type as it is."""
    if value.dtype != DTYPES["F32"]:
        return value
    with np.errstate(over="ignore"):
        half = value.astype(DTYPES["F16"])
    if not np.array_equal(np.isfinite(half), np.isfinite(value)):
        raise UserError(f"{name}: a value beyond 65,504 cannot be stored as fp16; use rest = 'fp32'")
    return half


def check_scales(name: str, shape: tuple[int, ...], centers: Floats, scales: Floats) -> None:
    """One scale, finite and greater than 0, for each channel, and no weight beyond float32."""
    if not shape or scales.shape != shape[:1]:
        counts = f"scales of shape {list(scales.shape)}"
        raise FormatError(f"{name}: {counts}; needed is one for each first index of its shape {list(shape)}")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise FormatError(f"{name}: its scales must be finite and greater than 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(scales.max(initial=0) * np.abs(centers).max(initial=0)):
            raise FormatError(f"{name}: its scales times its centers go beyond float32")


def _layer(name: str, weight: Tensor, centers: Tensor, scale: Tensor | None) -> Layer:
    if centers.dtype != torch.float32 or centers.ndim != 1 or len(centers) not in LEVELS:
        raise UserError(f"{name}: allowed are 1 to 256 centers in float32")
    if not bool(torch.isfinite(centers).all()) or not bool((centers[1:] >= centers[:-1]).all()):
        raise UserError(f"{name}: its centers must be finite and sorted")
    shape, levels, flat, scales = tuple(weight.shape), centers, weight.contiguous().flatten(), None
    if scale is not None:
        if scale.dtype != torch.float32:
            raise UserError(f"{name}: its scales must be float32")
        scales = scale.numpy().copy()
        check_scales(name, shape, centers.numpy(), scales)
        levels, flat = centers * scale[:, None], flat.view(len(scale), -1)  # (o, m): each channel's own levels
    codes = assign(flat, levels)
    off = int((pick(levels, codes) != flat).sum())
    if off:
        many = f"{off} of {weight.numel()} weights"
        raise UserError(f"{name}: {many} are not on its centers; hard-quantize the model first")
    packed = pack(codes.flatten().numpy().astype(np.uint8), bits_for(len(centers)))
    return Layer(name, shape, centers.numpy().copy(), packed, scales)
