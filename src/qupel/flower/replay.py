"""Replay a server's log: from its uploads, or sums, to the same bits of w, round by round, with no client.

The engine of `engine.rounds.run` is the log itself. The hash of what the server sent is compared in every round, so a
server that did anything but its job's servers do with what it got is found at the first round in which it did.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qupel.engine.accounting import Budget
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.job import Job
from qupel.engine.ledger import Ledger
from qupel.engine.rounds import Failed, run
from qupel.engine.shard import SUM, Judged, Trained
from qupel.flower import chain
from qupel.flower.roundlog import FOLDER, LOG, hash_of
from qupel.flower.secure import codec_of, mean_of
from qupel.flower.server import SECRET, Request, described
from qupel.flower.task import Task
from qupel.flower.wire import decode
from qupel.parts.base import Deployed, Rows, Upload
from qupel.run.privacy import open_ledger
from qupel.util.errors import UserError
from qupel.util.files import Damaged


class Recorded:
    """The clients of a run as its log has them."""

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder, self.task = folder, task
        self.rounds: dict[int, dict[str, Any]] = {}  # the last entry of each
        self.end: str | None = None
        known = hashlib.sha256(task.model_dump_json().encode()).hexdigest()
        for line in chain.read(folder / LOG):
            entry = line.entry
            if "begin" in entry and entry["begin"]["task"] != known:
                raise UserError(f"{folder / LOG} is of another job than request.json and clients.json make")
            if "round" in entry:
                self.rounds[entry["round"]] = entry
            self.end = entry.get("end", self.end)

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        if round not in self.rounds:
            raise UserError(f"{self.folder / LOG} has no round {round + 1}")
        entry = self.rounds[round]
        if entry["w"] != hash_of(w):
            raise UserError(f"round {round + 1}: the server sent {entry['w'][:16]}, replayed it is {hash_of(w)[:16]}")
        path = self.folder / FOLDER / f"round-{round:06d}.bin"
        try:
            content = path.read_bytes()
        except OSError:
            raise Damaged(f"{path} is missing") from None
        if hashlib.sha256(content).hexdigest() != entry["file"]:
            raise Damaged(f"{path} is not what the log names")
        at = 0
        for told in entry["clients"]:
            size = told.get("bytes")
            upload = None if size is None else self._upload(told, content[at : at + size], w)
            at += size or 0
            yield Trained(told["client"], upload, told["info"], told["fault"], told["wire"], told["share"])

    def _upload(self, told: dict[str, Any], payload: bytes, w: Rows) -> Upload:
        if told["client"] != SUM:
            return decode(self.task.upload, payload, w)
        assert self.task.secure is not None
        total = np.frombuffer(payload, "<i8").astype(np.int64)
        return mean_of(codec_of(self.task.secure), total, int(told["share"]), w)

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]:
        return iter(())

    def deployed(self, round: int, w: Rows, client: int) -> Deployed:
        raise Failed("a log has no client's model")

    def save(self, folder: Path) -> None:
        """Clients' states are not in a log, and w does not depend on them."""

    def load(self, folder: Path | None) -> None: ...


def replay(folder: Path) -> tuple[int, str]:
    """(rounds, hash of w) of a finished run, computed anew from its log; raises at the first thing that differs."""
    request = Request.read(folder)
    if request.config.privacy is not None and not (folder / SECRET).exists():
        raise UserError(f"{folder / SECRET} is missing: the noise cannot be drawn again without it")
    job, task = described(folder, request)
    recorded = Recorded(folder, task)
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        checkpoints = Checkpoints(Path(scratch), task.job)  # a server that went back does so here, too
        ledger = copied(request, job, folder, Path(scratch))
        finished = run(unjudged(job), recorded, checkpoints=checkpoints, ledger=ledger)
    found = hash_of(finished.w)
    if recorded.end is None:
        raise UserError(f"{folder / LOG} has no end: the run is not finished")
    if found != recorded.end:
        raise UserError(f"the log ends with w {recorded.end[:16]}, replayed it is {found[:16]}")
    kept = hashlib.sha256((folder / "w.bin").read_bytes()).hexdigest()
    if found != kept:
        raise UserError(f"{folder / 'w.bin'} is {kept[:16]}, replayed it is {found[:16]}")
    return job.rounds, found


def copied(request: Request, job: Job, folder: Path, scratch: Path) -> Ledger | None:
    """The ledger of a private run: which noise a sum had depends on the other sums that its round was made of."""
    kept = open_ledger(request.config, job, folder, request.job)
    if kept is None or job.budget is None:
        return None
    if not kept.path.exists():
        raise UserError(f"{kept.path} is missing: the ledger of a private run says which noise its sums had")
    shutil.copy(kept.path, scratch / kept.path.name)
    return Ledger(scratch / kept.path.name, kept.run, replace(job, budget=Budget(job.budget.delta)))


def unjudged(job: Job) -> Job:
    """Scores are the clients' own, and w does not depend on them."""
    return replace(job, metrics={}, judge_by="")
