"""Asynchronous rounds (FedBuff: Nguyen et al., AISTATS 2022): a round is over when `buffer` uploads have come.

Every client that is free is asked with the newest w and takes its time. An upload that was asked for s rounds ago
counts with what it moved from the w it was asked with, D_i, and the less the older that is:

    w <- server's step with the mean of  w + D_i / sqrt(1 + s)

A client has one question at a time, and is asked again from the next round on. Who was asked with which w is part of
the checkpoint, and clients keep their answers: after a crash the same questions are asked again, so that no upload is
lost, and none counts twice.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING

import numpy as np
import torch

from qupel.core.layout import Layout
from qupel.engine.rounds import Failed
from qupel.engine.shard import Trained
from qupel.flower.post import Reply, wait_for
from qupel.parts.base import Rows, Upload, vector
from qupel.util.errors import UserError
from qupel.util.files import check_files, checksums, read_json, write_atomic, write_json

if TYPE_CHECKING:
    from qupel.flower.server import Fleet

ASKED = "asked.json"  # in a checkpoint
TRIES = 3  # of a round that nobody answers
BUFFER = 3  # uploads that make a round, unless said otherwise
Answered = tuple[int, int, Reply | Exception | None]  # client, round it was asked in, what came; None: nothing in time


def buffer_of(mode: str, buffer: int | None, clients: int) -> int:
    """Uploads that make a round, as `--mode` and `--buffer` say; 0: rounds wait for all."""
    if mode != "async":
        if buffer is not None:
            raise UserError(f"--buffer {buffer}: rounds of --mode {mode} have none; add --mode async")
        return 0
    if buffer is not None and buffer > clients:
        raise UserError(f"--buffer {buffer}: more uploads than the {clients} clients have under way")
    return min(buffer or BUFFER, clients)


class Late:
    """The questions that are open."""

    def __init__(self, fleet: Fleet, buffer: int) -> None:
        self.fleet, self.buffer = fleet, buffer
        self.asked: dict[int, tuple[int, Rows]] = {}  # client -> the round it was asked in, with which w
        self.sent: set[int] = set()  # those whose question this process has sent
        self.answers: Queue[Answered] = Queue()

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        """The next uploads, whenever they were asked for; in client order, a number of at most one buffer."""
        done: dict[int, Trained] = {}
        for _ in range(TRIES):
            free = [client for client in clients if client not in self.asked and client not in done]
            least = 0 if self.asked else min(1, len(free))
            for client in wait_for(self.fleet.post, free, least, self.fleet.terms.patience):
                self.asked[client] = round, w
            for client in self.asked.keys() - self.sent:
                self._send(client)
            self._collect(round, w, done)
            if any(d.fault is None for d in done.values()) or not clients:
                return iter([done[client] for client in sorted(done)])
            done = {}
        raise Failed(f"round {round + 1}: no client answered soundly")

    def _send(self, client: int) -> None:
        """Ask, in a thread of its own: the post waits for its answers."""
        at, w = self.asked[client]
        self.sent.add(client)

        def ask() -> None:
            try:
                reply: Reply | Exception | None = next(
                    iter(self.fleet.ask("train", at, vector(w).numpy().tobytes(), [client])), None
                )
            except Exception as e:  # the post's own, for the loop to meet
                reply = e
            self.answers.put((client, at, reply))

        threading.Thread(target=ask, daemon=True).start()

    def _collect(self, round: int, w: Rows, done: dict[int, Trained]) -> None:
        """Until there are as many sound ones as a round needs, or nobody is left to wait for."""
        sound = 0
        limit = time.monotonic() + self.fleet.terms.deadline + self.fleet.terms.patience
        while self.asked and sound < self.buffer:
            try:
                client, at, reply = self.answers.get(timeout=max(0.0, limit - time.monotonic()))
            except Empty:
                raise Failed(f"round {round + 1}: the post is silent") from None
            if client not in self.asked or self.asked[client][0] != at:
                continue  # of a question that was taken back
            _, sent = self.asked.pop(client)
            self.sent.discard(client)
            if isinstance(reply, Exception):
                raise reply
            done[client] = self._read(reply, client, at, sent, round, w)
            sound += done[client].fault is None

    def _read(self, reply: Reply | None, client: int, at: int, sent: Rows, round: int, w: Rows) -> Trained:
        if reply is None:
            return Trained(client, None, fault="no answer before the deadline")
        done = self.fleet.read(reply, at, sent)
        locate = self.fleet.job.locate
        if done.fault is None and locate(at)[0] != locate(round)[0]:
            return replace(done, upload=None, fault=f"answered round {at + 1}, of a phase that is over")
        return done if done.upload is None else replace(done, upload=moved_on(done.upload, sent, w, round - at))

    # --- checkpoints ---

    def save(self, folder: Path) -> None:
        for at, w in dict(self.asked.values()).items():
            write_atomic(folder / _name(at), vector(w).numpy().tobytes())
        known = {str(client): at for client, (at, _) in sorted(self.asked.items())}
        names = sorted({_name(at) for at in known.values()})
        write_json(folder / ASKED, {"asked": known, "files": checksums(folder, names)})

    def load(self, folder: Path | None) -> None:
        """Take the open questions of a checkpoint for one's own; answers to others that are under way are let go."""
        self.asked, self.sent = {}, set()
        if folder is None or not (folder / ASKED).exists():
            return
        known = read_json(folder / ASKED)
        check_files(folder, known["files"])
        size = Layout.of(self.fleet.job.module).size
        for client, at in known["asked"].items():
            w = torch.from_numpy(np.fromfile(folder / _name(at), np.float32))
            self.asked[int(client)] = at, w.split(size)


def moved_on(upload: Upload, sent: Rows, w: Rows, staleness: int) -> Upload:
    """An upload as if it had begun at w: w + (upload - sent) / sqrt(1 + staleness); of a fresh one itself."""
    if staleness == 0:
        return upload
    weight = 1 / math.sqrt(1 + staleness)
    rows = zip(upload.rows, sent, w, strict=True)
    return replace(upload, rows=tuple((now + weight * (row.double() - old)).to(now.dtype) for row, old, now in rows))


def _name(round: int) -> str:
    return f"asked-{round:06d}.bin"
