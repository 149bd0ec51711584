"""What is in a model file: layers, bits, centers, entropy of the codes, and a picture of them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qupel.core.layout import VECTOR, Coverage, Layout, choose_layers
from qupel.core.quantize import LEVELS
from qupel.deploy.file import load
from qupel.deploy.header import FormatError
from qupel.deploy.own import NOTHING, Allowed
from qupel.deploy.pack import bits_for, chunks, pack, packed_size
from qupel.deploy.packed import Layer, Packed, check_scales
from qupel.deploy.sandbox import Sandbox
from qupel.deploy.sessions import KEY, about_of, library
from qupel.util.errors import UserError
from qupel.util.terminal import plain

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Row:
    """One quantized layer. entropy: bits per code that an ideal coder would need; counts: weights at each center."""

    name: str
    shape: tuple[int, ...]
    bits: int
    centers: tuple[float, ...]
    bytes: int
    entropy: float
    counts: tuple[int, ...]
    scales: tuple[float, float] | None = None  # smallest and largest, where levels are scaled by channel


def rows(packed: Packed) -> list[Row]:
    """The quantized layers of a file."""
    found = []
    for layer in packed.layers:
        n = sum(
            np.bincount(part, minlength=len(layer.centers)) for part in chunks(layer.packed, layer.size, layer.bits)
        )
        counts = tuple(int(v) for v in np.atleast_1d(n))
        centers = tuple(float(c) for c in layer.centers)
        scales = None if layer.scales is None else (float(layer.scales.min()), float(layer.scales.max()))
        found.append(Row(layer.name, layer.shape, layer.bits, centers, layer.bytes, entropy(counts), counts, scales))
    return found


def coverage(packed: Packed, allowed: Allowed = NOTHING) -> Coverage:
    """How much of a file's model is quantized. Why the rest is not, the network tells, where it may be built."""
    try:
        layout = Layout.of(packed.network(allowed))
        chosen = choose_layers(layout, packed.names)
    except UserError:
        if allowed.name:
            raise
        left = {n: VECTOR if v.ndim < 2 else "why, the network would tell" for n, v in packed.rest.items()}
        return Coverage(sum(layer.size for layer in packed.layers), packed.parameters, left)
    return Coverage.of(layout, chosen)


def entropy(counts: tuple[int, ...]) -> float:
    """-sum p log2 p of the codes."""
    total = sum(counts)
    return -sum(c / total * math.log2(c / total) for c in counts if c) + 0.0


def bars(counts: tuple[int, ...], width: int = 16) -> str:
    """A histogram in one line: the share of each center (neighbors are added up when there are more than `width`)."""
    groups = np.array_split(np.array(counts), min(width, len(counts)))
    sums = [int(g.sum()) for g in groups]
    top = max(sums) or 1
    return "".join(_BARS[(len(_BARS) - 1) * s // top] for s in sums)


def read(path: str | os.PathLike[str], trust: bool = False) -> Packed:
    """A packed or ONNX file as codes, centers and rest; trust: as in `predict.open_model`."""
    return _read_onnx(path, trust) if str(path).endswith(".onnx") else load(path)


def _read_onnx(path: str | os.PathLike[str], trust: bool) -> Packed:
    """Our ONNX layers back from the graph: `NAME_packed`, `NAME_codebook`, the shape that is reshaped to, and
    `NAME_scales` where levels are scaled by channel."""
    if trust:
        stored, held, reshapes = _tensors(path)
    else:
        box = Sandbox(path)
        stored, held, reshapes = box.read()
        box.close()
    about = about_of(stored, path)
    shapes = {name: held.get(shape) for name, shape in reshapes.items()}
    layers = []
    for name in [n.removesuffix("_packed") for n in held if n.endswith("_packed")]:
        centers, packed = held.pop(f"{name}_codebook", None), held.pop(f"{name}_packed")
        scales = held.pop(f"{name}_scales", None)
        shape = shapes.get(name if scales is None else f"{name}_units")
        layer = None if centers is None else _layer(name, packed, centers, shape)
        if layer is not None and scales is not None:
            layer = _scaled(layer, scales)
        if layer is None:
            raise FormatError(f"{path}: {name} is not packed as this package packs layers")
        layers.append(layer)
    small = {"shape", "digits", "triple"}
    rest = {n: v for n, v in held.items() if not any(n.startswith(s) for s in small)}
    return Packed(tuple(layers), rest, about)


def _tensors(path: str | os.PathLike[str]) -> tuple[str | None, dict[str, np.ndarray], dict[str, str]]:
    """As `Sandbox.read`, in this process."""
    onnx = library("onnx")
    try:
        model = onnx.load(os.fspath(path))
        held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    except Exception as error:  # protobuf and onnx raise many kinds for broken files
        raise FormatError(f"{path}: not an ONNX file that can be read ({str(error)[:80]})") from None
    stored = [entry.value for entry in model.metadata_props if entry.key == KEY]
    reshapes = {n.output[0]: n.input[1] for n in model.graph.node if n.op_type == "Reshape" and len(n.input) > 1}
    return stored[0] if stored else None, held, reshapes


def _layer(name: str, packed: np.ndarray, centers: np.ndarray, shape: np.ndarray | None) -> Layer | None:
    if packed.dtype != np.uint8 or centers.dtype != np.float32 or centers.ndim != 1 or len(centers) not in LEVELS:
        return None
    bits = bits_for(len(centers))
    if shape is None:  # stored as whole bytes, in the layer's own shape
        if packed.max(initial=0) >= len(centers):
            return None
        return Layer(name, packed.shape, centers, pack(packed.reshape(-1), bits))
    wanted = tuple(int(v) for v in shape.reshape(-1))
    size = packed_size(math.prod(wanted), bits)
    if min(wanted, default=0) < 1 or not 0 <= packed.size - size < 3 or len(centers) != 2**bits:
        return None
    return Layer(name, wanted, centers, packed.reshape(-1)[:size])


def _scaled(layer: Layer, scales: np.ndarray) -> Layer | None:
    """The layer with its scales, which lie in the graph as [o, 1, ...]."""
    if scales.dtype != np.float32 or scales.shape != (layer.shape[0], *[1] * (len(layer.shape) - 1)):
        return None
    check_scales(layer.name, layer.shape, layer.centers, scales.reshape(-1))
    return replace(layer, scales=scales.reshape(-1))


def picture(packed: Packed, path: str | os.PathLike[str]) -> None:
    """Draw how many weights sit at each center, one panel a layer, the first 30 of them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = rows(replace(packed, layers=packed.layers[:30]))
    columns = min(3, max(1, len(found)))
    lines = max(1, -(-len(found) // columns))
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(3 * columns, 1.8 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        for axis, row in zip(axes, found, strict=False):
            share = np.array(row.counts) / max(1, sum(row.counts))
            gap = min(np.diff(row.centers), default=1.0) or 1.0
            axis.bar(row.centers, share, width=max(0.8 * gap, (row.centers[-1] - row.centers[0]) / 200 or 0.1))
            axis.set_title(f"{plain(row.name, 40)}: {row.bits} bits".replace("$", r"\$"), loc="left")
            axis.set_ylabel("share")
        figure.savefig(Path(path), dpi=120)
