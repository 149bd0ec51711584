"""Clients sharded over worker processes, one thread each. A client's state stays in its worker; only w moves.

w and the uploads travel through shared memory, commands through pipes. Every client is trained by one thread in the
same order of operations whichever worker has it, and the server adds uploads in client order: so any number of workers
gives the same bits.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from qupel.core.layout import Layout
from qupel.data.samples import held
from qupel.engine.faults import raise_told, told
from qupel.engine.job import Job
from qupel.engine.scratch import hold_multiprocessing
from qupel.engine.shard import Judged, Trained
from qupel.engine.stack import open_shard
from qupel.parts.base import Deployed, Rows, Upload
from qupel.util.errors import UserError
from qupel.util.machine import keep_memory

ROOM = 4  # bunches of uploads that a worker may be ahead of the server
BUNCH = 2**17  # numbers in a bunch: small models are sent some dozens at a time, large ones one by one
PATIENCE = 600.0  # seconds without a word after which workers count as hung, at least
LONGER = 20  # times the longest silence so far: the same, where clients take long
SHARED_MEMORY = Path("/dev/shm")


class WorkerDied(RuntimeError):
    """A worker process ended by itself; the run can be resumed from its last checkpoint."""


class Pool:
    """`size` worker processes that outlive a job, so that the cost of starting them is paid once."""

    def __init__(self, size: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # this process only averages; threads of its own would wait for the workers' cores
        hold_multiprocessing()
        ensure_running()  # else the first start does this, and lets the signals through that are held back
        self.pipes: list[Connection] = []
        self.processes = []
        for k in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name=f"qupel-worker-{k}", daemon=True)
            with _signals_held():  # a worker that is still starting must not die of Ctrl-C
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for pipe in self.pipes:
            pipe.close()  # a worker ends when its pipe does
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        torch.set_num_threads(self.threads)


class Workers:
    """A job on a pool: client i belongs to worker i mod (number of workers)."""

    def __init__(self, pool: Pool, job: Job, store: str = "memory", scratch: Path | None = None) -> None:
        self.pool, self.job = pool, job
        n, k = len(job.parts), len(pool.pipes)
        size = Layout.of(job.module).size
        rows = max(job.rows_of(phase) for phase in range(len(job.phases)))  # that travel at a time
        bunch = min(max(1, BUNCH // (rows * size)), 64)
        self.silence = 0.0  # the longest so far, in seconds
        self.awaited: int | None = None  # the worker without whose next answer nothing goes on
        with _room_in_shared_memory(job, 4 * rows * size * (1 + k * ROOM * bunch)):
            self.w = torch.empty(rows, size).share_memory_()
            self.uploads = [torch.empty(ROOM * bunch, rows, size).share_memory_() for _ in range(k)]
            for j in range(k):
                mine = range(j, n, k)
                self._send(j, ("job", job, mine, store, scratch, self.w, self.uploads[j]))
        for _ in self._collect(range(k)):
            pass

    def _owner(self, client: int) -> int:
        return client % len(self.pool.pipes)

    def _ask(self, command: str, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Any]:
        for place, row in zip(self.w, w, strict=False):
            place.copy_(row)
        groups: dict[int, list[int]] = {}
        for client in clients:
            groups.setdefault(self._owner(client), []).append(client)
        for j, group in groups.items():
            self._send(j, (command, round, len(w), group))
        return self._collect(groups)

    def _send(self, j: int, message: Any) -> None:
        try:
            self.pool.pipes[j].send(message)
        except OSError:
            raise self._death(j) from None

    def _collect(self, workers: Any) -> Iterator[Any]:
        """Answers of these workers as they come, until each has said that it is done."""
        pending = set(workers)
        while pending:
            pipes = {self.pool.pipes[j]: j for j in pending}
            ends = {self.pool.processes[j].sentinel: j for j in pending}
            began = time.monotonic()
            ready = wait([*pipes, *ends], max(PATIENCE, LONGER * self.silence))
            if not ready:
                raise self._hung(sorted(pending) if self.awaited is None else [self.awaited], time.monotonic() - began)
            self.silence = max(self.silence, time.monotonic() - began)
            for item in [r for r in ready if r in pipes] or ready:
                j = pipes[item] if item in pipes else ends[item]
                if item not in pipes:
                    raise self._death(j)
                try:
                    kind, value = self.pool.pipes[j].recv()
                except (EOFError, OSError):
                    raise self._death(j) from None
                if kind == "done":
                    pending.discard(j)
                elif kind == "fault":
                    raise_told(value, f"worker {j}")
                else:
                    yield value

    def _mine(self, j: int) -> str:
        return self.job.list_names(range(j, len(self.job.parts), len(self.pool.pipes)))

    def _death(self, j: int) -> WorkerDied:
        process = self.pool.processes[j]
        process.join(1)
        return WorkerDied(f"worker {j} died (exit code {process.exitcode}) with {self._mine(j)}")

    def _hung(self, workers: Sequence[int], seconds: float) -> WorkerDied:
        who = "; ".join(f"worker {j} (process {self.pool.processes[j].pid}) with {self._mine(j)}" for j in workers)
        return WorkerDied(f"no word for {seconds:.0f} s from {who}: stopped or hung")

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        """In client order. A worker has room for a few bunches of uploads; it goes on when one has been used."""
        early: dict[int, tuple[_Sent | None, dict[str, float], str | None, bool]] = {}
        answers = self._ask("train", round, w, clients)
        for client in clients:  # in ascending order, as each worker takes its own
            self.awaited = self._owner(client)  # others may have stopped for want of room
            while client not in early:
                early |= {found: (*rest, last) for (found, *rest), last in _marked(next(answers))}
            sent, info, fault, last = early.pop(client)
            j = self._owner(client)
            yield Trained(client, None if sent is None else sent.upload(self.uploads[j]), info, fault)
            if last:
                self._send(j, "used")
        self.awaited = None
        for _ in answers:  # until all are done
            pass

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]:
        yield from self._ask("evaluate", round, w, clients)

    def deployed(self, round: int, w: Rows, client: int) -> Deployed:
        (model,) = self._ask("deployed", round, w, [client])
        return model

    def _all(self, *message: Any) -> None:
        everyone = range(len(self.pool.pipes))
        for j in everyone:
            self._send(j, message)
        for _ in self._collect(everyone):
            pass

    def save(self, folder: Path) -> None:
        self._all("save", folder)

    def load(self, folder: Path | None) -> None:
        self._all("load", folder)


@dataclass(frozen=True)
class _Sent:
    """Where an upload lies in shared memory, how many rows it has, and their shares."""

    place: int
    rows: int
    shares: list[float] | None

    @classmethod
    def put(cls, upload: Upload, uploads: Tensor, place: int) -> _Sent:
        for room, row in zip(uploads[place], upload.rows, strict=False):
            room.copy_(row)
        return cls(place, len(upload.rows), None if upload.shares is None else upload.shares.tolist())

    def upload(self, uploads: Tensor) -> Upload:
        shares = None if self.shares is None else torch.tensor(self.shares)
        return Upload(uploads[self.place, : self.rows].unbind(), shares)


def _marked(bunch: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Each of a bunch, and whether it is the last."""
    return ((one, k == len(bunch) - 1) for k, one in enumerate(bunch))


