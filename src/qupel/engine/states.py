"""Clients' rows as checkpoints hold them: a checkpoint appends those that changed, the others stay where they are.

checkpoints/states/000004-shard-0.bin   begun by a shard's 4th checkpoint. A checkpoint adds a batch: rows one after the
                                        other, then their listing (JSON: whose they are, their shapes, places and CRCs,
                                        and place and CRC of the listing before it)
checkpoints/round-000040/shard-0.json   what a shard's rows are in: each file's length and last listing; sealed

Bytes that a checkpoint counts never change; a later one only adds behind them. So each is complete, and what they share
is on disk once. Rows that were replaced lie dead in their files: one with more dead bytes than living ones is emptied
by and by, each checkpoint moving at most as many bytes as changed, and goes when no checkpoint that is kept counts it
(`sweep`). So a checkpoint writes at most twice what changed, and all files have about twice the bytes that live,
beside what changed between the checkpoints that are kept.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from qupel.engine.rows import Shape
from qupel.util.errors import UserError
from qupel.util.files import Damaged, read_json, sync_folder, write_sealed

FOLDER = "states"
PART = 8  # a file grows up to this part of all that lives: then there are some dozens, whatever is saved at a time
Listed = tuple[int, int, int]  # place, length and CRC of a listing


class Place(NamedTuple):
    """Where a row is."""

    file: Path
    offset: int
    crc: int
    shape: Shape


@dataclass
class File:
    """A file of rows, of which `end` bytes count; `living` of them are the newest rows of these clients."""

    handle: int
    end: int = 0
    last: Listed | None = None
    living: int = 0
    clients: set[int] = field(default_factory=set)


class States:
    """The newest saved row of each client of a shard."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.files: dict[Path, File] = {}
        self.growing: Path | None = None  # the file that this process began and may add to
        self.number = 0  # of the last batch; of two rows of a client that with the higher one counts
        weakref.finalize(self, _close, self.files)

    def read(self, client: int) -> tuple[Shape, Tensor] | None:
        """A client's row (n,), checked; None if there is none."""
        place = self.places.get(client)
        return None if place is None else (place.shape, torch.frombuffer(self._bytes(client), dtype=torch.float32))

    def _bytes(self, client: int) -> bytearray:
        place = self.places[client]
        return _row(self.files[place.file].handle, client, place)

    # --- a checkpoint is written ---

    def save(
        self, folder: Path, name: str, changed: Iterable[tuple[int, Shape, Iterable[Tensor]]], alone: bool = False
    ) -> None:
        """Add the rows that changed, and say in <folder>/<name>.json where all of them are. alone: all are in that very
        folder, which shares none with others."""
        home = folder if alone else folder.parent / FOLDER
        with closing(_Batch(self, home, name)) as batch:
            for client, shape, tensors in changed:
                batch.add(client, shape, (t.contiguous().numpy().data for t in tensors))
            elsewhere = [client for path, file in self.files.items() if path.parent != home for client in file.clients]
            for client in (*elsewhere, *self._to_move(batch.written)):
                if client not in batch.places:
                    batch.add(client, self.places[client].shape, [self._bytes(client)])
            batch.end()
        self._drop_dead()
        where = "" if alone else f"../{FOLDER}/"
        counted = {f"{where}{path.name}": [file.end, *(file.last or ())] for path, file in self.files.items()}
        write_sealed(folder / f"{name}.json", {FOLDER: counted})

    def _to_move(self, most: int) -> Iterator[int]:
        """Clients whose rows are to leave the file with the largest part of its bytes dead, if that is more than half:
        no more bytes than `most`."""
        old = {path: file for path, file in self.files.items() if path != self.growing}
        worst = min(old.values(), key=lambda file: file.living / file.end, default=None)
        if worst is not None and 2 * worst.living < worst.end:
            for client in worst.clients:
                most -= self.places[client].shape.bytes
                if most < 0:
                    return
                yield client

    def put(self, client: int, place: Place) -> None:
        """The client's newest row is here."""
        before = self.places.get(client)
        if before is not None:
            file = self.files[before.file]
            file.living -= before.shape.bytes
            file.clients.discard(client)
        self.places[client] = place
        file = self.files[place.file]
        file.living += place.shape.bytes
        file.clients.add(client)

    def _drop_dead(self) -> None:
        for path in [path for path, file in self.files.items() if not file.clients]:
            os.close(self.files.pop(path).handle)

    # --- and read ---

    def load(self, folder: Path | None, clients: Iterable[int] | None = None) -> None:
        """Take the rows of these clients (None: of all) that a checkpoint has, whichever shards wrote them, in place of
        those that are here. Rows are read when they are asked for."""
        _close(self.files)
        self.places, self.growing, self.number = {}, None, 0
        if folder is None:
            return
        wanted = None if clients is None else set(clients)
        newest: dict[int, int] = {}
        for path, end, last in files_of(folder):
            handle = _open(path)
            self.files[path] = File(handle, end, last)
            for number, client, place in _rows(path, handle, end, last):
                self.number = max(self.number, number)
                if (wanted is None or client in wanted) and newest.get(client, -1) < number:
                    newest[client] = number
                    self.put(client, place)
        self._drop_dead()


