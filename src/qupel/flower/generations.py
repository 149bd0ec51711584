"""A client's states on its own disk, keyed by job and round: a round that is asked for twice counts once.

STATE/<job>/round-000004/   *-state.bin, state.json   the state after round 4 (`engine.states`)
                            residual.bin              what the codec's rounding left for the next upload
                            answer.json, upload.bin   what was answered: given again when the round is asked for again
STATE/<job>/round-000003/   the generation before it

A folder is complete or absent. A few generations are kept: a server that was killed within round 4 asks for it again,
maybe with another w; then the client goes on from the state it had before. One that has gone back to an older
checkpoint says which rounds are undone: the client goes on from the state before these, and they go.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.engine.checkpoint import KEEP
from qupel.engine.shard import Shard
from qupel.engine.store import MemoryStore
from qupel.flower.boundary import REMOVED
from qupel.flower.clean import SWEPT
from qupel.flower.frames import Header
from qupel.util.errors import UserError
from qupel.util.files import new_folder, write_atomic, write_json

KEPT = KEEP + 1  # a server goes on from any of its checkpoints
Undone = Sequence[tuple[int, int]]  # rounds (first, last) that a server has taken back


@dataclass(frozen=True)
class Asked:
    """What identifies a question: `attempt` counts the starts of the server, w is told by its hash."""

    attempt: int
    round: int
    w: str

    @classmethod
    def of(cls, attempt: int, round: int, w: bytes) -> Asked:
        return cls(attempt, round, hashlib.sha256(w).hexdigest())


class Generations:
    """The generations of one client in one job, and the shard that holds the newest one in memory."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.folder = folder
        self.shard = shard
        self.loaded: int | None = None  # the round whose state is in the shard; None: unknown

    def rounds(self) -> list[int]:
        """Rounds with a complete generation, newest first."""
        found = self.folder.glob("round-*") if self.folder.exists() else []
        return sorted((int(p.name.removeprefix("round-")) for p in found), reverse=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}"

    def _note(self, round: int) -> dict[str, Any]:
        return json.loads((self._path(round) / "answer.json").read_text())

    def kept(self, asked: Asked) -> tuple[Header, bytes] | None:
        """What was answered to this round and w, if it is still here."""
        if asked.round not in self.rounds():
            return None
        note = self._note(asked.round)
        if note["w"] != asked.w:
            return None
        return note["reply"], (self._path(asked.round) / "upload.bin").read_bytes()

    def answered(self, asked: Asked) -> tuple[Header, bytes] | None:
        """The answer to this very question, if it was given before. Raises if the question is an old one."""
        known = self.rounds()
        if not known:
            return None
        newest, oldest = self._note(known[0]), self._note(known[-1])
        if (kept := self.kept(asked)) is not None:
            return kept
        over = asked.round <= known[0] and asked.attempt <= newest["attempt"]
        if over or asked.attempt < newest["attempt"]:
            raise UserError(f"round {asked.round + 1} is over: this client is at round {known[0] + 1}")
        if asked.round <= known[-1] and oldest["before"] >= 0:
            raise UserError(f"cannot go back to round {asked.round + 1}: of the past, round {known[-1] + 1} is kept")
        return None

    def upto(self, round: int, undone: Undone = ()) -> Tensor | None:
        """Put the state after `round` into the shard, or the newest before it, of those that are not undone; what the
        codec left then (r d,), or None."""
        known = self.rounds()
        found = max((r for r in known if r <= round and not _within(r, undone)), default=-1)
        if found < 0 and known and self._note(known[-1])["before"] >= 0:
            wanted = min([round + 1, *(first for first, last in undone if last >= known[-1])])
            raise UserError(f"cannot go back to round {wanted + 1}: of the past, round {known[-1] + 1} is kept")
        return self._load(found)

    def _load(self, round: int) -> Tensor | None:
        if (self.folder / SWEPT).exists():
            raise UserError(REMOVED)
        if round != self.loaded:
            self.loaded = None
            self.shard.store = MemoryStore(self.shard.forms)
            if round >= 0:
                self.shard.load(self._path(round))
            self.loaded = round
        residual = self._path(round) / "residual.bin"
        return torch.from_numpy(np.fromfile(residual, np.float32)) if round >= 0 and residual.exists() else None

    def keep(self, asked: Asked, reply: Header, body: bytes, residual: Tensor | None, undone: Undone = ()) -> None:
        """Write the generation of a round that the shard has just made; later ones go, and so do old and undone
        ones."""
        self.loaded = None  # until it is on disk
        for round in self.rounds():
            if round >= asked.round or _within(round, undone):
                shutil.rmtree(self._path(round))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = max(self.rounds(), default=-1)
        with new_folder(self._path(asked.round)) as folder:
            self.shard.save(folder, "state", alone=True)
            if residual is not None:
                write_atomic(folder / "residual.bin", residual.numpy().tobytes())
            write_atomic(folder / "upload.bin", body)
            write_json(folder / "answer.json", {**vars(asked), "before": before, "reply": reply})
        for round in self.rounds()[KEPT:]:
            shutil.rmtree(self._path(round))
        self.loaded = asked.round


def _within(round: int, undone: Undone) -> bool:
    return any(first <= round <= last for first, last in undone)
