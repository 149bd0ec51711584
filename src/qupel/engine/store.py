"""Where clients' states live between their rounds: in memory, or in one file per shard so that RAM stays flat.

A record is a client's phase and the tensors of its state as one row of float32; what it receives at the start of every
round, w above all, is not stored. A snapshot (part of a checkpoint) is `<name>.bin`, the rows one after
the other, with `<name>.json`, which says what they are, each with its CRC; nothing is pickled.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from qupel.core.codebook import Codebook
from qupel.core.layout import Layout
from qupel.parts.base import State
from qupel.util.files import Damaged, read_json, write_sealed


@dataclass(frozen=True)
class Shape:
    """What a row holds: the client's phase, the shapes of the tensors of each field, the layers of each codebook."""

    phase: int
    parts: Mapping[str, tuple[tuple[int, ...], ...]]
    layers: Mapping[str, tuple[str, ...]]

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shapes in self.parts.values() for shape in shapes]

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


class Store(Protocol):
    def get(self, client: int, w: Tensor) -> tuple[int, State] | None:
        """(phase, state) of a client, None if it never took part."""

    def put(self, client: int, phase: int, state: State) -> None: ...

    def rows(self) -> Iterator[tuple[int, Shape, Iterable[Tensor]]]:
        """All records, for a snapshot."""

    def clear(self) -> None:
        """Forget all records."""


class MemoryStore:
    """Rows in memory, each in pages of its own: tensors kept among the temporaries of training would leave holes."""

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self.pages: dict[int, tuple[Shape, mmap.mmap]] = {}

    def get(self, client: int, w: Tensor) -> tuple[int, State] | None:
        if client not in self.pages:
            return None
        shape, pages = self.pages[client]
        return shape.phase, unflatten(self._row(shape, pages).clone().to(w.device), shape, client, self.forms, w)

    def _row(self, shape: Shape, pages: mmap.mmap) -> Tensor:
        """A view of the pages (row,)."""
        return torch.frombuffer(pages, dtype=torch.float32, count=sum(shape.sizes))

    def put(self, client: int, phase: int, state: State) -> None:
        shape, tensors = flatten(state, phase)
        _, pages = self.pages.get(client, (None, None))
        if pages is None or len(pages) < 4 * sum(shape.sizes):
            pages = mmap.mmap(-1, 4 * sum(shape.sizes))
        for part, tensor in zip(self._row(shape, pages).split(shape.sizes), tensors, strict=True):
            part.copy_(tensor.reshape(-1))
        self.pages[client] = (shape, pages)

    def rows(self) -> Iterator[tuple[int, Shape, Iterable[Tensor]]]:
        for client, (shape, pages) in sorted(self.pages.items()):
            yield client, shape, [self._row(shape, pages)]

    def clear(self) -> None:
        self.pages.clear()


class DiskStore:
    """Rows in one sparse scratch file; only the client at work is in memory."""

    def __init__(self, forms: Forms, folder: Path | None = None) -> None:
        self.forms = forms
        with tempfile.TemporaryFile(dir=folder) as file:
            self.file = os.dup(file.fileno())  # it has no name: it goes when this handle does
        weakref.finalize(self, os.close, self.file)
        self.shapes: dict[int, tuple[Shape, int, int]] = {}  # client -> shape, offset, room
        self.end = 0

    def get(self, client: int, w: Tensor) -> tuple[int, State] | None:
        if client not in self.shapes:
            return None
        shape, offset, _ = self.shapes[client]
        return shape.phase, unflatten(self._read(shape, offset).to(w.device), shape, client, self.forms, w)

    def _read(self, shape: Shape, offset: int) -> Tensor:
        buffer = bytearray(4 * sum(shape.sizes))
        if os.preadv(self.file, [buffer], offset) != len(buffer):
            raise OSError("the client store was cut short")
        return torch.frombuffer(buffer, dtype=torch.float32)

    def put(self, client: int, phase: int, state: State) -> None:
        shape, tensors = flatten(state, phase)
        data = one_row(tensors).cpu().numpy()
        _, offset, room = self.shapes.get(client, (None, 0, -1))
        if data.nbytes > room:
            offset, room = self.end, data.nbytes
            self.end += room
        view = data.view(np.uint8).data
        written = 0
        while written < len(view):
            written += os.pwrite(self.file, view[written:], offset + written)
        self.shapes[client] = (shape, offset, room)

    def rows(self) -> Iterator[tuple[int, Shape, Iterable[Tensor]]]:
        for client, (shape, offset, _) in sorted(self.shapes.items()):
            yield client, shape, [self._read(shape, offset)]

    def clear(self) -> None:
        self.shapes.clear()
        self.end = 0


def snapshot(store: Store, folder: Path, name: str) -> None:
    """Write all records of a store to <folder>/<name>.bin and .json, flushed to disk."""
    write_rows(store.rows(), folder, name)


def write_rows(rows: Iterable[tuple[int, Shape, Iterable[Tensor]]], folder: Path, name: str) -> None:
    """Write (client, shape, tensors of its row) as they come."""
    index: dict[str, Any] = {}
    with (folder / f"{name}.bin").open("wb") as file:
        for client, shape, tensors in rows:
            offset, crc = file.tell(), 0
            for tensor in tensors:
                data = tensor.contiguous().numpy().data
                crc = zlib.crc32(data, crc)
                file.write(data)
            index[str(client)] = {"offset": offset, "crc": crc, **shape.table()}
        file.flush()
        os.fsync(file.fileno())
    write_sealed(folder / f"{name}.json", {"rows": index})


def one_row(tensors: Sequence[Tensor]) -> Tensor:
    """All of them one after the other (n,)."""
    return torch.cat([t.reshape(-1) for t in tensors])


def restore(folder: Path, clients: Iterable[int], store: Store, forms: Forms) -> None:
    """Put the clients' records of a checkpoint folder, whichever shards wrote them, into a store."""
    for client, shape, row in read_rows(folder, clients):
        store.put(client, shape.phase, unflatten(row, shape, client, forms, row))


def read_rows(folder: Path, clients: Iterable[int] | None = None) -> Iterator[tuple[int, Shape, Tensor]]:
    """(client, shape, row) of these clients' records (None: of all). Raises `Damaged` at the first that is not what was
    written."""
    wanted = None if clients is None else set(clients)
    for listing in sorted(folder.glob("*.json")):
        records = read_json(listing).get("rows")
        if records is None:
            continue  # another file of the folder
        data = listing.with_suffix(".bin")
        if not data.is_file():
            raise Damaged(f"{data} is missing")
        with data.open("rb") as file:
            for key, record in records.items():
                if wanted is not None and int(key) not in wanted:
                    continue
                shape = Shape.read(record)
                file.seek(record["offset"])
                row = bytearray(file.read(4 * sum(shape.sizes)))
                if len(row) != 4 * sum(shape.sizes) or zlib.crc32(row) != record["crc"]:
                    raise Damaged(f"{data} is damaged: the checksum of client {key} is wrong")
                yield int(key), shape, torch.frombuffer(row, dtype=torch.float32)
