"""Where clients' states live between their rounds: rows in memory, or in one file per shard so that RAM stays flat.

What a checkpoint has and was not changed since need be nowhere else: it is read from there (`states`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qupel.engine.rows import Forms, Shape, flatten, one_row, unflatten
from qupel.engine.states import States
from qupel.parts.base import State


class Store(ABC):
    """The rows of a shard's clients: its own, and those of the last checkpoint."""

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self.saved = States()
        self.changed: set[int] = set()  # clients whose rows no checkpoint has

    def get(self, client: int, w: Tensor) -> tuple[int, State] | None:
        """(phase, state) of a client, None if it never took part."""
        found = self.row(client)
        if found is None:
            return None
        shape, row = found
        return shape.phase, unflatten(row.to(w.device), shape, client, self.forms, w)

    def row(self, client: int) -> tuple[Shape, Tensor] | None:
        """The same as it is stored."""
        return self._own(client) or self.saved.read(client)

    def put(self, client: int, phase: int, state: State) -> None:
        self._keep(client, *flatten(state, phase))
        self.changed.add(client)

    def save(self, folder: Path, name: str, alone: bool = False) -> None:
        """All rows as part of a checkpoint that is being made in a folder (`States.save`)."""
        rows = ((client, found) for client in sorted(self.changed) if (found := self._own(client)))
        self.saved.save(folder, name, ((client, shape, [row]) for client, (shape, row) in rows), alone)
        self._are_saved(self.changed)
        self.changed.clear()

    def load(self, folder: Path | None, clients: Iterable[int]) -> None:
        """Take these clients' rows of a checkpoint, whichever shards wrote them, in place of all that are here; None:
        forget all."""
        self.changed.clear()
        self._clear()
        self.saved.load(folder, clients)

    @abstractmethod
    def _own(self, client: int) -> tuple[Shape, Tensor] | None:
        """A client's row, for whoever asks to work on; None: it is not here."""

    @abstractmethod
    def _keep(self, client: int, shape: Shape, tensors: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def _are_saved(self, clients: Iterable[int]) -> None:
        """A checkpoint has these clients' rows now."""

    @abstractmethod
    def _clear(self) -> None: ...


class MemoryStore(Store):
    """Rows in memory, each in pages of its own: tensors kept among the temporaries of training would leave holes."""

    def __init__(self, forms: Forms) -> None:
        super().__init__(forms)
        self.pages: dict[int, tuple[Shape, mmap.mmap]] = {}

    def _own(self, client: int) -> tuple[Shape, Tensor] | None:
        if client not in self.pages:
            return None
        shape, pages = self.pages[client]
        return shape, self._row(shape, pages).clone()

    def _row(self, shape: Shape, pages: mmap.mmap) -> Tensor:
        """A view of the pages (row,)."""
        return torch.frombuffer(pages, dtype=torch.float32, count=sum(shape.sizes))

    def _keep(self, client: int, shape: Shape, tensors: Sequence[Tensor]) -> None:
        _, pages = self.pages.get(client, (None, None))
        if pages is None or len(pages) < shape.bytes:
            pages = mmap.mmap(-1, shape.bytes)
        for part, tensor in zip(self._row(shape, pages).split(shape.sizes), tensors, strict=True):
            part.copy_(tensor.reshape(-1))
        self.pages[client] = (shape, pages)

    def _are_saved(self, clients: Iterable[int]) -> None:
        pass  # memory is faster

    def _clear(self) -> None:
        self.pages.clear()


class DiskStore(Store):
    """Rows in one sparse scratch file; only the client at work is in memory. Those that a checkpoint has leave it."""

    def __init__(self, forms: Forms, folder: Path | None = None) -> None:
        super().__init__(forms)
        with tempfile.TemporaryFile(dir=folder) as file:
            self.file = os.dup(file.fileno())  # it has no name: it goes when this handle does
        weakref.finalize(self, os.close, self.file)
        self._clear()

    def _own(self, client: int) -> tuple[Shape, Tensor] | None:
        if client not in self.shapes:
            return None
        shape, offset, _ = self.shapes[client]
        buffer = bytearray(shape.bytes)
        if os.preadv(self.file, [buffer], offset) != len(buffer):
            raise OSError("the client store was cut short")
        return shape, torch.frombuffer(buffer, dtype=torch.float32)

    def _keep(self, client: int, shape: Shape, tensors: Sequence[Tensor]) -> None:
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

    def _are_saved(self, clients: Iterable[int]) -> None:
        self._clear()

    def _clear(self) -> None:
        self.shapes: dict[int, tuple[Shape, int, int]] = {}  # client -> shape, offset, room
        self.end = 0
        os.ftruncate(self.file, 0)
