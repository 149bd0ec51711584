"""Arrays in files, larger than memory: rows are read when they are asked for.

A mapped page counts as memory of the process for as long as the system likes, so rows are not taken from the map: they
are read from the file. Such an array travels to other processes as its path.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.util.errors import UserError

CPU = torch.device("cpu")
LOOK = 64  # rows that stand for all of them in a checksum


def looked_at(count: int, most: int = LOOK) -> np.ndarray:
    """Rows (at most `most`,), evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


@dataclass(frozen=True)
class Stored:
    """An array (n, ...) in a file. Row i begins at byte offset + i * stride and is in C order.

    picture  how a row (H, W) or (H, W, C) becomes a picture (C, H, W): "grey", "last"; "": as it is
    """

    path: Path
    offset: int
    stride: int
    kind: str  # numpy's name of the numbers' type
    inner: tuple[int, ...]  # the shape of a row, as it is stored
    count: int
    dtype: torch.dtype
    picture: str = ""
    device: torch.device = CPU

    @classmethod
    def of(cls, array: np.memmap, dtype: torch.dtype, what: str, picture: str = "") -> Stored:
        """The array that a map shows, also where it is a slice of the file's rows."""
        if array.filename is None or not array[:1].flags.c_contiguous:
            raise UserError(f"{what}: of a memory-mapped array rows in C order are needed; copy it to such a file")
        begin = np.frombuffer(array._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
        first = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # a map begins at a whole page
        offset = first + array.__array_interface__["data"][0] - begin
        path = Path(array.filename).resolve()
        return cls(path, offset, array.strides[0], array.dtype.str, array.shape[1:], len(array), dtype, picture)

    def __len__(self) -> int:
        return self.count

    @property
    def shape(self) -> tuple[int, ...]:
        if self.picture == "grey":
            return self.count, 1, *self.inner
        return (self.count, self.inner[2], *self.inner[:2]) if self.picture == "last" else (self.count, *self.inner)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._read(np.arange(*rows.indices(self.count)))

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        return self._read(index.cpu().numpy())

    def _read(self, rows: np.ndarray) -> Tensor:
        found = np.empty((len(rows), *self.inner), np.dtype(self.kind))  # (k, ...)
        size = found[:1].nbytes
        into = found.reshape(-1).view(np.uint8).data
        order = np.argsort(rows, kind="stable")  # the file is read from its beginning to its end
        try:
            with self.path.open("rb", buffering=0) as file:
                for place in order.tolist():
                    file.seek(self.offset + int(rows[place]) * self.stride)
                    if file.readinto(into[place * size : (place + 1) * size]) != size:
                        raise UserError(f"{self.path}: ends before row {rows[place]}; it was longer")
        except OSError as e:
            raise UserError(f"{self.path}: cannot be read: {e.strerror}") from None
        return self._tensor(found, rows)

    def _tensor(self, found: np.ndarray, rows: np.ndarray) -> Tensor:
        if self.picture:
            found = found[:, None] if self.picture == "grey" else np.ascontiguousarray(found.transpose(0, 3, 1, 2))
        values = torch.from_numpy(found.astype(found.dtype.newbyteorder("="), copy=False)).to(self.dtype)
        if values.is_floating_point():
            finite = torch.isfinite(values).flatten(1).all(1) if values.ndim > 1 else torch.isfinite(values)
            if not bool(finite.all()):
                bad = rows[int(finite.int().argmin())]
                raise UserError(f"{self.path.name} row {bad}: NaN or infinite; every value must be finite")
        return values.to(self.device)

    def to(self, device: torch.device) -> Stored:
        return replace(self, device=device)

    def mark(self, found: Any) -> None:
        """Its file's name, size and time, and a look at some of its rows."""
        try:
            told = os.stat(self.path)
        except OSError as e:
            raise UserError(f"{self.path}: cannot be read: {e.strerror}") from None
        where = (self.offset, self.stride, self.kind, self.shape)
        found.update(repr((self.path.name, told.st_size, told.st_mtime_ns, where)).encode())
        found.update(np.ascontiguousarray(self._read(looked_at(self.count)).cpu().numpy()).data)
