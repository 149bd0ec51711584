"""The packed container: one safetensors file a client, specified in docs/format.md.

    rest.F32           what is not quantized, all of one dtype in one tensor (names and shapes in the metadata)
    <layer>_codebook   F32 (m,), sorted
    <layer>_scales     F32 (o,), positive: version 2 only, where levels are scaled by channel
    <layer>_packed     U8, codes of max(1, ceil(log2 m)) bits, least significant bit first (`pack`)

Nothing is ever unpickled. The reader takes no more memory than the file, and refuses what the page does not allow.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from qupel.core.codebook import Codebook
from qupel.core.quantize import LEVELS
from qupel.deploy import header, zstd
from qupel.deploy.about import About
from qupel.deploy.formats import exporter
from qupel.deploy.header import DTYPES, Entry, FormatError
from qupel.deploy.pack import bits_for, chunks, packed_size, padding_is_zero
from qupel.deploy.packed import DTYPE_OF, Layer, Packed, Rest, check_scales, pack_model
from qupel.util.errors import UserError
from qupel.util.files import write_atomic

__all__ = ["About", "FormatError", "Layer", "Packed", "dumps", "head_for", "load", "loads", "pack_model", "save"]

PLAIN, SCALED = 1, 2  # versions: without and with scales of channels
KEY = "qupel"  # our entry in __metadata__


# --- writing ---


def head_for(
    layers: dict[str, tuple[tuple[int, ...], int]],
    rest: dict[str, tuple[tuple[int, ...], str]],
    about: About,
    channels: bool = False,
) -> tuple[bytes, list[Entry]]:
    """Head and entries of a file from shapes alone: layer -> (shape, m), rest -> (shape, dtype); channels: whether
    layers have scales. Its size is len(head) + sum of the entries' sizes."""
    kinds: dict[str, dict[str, list[int]]] = {}  # dtype -> name -> shape, wide dtypes first: everything is aligned
    for kind in sorted({k for _, k in rest.values()}, key=lambda k: -DTYPES[k].itemsize):
        kinds[kind] = {name: list(shape) for name, (shape, k) in rest.items() if k == kind}
    entries = [
        Entry(f"rest.{kind}", kind, (sum(math.prod(shape) for shape in names.values()),))
        for kind, names in kinds.items()
    ]
    entries += [Entry(f"{name}_codebook", "F32", (m,)) for name, (_, m) in layers.items()]
    if channels:
        entries += [Entry(f"{name}_scales", "F32", shape[:1]) for name, (shape, _) in layers.items()]
    entries.sort(key=lambda entry: -DTYPES[entry.dtype].itemsize)
    for name, (shape, m) in layers.items():
        entries.append(Entry(f"{name}_packed", "U8", (packed_size(math.prod(shape), bits_for(m)),)))
    described: dict[str, Any] = {
        "version": SCALED if channels else PLAIN,
        "layers": {name: list(shape) for name, (shape, _) in layers.items()},
        "rest": kinds,
        "about": about.to_json(),
    }
    return header.write(entries, {KEY: header.dump(described)}), entries


def dumps(packed: Packed) -> bytes:
    """The bytes of the file."""
    head, entries = head_for(
        {layer.name: (layer.shape, len(layer.centers)) for layer in packed.layers},
        {name: (value.shape, DTYPE_OF[value.dtype]) for name, value in packed.rest.items()},
        packed.about,
        packed.channels,
    )
    held: dict[str, bytes] = {}
    for layer in packed.layers:
        held[f"{layer.name}_codebook"] = layer.centers.astype(DTYPES["F32"]).tobytes()
        held[f"{layer.name}_packed"] = layer.packed.tobytes()
        if layer.scales is not None:
            held[f"{layer.name}_scales"] = layer.scales.astype(DTYPES["F32"]).tobytes()
    for kind, dtype in DTYPES.items():
        held[f"rest.{kind}"] = b"".join(v.tobytes() for v in packed.rest.values() if v.dtype == dtype)
    return head + b"".join(held[entry.name] for entry in entries)


@exporter("packed", suffix=".safetensors")
def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    codebook: Codebook,
    *,
    about: About | None = None,
    rest: Rest = "fp32",
    compress: bool = False,
) -> int:
    """Write the packed file and return its bytes.

    rest      how layers without a codebook are stored; fp16 rounds them
    compress  zstd over the whole file, for transfer; `load` reads both
    """
    return write_packed(path, pack_model(module, codebook, about, rest), compress=compress)


def write_packed(path: str | os.PathLike[str], packed: Packed, *, compress: bool = False) -> int:
    content = dumps(packed)
    loads(content)  # what we could not read back we do not write
    if compress:
        content = zstd.compress(content)
    write_file(path, content)
    return len(content)


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Whole or not at all (`files.write_atomic`), in a folder that is made if need be."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


# --- reading ---