@contextmanager
def _room_in_shared_memory(job: Job, bytes: int) -> Iterator[None]:
    """What is sent to workers lives in shared memory, the data too: say so where it is too small, before the system
    ends the first process that touches a page that is not there."""
    tensors = [t for samples in (job.data.train, job.data.test) for t in held(samples) if not t.is_shared()]
    weights = [t for module in job.modules.values() for t in module.state_dict().values()]
    bytes += sum(t.numel() * t.element_size() for t in (*tensors, *weights))
    remedy = f"make {SHARED_MEMORY} larger, or use --workers 1"
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < bytes:
            raise UserError(
                f"{free / 1e6:.0f} MB of shared memory are free, the workers need {bytes / 1e6:.0f} MB: {remedy}"
            )
    try:
        yield
    except RuntimeError as e:
        named = re.search(r"<?/?(torch_\d+_\d+_\d+)>?", str(e))
        if not named:
            raise
        (SHARED_MEMORY / named[1]).unlink(missing_ok=True)  # torch leaves it where it cannot make it large enough
        why = str(e).splitlines()[0][:200]
        raise UserError(f"no shared memory for the workers ({why}): raise `ulimit -f`, {remedy}") from None


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold stop signals back meanwhile; a process started now holds them back until it says otherwise."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_main() -> None:
    """Ctrl-C is the main process's business, and so is a SIGTERM to the whole group, as from `timeout`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # forgets one that came while starting
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _serve(pipe: Connection) -> None:
    """A worker's life: answer commands until the pipe closes."""
    _leave_signals_to_main()
    torch.set_num_threads(1)
    keep_memory()
    desk = _Desk(pipe)
    while True:
        try:
            command, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            getattr(desk, command)(*arguments)
            answer: tuple[str, Any] = ("done", None)
        except ConnectionError:
            return  # the main process is gone
        except Exception as e:
            answer = ("fault", told(e))
        try:
            pipe.send(answer)
        except ConnectionError:
            return


class _Desk:
    """The commands a worker answers; each sends ("item", value) for every piece of its answer."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def job(self, job: Job, mine: Sequence[int], store: str, scratch: Path | None, w: Tensor, uploads: Tensor) -> None:
        self.shard = open_shard(job, mine, store, scratch)
        self.w, self.uploads = w, uploads
        self.name = f"shard-{mine[0] if len(mine) else 'none'}"

    def _rows(self, count: int) -> Rows:
        return self.w[:count].clone().unbind()

    def train(self, round: int, rows: int, clients: Sequence[int]) -> None:
        room, size = len(self.uploads), len(self.uploads) // ROOM
        bunch: list[tuple[int, _Sent | None, Mapping[str, float], str | None]] = []
        for k, done in enumerate(self.shard.train(round, self._rows(rows), clients)):
            if k >= room and k % size == 0:
                self._wait_until_used()
            sent = _Sent.put(done.upload, self.uploads, k % room) if done.upload is not None else None
            bunch.append((done.client, sent, done.info, done.fault))
            if len(bunch) == size:
                self._send(bunch)
                bunch = []
        if bunch:
            self._send(bunch)
        for _ in range(min(ROOM, -(-len(clients) // size))):
            self._wait_until_used()

    def _wait_until_used(self) -> None:
        """One more of the bunches sent is used, and its room is free."""
        said = self.pipe.recv()
        assert said == "used", said

    def evaluate(self, round: int, rows: int, clients: Sequence[int]) -> None:
        for judged in self.shard.evaluate(round, self._rows(rows), clients):
            self._send(judged)

    def deployed(self, round: int, rows: int, clients: Sequence[int]) -> None:
        for client in clients:
            self._send(self.shard.deployed(client, round, self._rows(rows)))

    def save(self, folder: Path) -> None:
        self.shard.save(folder, self.name)

    def load(self, folder: Path | None) -> None:
        self.shard.load(folder)

    def _send(self, value: Any) -> None:
        self.pipe.send(("item", value))
