"""Checkpoints of a run: a folder per checkpoint, complete or absent, and a log of metrics that fits it.

checkpoints/round-000040/   meta.json   rounds done, the job's fingerprint, what the next line of metrics needs, what
                                        the guard knows; checksums of the other files and of the log so far
                            w.bin       the server's model, its rows one after the other, float32
                            server.bin  the server's own memory, likewise
                            shard-*.json    where the clients' states are (`states`)
checkpoints/states/         the clients' states, of all checkpoints
metrics.jsonl               one line per evaluated round

The newest few are kept: where one is damaged, the run goes on from the one before it, to the same end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qupel.core.layout import Layout
from qupel.engine import states
from qupel.parts.base import Rows
from qupel.parts.servers import ServerState
from qupel.util.errors import UserError, warn
from qupel.util.files import (
    Damaged,
    check_files,
    checksums,
    new_folder,
    read_json,
    write_atomic,
    write_sealed,
)

KEEP = 3
META = "meta.json"


@dataclass(frozen=True)
class Since:
    """What the rounds since the last line of metrics leave for the next one."""

    told: dict[str, list[float]] = field(default_factory=dict)  # means over the clients, a round each
    refused: list[str] = field(default_factory=list)
    rolled_back: list[dict[str, Any]] = field(default_factory=list)

    def add(self, told: Mapping[str, float]) -> None:
        for name, value in told.items():
            self.told.setdefault(name, []).append(value)


class Saved(NamedTuple):
    """A checkpoint that is sound. `states` is a folder with the clients' states; the log had `logged` bytes."""

    rounds: int
    w: Rows
    memory: ServerState
    since: Since
    states: Path
    guard: dict[str, Any] | None
    logged: int