class _Batch:
    """Rows that are being added to the file that grows, or to a new one where that is large enough. They count when all
    of them are on disk."""

    def __init__(self, states: States, home: Path, name: str) -> None:
        self.states, self.home, self.name = states, home, name
        self.file: BinaryIO | None = None
        self.shapes: dict[tuple[object, ...], tuple[int, Shape]] = {}
        self.places: dict[int, Place] = {}
        self.written = 0

    def add(self, client: int, shape: Shape, data: Iterable[Any]) -> None:
        file = self.file or self._begin()
        _, shape = self.shapes.setdefault(shape.key, (len(self.shapes), shape))
        offset, crc = file.tell(), 0
        for part in data:
            crc = zlib.crc32(part, crc)
            file.write(part)
        self.written += shape.bytes
        assert self.states.growing is not None
        self.places[client] = Place(self.states.growing, offset, crc, shape)

    def _begin(self) -> BinaryIO:
        states = self.states
        states.number += 1
        grows = states.files.get(states.growing) if states.growing else None
        if grows is None or states.growing is None or states.growing.parent != self.home or self._is_large(grows):
            path = states.growing = self.home / f"{states.number:06d}-{self.name}.bin"
            self.home.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)  # what a run that went back from here left
            self.file = path.open("wb")
            states.files[path] = File(_open(path))
            sync_folder(self.home)
        else:
            self.file = states.growing.open("r+b")
            self.file.seek(grows.end)
            self.file.truncate()  # what a checkpoint that failed left
        return self.file

    def _is_large(self, file: File) -> bool:
        return PART * file.end > sum(file.living for file in self.states.files.values())

    def end(self) -> None:
        """Write the listing; all of it to disk."""
        if self.file is None:
            return
        assert self.states.growing is not None
        file = self.states.files[self.states.growing]
        shapes = [shape.table() for _, shape in self.shapes.values()]
        rows = [[client, self.shapes[p.shape.key][0], p.offset, p.crc] for client, p in self.places.items()]
        listing = {"number": self.states.number, "shapes": shapes, "rows": rows, "before": file.last}
        text = json.dumps(listing).encode()
        file.last = self.file.tell(), len(text), zlib.crc32(text)
        self.file.write(text)
        file.end = self.file.tell()
        self.file.flush()
        os.fsync(self.file.fileno())
        for client, place in self.places.items():
            self.states.put(client, place)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def files_of(folder: Path) -> Iterator[tuple[Path, int, Listed]]:
    """(file, how much of it counts, its last listing) of a checkpoint, each once."""
    found: dict[str, list[int]] = {}
    for listing in sorted(folder.glob("*.json")):
        told = read_json(listing)
        if "rows" in told:
            what = f"{folder} was written by an older version, whose states of clients are not read"
            raise UserError(f"{what}; resume it with that one, or remove {folder.parent} to begin it again")
        found |= told.get(FOLDER, {})
    for name, (end, *last) in found.items():
        place, length, crc = last
        yield Path(os.path.normpath(folder / name)), end, (place, length, crc)


def check(folder: Path, older: Iterable[Path]) -> None:
    """Raise `Damaged` unless a checkpoint's files and listings are what was written, and its rows that not all of the
    older checkpoints have: those that going back would help against. The others are checked when they are read."""
    counted = []
    for other in older:
        with suppress(UserError):
            counted.append({path: end for path, end, _ in files_of(other)})
    for path, end, last in files_of(folder):
        handle = _open(path)
        try:
            shared = min((lengths.get(path, 0) for lengths in counted), default=end)
            for _, client, place in _rows(path, handle, end, last):
                if place.offset >= shared:
                    _row(handle, client, place)
        finally:
            os.close(handle)


def sweep(folder: Path, kept: Iterable[Path]) -> None:
    """Remove the files of rows that none of these checkpoints counts; where one does not say which those are, none."""
    home = folder / FOLDER
    with suppress(UserError, FileNotFoundError):
        counted = {path for checkpoint in kept for path, *_ in files_of(checkpoint)}
        for path in {*home.iterdir()} - counted:
            path.unlink(missing_ok=True)


def _rows(path: Path, handle: int, end: int, last: Listed) -> Iterator[tuple[int, int, Place]]:
    """(number of the batch, client, its row's place) of a file, the newest batch first."""
    if os.fstat(handle).st_size < end:
        raise Damaged(f"{path} is damaged: it was cut short")
    listed: Mapping[str, Any] | None = None
    while listed is None or listed["before"] is not None:
        place, length, crc = last if listed is None else listed["before"]
        text = os.pread(handle, length, place)
        if zlib.crc32(text) != crc:
            raise Damaged(f"{path} is damaged: the checksum of a listing is wrong")
        listed = json.loads(text)
        assert listed is not None
        shapes = [_known(Shape.read(table)) for table in listed["shapes"]]
        for client, shape, offset, of_row in listed["rows"]:
            yield listed["number"], client, Place(path, offset, of_row, shapes[shape])


_shapes: dict[tuple[object, ...], Shape] = {}


def _known(shape: Shape) -> Shape:
    """The one of all that are equal: a federation has few, and many rows."""
    return _shapes.setdefault(shape.key, shape)


def _row(handle: int, client: int, place: Place) -> bytearray:
    row = bytearray(place.shape.bytes)
    if os.preadv(handle, [row], place.offset) != len(row) or zlib.crc32(row) != place.crc:
        raise Damaged(f"{place.file} is damaged: the checksum of client {client} is wrong")
    return row


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None


def _close(files: dict[Path, File]) -> None:
    for file in files.values():
        os.close(file.handle)
    files.clear()