def load(path: str | os.PathLike[str]) -> Packed:
    """Read a packed file, plain or zstd. Raises FormatError, naming the file, for what the format does not allow."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return loads(content)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def loads(content: bytes) -> Packed:
    """The model in these bytes; its arrays are read-only views of them."""
    if content[:4] == zstd.MAGIC:
        content = _unfold(content)
    start = 8 + header.length(content[:8], len(content))
    entries, metadata = header.read(content[8:start], len(content) - start)
    if KEY not in metadata:
        raise FormatError(f"a safetensors file, but not a packed model: no {KEY!r} in its metadata")
    described = header.parse(metadata[KEY], f"the metadata {KEY!r}")
    if not isinstance(described, dict) or "version" not in described:
        raise FormatError(f"the metadata {KEY!r} has no version")
    version = described["version"]
    if type(version) is not int or version not in (PLAIN, SCALED):
        raise FormatError(f"format version {version!r:.20}; this reader knows {PLAIN} and {SCALED}")
    if set(described) != {"version", "layers", "rest", "about"}:
        raise FormatError(f"the metadata {KEY!r} must have version, layers, rest and about, and nothing else")
    data = memoryview(content)[start:]
    arrays = {
        e.name: np.frombuffer(data[begin : begin + e.size], DTYPES[e.dtype]).reshape(e.shape) for e, begin in entries
    }
    shapes = _table(described["layers"], "layers")
    layers = tuple(_read_layer(name, shape, arrays, scaled=version == SCALED) for name, shape in shapes)
    rest: dict[str, np.ndarray] = {}
    for kind, names in _table(described["rest"], "rest"):
        for name, value in _read_rest(kind, names, arrays).items():
            if name in rest:
                raise FormatError(f"{name} comes twice")
            rest[name] = value
    if arrays:  # every tensor was taken out
        raise FormatError(f"a tensor that belongs to no layer: {next(iter(arrays))}")
    if twice := rest.keys() & {layer.name for layer in layers}:
        raise FormatError(f"{min(twice)} comes twice")
    return Packed(layers, rest, About.from_json(described["about"]))


def _unfold(content: bytes) -> bytes:
    """A zstd frame's content, once its head alone has shown that the tensors take exactly what the frame unfolds to."""
    size = zstd.content_size(content)
    start = 8 + header.length(zstd.beginning(content, 8), size)
    header.read(zstd.beginning(content, start)[8:], size - start)
    return zstd.decompress(content)


def _table(value: Any, what: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be an object")
    return list(value.items())


def _take(name: str, dtype: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    array = arrays.pop(name, None)
    if array is None or array.dtype != DTYPES[dtype] or array.ndim != 1:
        raise FormatError(f"no tensor {name} of type {dtype} and one dimension")
    return array


def _read_layer(name: str, shape: Any, arrays: dict[str, np.ndarray], scaled: bool) -> Layer:
    centers = _take(f"{name}_codebook", "F32", arrays)
    packed = _take(f"{name}_packed", "U8", arrays)
    scales = _take(f"{name}_scales", "F32", arrays) if scaled else None
    layer = Layer(name, header.shape_of(shape, name), centers, packed, scales)
    if len(centers) not in LEVELS:
        raise FormatError(f"{name}: {len(centers)} centers; allowed are 1 to 256")
    if not np.isfinite(centers).all() or (centers[1:] < centers[:-1]).any():
        raise FormatError(f"{name}: its centers must be finite and sorted")
    if layer.size < 1 or len(packed) != packed_size(layer.size, layer.bits):
        raise FormatError(
            f"{name}: {layer.size} codes of {layer.bits} bits need {packed_size(layer.size, layer.bits)} bytes, "
            f"the file has {len(packed)}"
        )
    if not padding_is_zero(packed, layer.size, layer.bits):
        raise FormatError(f"{name}: the bits after the last code must be 0")
    if len(centers) < 2**layer.bits:
        largest = max(int(part.max()) for part in chunks(packed, layer.size, layer.bits))
        if largest >= len(centers):
            raise FormatError(f"{name}: code {largest}, but there are only {len(centers)} centers")
    if scales is not None:
        check_scales(name, layer.shape, centers, scales)
    return layer


def _read_rest(kind: str, names: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if kind not in DTYPES:
        raise FormatError(f"rest: unknown dtype {kind!r:.40}; allowed: {', '.join(DTYPES)}")
    flat = _take(f"rest.{kind}", kind, arrays)
    shapes = {name: header.shape_of(shape, name) for name, shape in _table(names, f"rest.{kind}")}
    if sum(math.prod(shape) for shape in shapes.values()) != len(flat):
        raise FormatError(f"rest.{kind}: its {len(flat)} numbers are not those of the shapes it lists")
    if kind == "BOOL" and flat.view(np.uint8).max(initial=0) > 1:
        raise FormatError("rest.BOOL: a byte that is neither 0 nor 1")
    values, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        values[name] = flat[start : start + size].reshape(shape)
        start += size
    return values