class Checkpoints:
    def __init__(self, folder: Path, fingerprint: str, keep: int = KEEP) -> None:
        self.folder = folder / "checkpoints"
        self.log = folder / "metrics.jsonl"
        self.fingerprint = fingerprint
        self.keep = keep
        self.logged, self.digest = 0, hashlib.sha256()  # of the log as this process has written it

    def save(
        self,
        rounds: int,
        w: Rows,
        memory: ServerState,
        since: Since,
        save_states: Callable[[Path], None],
        guard: dict[str, Any] | None = None,
        every: int = 1,
    ) -> None:
        """Write the checkpoint after `rounds` rounds; when it is complete, those older than the last few go. One of a
        stop, between those of `every` so many rounds, takes no other's place."""
        final = self.folder / f"round-{rounds:06d}"
        if final.exists():
            return
        with new_folder(final) as folder:
            save_states(folder)
            write_atomic(folder / "w.bin", _bytes(w))
            write_atomic(folder / "server.bin", _bytes(memory))
            names = sorted(p.name for p in folder.iterdir())
            meta = {"rounds": rounds, "fingerprint": self.fingerprint, **asdict(since), "guard": guard}
            meta["server"] = [list(t.shape) for t in memory]
            meta["log"] = [self.logged, self.digest.hexdigest()]
            meta["sizes"] = {name: (folder / name).stat().st_size for name in names}
            meta["files"] = checksums(folder, names)
            write_sealed(folder / META, meta)
        kept = {final, *self._all(every)[: self.keep]}
        for other in {*self.folder.iterdir()} - {*kept, self.folder / states.FOLDER}:
            _remove(other)
        states.sweep(self.folder, kept)

    def _all(self, every: int = 1) -> list[Path]:
        """Newest first."""
        found = sorted(self.folder.glob("round-" + 6 * "[0-9]"), reverse=True) if self.folder.exists() else []
        return [path for path in found if int(path.name[-6:]) % every == 0]

    def newest(self) -> Path | None:
        return next(iter(self._all()), None)

    def load(self, layout: Layout, before: int | None = None, every: int = 1) -> Saved | None:
        """The newest checkpoint that is sound (before a round, of every so many), None if there is none at all. Damaged
        ones that are newer are told of and go."""
        damaged: list[tuple[Path, Damaged]] = []
        log = self.log.read_bytes() if self.log.is_file() else b""
        for folder in self._all(every):
            if before is not None and folder.name >= f"round-{before:06d}":
                continue
            try:
                saved = self._read(folder, layout, log)
            except Damaged as e:
                damaged.append((folder, e))
                continue
            for other, why in damaged:
                warn(f"{why}; going on from {folder.name}")
                _remove(other)
            return saved
        if damaged:
            raise Damaged(f"{damaged[0][1]}; no older checkpoint is sound: remove {self.folder} to begin it again")
        return None

    def _read(self, folder: Path, layout: Layout, log: bytes) -> Saved:
        try:
            meta = read_json(folder / META, sealed=True)
            if folder.name != f"round-{meta['rounds']:06d}":
                raise Damaged(f"{folder} is damaged: it holds round {meta['rounds']}")
            if meta["fingerprint"] != self.fingerprint:
                raise UserError(
                    f"{folder} was made by a run with other settings; give another --out, or the same settings"
                )
            sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != META}
            wrong = [name for name, size in meta["sizes"].items() if sizes.get(name) != size]
            if wrong or len(sizes) != len(meta["sizes"]):
                raise Damaged(f"{folder} is damaged: {', '.join(wrong) or 'it holds files of others'}")
            check_files(folder, meta["files"])
            w = torch.from_numpy(np.fromfile(folder / "w.bin", dtype=np.float32))
            if len(w) == 0 or len(w) % layout.size:
                raise UserError(f"{folder} holds a model of {len(w)} parameters, this one has {layout.size}")
            memory = _tensors(folder / "server.bin", meta["server"])
            states.check(folder, [other for other in self._all() if other.name < folder.name])
        except OSError as e:
            raise Damaged(f"{e.filename or folder} cannot be read: {e.strerror}") from None
        logged, digest = meta["log"]
        if hashlib.sha256(log[:logged]).hexdigest() != digest:
            raise Damaged(f"{self.log} is damaged: its lines are not those of {folder.name}")
        since = Since(meta["told"], meta["refused"], meta["rolled_back"])
        return Saved(meta["rounds"], tuple(w.split(layout.size)), memory, since, folder, meta["guard"], logged)

    def append(self, line: dict[str, Any]) -> None:
        text = (json.dumps(line) + "\n").encode()
        with self.log.open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._wrote(text)

    def _wrote(self, text: bytes) -> None:
        self.logged += len(text)
        self.digest.update(text)

    def lines(self, saved: Saved | None, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The metrics up to a checkpoint; later lines, of rounds that will run again, are dropped.

        Without a checkpoint the log begins with the lines `before`. The run takes its folder over: what a killed one
        left half-written is taken away.
        """
        for temporary in self.log.parent.glob(".*.tmp"):
            temporary.unlink(missing_ok=True)
        if saved is None:
            text = "".join(json.dumps(line) + "\n" for line in before).encode()
        else:
            text = self.log.read_bytes()[: saved.logged] if saved.logged else b""
        write_atomic(self.log, text)
        self.logged, self.digest = 0, hashlib.sha256()
        self._wrote(text)
        return [json.loads(line) for line in text.splitlines()]

    def forget(self, rounds: int) -> None:
        """Remove the checkpoints after `rounds` rounds: what they hold is not to be gone back to."""
        for path in self._all():
            if path.name > f"round-{rounds:06d}":
                _remove(path)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _bytes(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)


def _tensors(path: Path, shapes: Sequence[Sequence[int]]) -> ServerState:
    numbers = torch.from_numpy(np.fromfile(path, dtype=np.float32))
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) != len(numbers):
        raise Damaged(f"{path} is damaged: it has {len(numbers)} numbers")
    return tuple(part.view(*shape) for part, shape in zip(numbers.split(sizes), shapes, strict=True)) if sizes else ()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
