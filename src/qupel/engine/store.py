"""Where clients' states live between their rounds: in memory, or in one file per shard so that RAM stays flat.

A record is a client's phase and its tensors x, centers, optimizer memory as one row of float32. w is not stored: a
client receives it at the start of every round. A snapshot (part of a checkpoint) is `<name>.bin`, the rows one after
the other, with `<name>.json`, which says what they are, each with its CRC; nothing is pickled.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qupel.algorithms.base import State
from qupel.codebook import Codebook
from qupel.files import Damaged, read_json, write_sealed
from qupel.flat import Layout


@dataclass(frozen=True)
class Shape:
    """What a row holds besides x (d,): centers per layer, sizes of the optimizer's memory; and the client's phase."""

    phase: int
    centers: dict[str, int]
    memory: tuple[int, ...]

    def size(self, layout: Layout) -> int:
        return layout.size + sum(self.centers.values()) + sum(self.memory)


def flatten(state: State, phase: int) -> tuple[Shape, list[Tensor]]:
    centers = {slot.name: len(c) for slot, c in state.codebook}
    shape = Shape(phase, centers, tuple(m.numel() for m in state.memory))
    return shape, [state.x, *state.codebook.centers, *state.memory]


def unflatten(row: Tensor, shape: Shape, layout: Layout, w: Tensor) -> State:
    """The state of a row (a copy of nothing: its tensors are views of the row)."""
    sizes = [layout.size, *shape.centers.values(), *shape.memory]
    x, *rest = row[: sum(sizes)].split(sizes)
    k = len(shape.centers)
    codebook = Codebook(tuple(layout[name] for name in shape.centers), tuple(rest[:k]))
    return State(x, w, codebook, tuple(rest[k:]))


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

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pages: dict[int, tuple[Shape, mmap.mmap]] = {}

    def get(self, client: int, w: Tensor) -> tuple[int, State] | None:
        if client not in self.pages:
            return None
        shape, pages = self.pages[client]
        return shape.phase, unflatten(self._row(shape, pages).clone().to(w.device), shape, self.layout, w)

    def _row(self, shape: Shape, pages: mmap.mmap) -> Tensor:
        """A view of the pages (row,)."""
        return torch.frombuffer(pages, dtype=torch.float32, count=shape.size(self.layout))

    def put(self, client: int, phase: int, state: State) -> None:
        shape, tensors = flatten(state, phase)
        _, pages = self.pages.get(client, (None, None))
        if pages is None or len(pages) < 4 * shape.size(self.layout):
            pages = mmap.mmap(-1, 4 * shape.size(self.layout))
        for part, tensor in zip(self._row(shape, pages).split([len(t) for t in tensors]), tensors, strict=True):
            part.copy_(tensor)
        self.pages[client] = (shape, pages)

    def rows(self) -> Iterator[tuple[int, Shape, Iterable[Tensor]]]:
        for client, (shape, pages) in sorted(self.pages.items()):
            yield client, shape, [self._row(shape, pages)]

    def clear(self) -> None:
        self.pages.clear()


class DiskStore:
    """Rows in one sparse scratch file; only the client at work is in memory."""

    def __init__(self, layout: Layout, folder: Path | None = None) -> None:
        self.layout = layout
        with tempfile.TemporaryFile(dir=folder) as file:
            self.file = os.dup(file.fileno())  # it has no name: it goes when this handle does
        weakref.finalize(self, os.close, self.file)
        self.shapes: dict[int, tuple[Shape, int, int]] = {}  # client -> shape, offset, room
        self.end = 0

    def get(self, client: int, w: Tensor) -> tuple[int, State] | None:
        if client not in self.shapes:
            return None
        shape, offset, _ = self.shapes[client]
        return shape.phase, unflatten(self._read(shape, offset).to(w.device), shape, self.layout, w)

    def _read(self, shape: Shape, offset: int) -> Tensor:
        buffer = bytearray(4 * shape.size(self.layout))
        if os.preadv(self.file, [buffer], offset) != len(buffer):
            raise OSError("the client store was cut short")
        return torch.frombuffer(buffer, dtype=torch.float32)

    def put(self, client: int, phase: int, state: State) -> None:
        shape, tensors = flatten(state, phase)
        data = torch.cat(tensors).cpu().numpy()
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
            index[str(client)] = {
                "offset": offset,
                "phase": shape.phase,
                "centers": shape.centers,
                "memory": list(shape.memory),
                "crc": crc,
            }
        file.flush()
        os.fsync(file.fileno())
    write_sealed(folder / f"{name}.json", {"rows": index})


def restore(folder: Path, clients: Iterable[int], store: Store, layout: Layout) -> None:
    """Put the clients' records of a checkpoint folder, whichever shards wrote them, into a store."""
    for client, shape, row in read_rows(folder, clients, layout):
        store.put(client, shape.phase, unflatten(row, shape, layout, row[: layout.size]))


def read_rows(folder: Path, clients: Iterable[int] | None, layout: Layout) -> Iterator[tuple[int, Shape, Tensor]]:
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
                shape = Shape(record["phase"], record["centers"], tuple(record["memory"]))
                file.seek(record["offset"])
                row = bytearray(file.read(4 * shape.size(layout)))
                if len(row) != 4 * shape.size(layout) or zlib.crc32(row) != record["crc"]:
                    raise Damaged(f"{data} is damaged: the checksum of client {key} is wrong")
                yield int(key), shape, torch.frombuffer(row, dtype=torch.float32)
