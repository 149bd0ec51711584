"""Ranks of torch.distributed (gloo) that talk: who starts them, what a message is, how one that is lost is noticed.

Rank 0 leads, the others answer it. A message is a header (two int64), JSON, and at most one vector of float32; nothing
is pickled. Each side always has a receive open for each of its peers, in a thread of its own: so the end of a line is
seen at once, whatever the main thread does, and every send finds its receiver.

Gloo neither encrypts nor authenticates: ranks belong on a trusted network. A group that meets at a loopback address
opens no socket on any other.
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from qupel.engine.workers import WorkerDied
from qupel.util.errors import UserError

TIMEOUT = 600.0  # seconds of silence after which a rank counts as hung
MEETING = 300.0  # seconds, at least, in which all ranks must have come
FOREVER = timedelta(days=365)
GRACE = 5.0  # seconds for the others to leave
END = {"do": "end"}
STILL_HERE = {"do": "wait"}
STARTER = "QUPEL_STARTER"  # the process that started this rank by `start`

Message = tuple[dict[str, Any], Tensor]  # JSON, a vector (n,) of float32, empty if there is none
NOTHING = torch.empty(0)


class Lost(WorkerDied):
    """A rank ended by itself, or is silent; the run can be resumed from its last checkpoint."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Group:
    """One rank's view of the group. Use as a context manager: when rank 0 leaves it, all ranks end."""

    def __init__(self, rank: int, size: int, timeout: float, started: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.rank, self.size, self.timeout, self.started = rank, size, timeout, started
        self.peers = range(1, size) if rank == 0 else range(1)
        self.inbox: SimpleQueue[tuple[int, Message | None]] = SimpleQueue()  # None: the line is dead
        self.heard = dict.fromkeys(self.peers, time.monotonic())
        self.reassured = time.monotonic()
        self.hosts: dict[int, str] = {}
        self.posted: dict[int, list[Any]] = {peer: [] for peer in self.peers}
        self.open = True
        listen = self._collect if rank == 0 else self._obey
        self.listeners = [threading.Thread(target=listen, args=(peer,), daemon=True) for peer in self.peers]
        for thread in self.listeners:
            thread.start()
        try:
            self._greet()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Send everyone home. A rank that is busy leaves, too: its listener takes the message."""
        if self.rank != 0 or not self.open:
            return
        self.open = False
        for peer in self.peers:
            with suppress(RuntimeError):  # it is dead
                self._post(peer, END)
        deadline = time.monotonic() + GRACE
        for thread in self.listeners:  # each ends when its rank has closed the line
            thread.join(max(0.0, deadline - time.monotonic()))
        end(self.started, deadline)
        for thread in self.listeners:
            thread.join(GRACE if self.started else 0)
        if any(thread.is_alive() for thread in self.listeners):
            # A rank elsewhere is hung. A thread inside gloo may not live to see the interpreter's end: it would abort.
            atexit.register(_leave)
        else:
            dist.destroy_process_group()

    # --- messages ---

    def send(self, to: int, what: dict[str, Any], vector: Tensor = NOTHING) -> None:
        """Send JSON and a vector (n,). Rank 0 goes on meanwhile: the vector stays as it is until the answer is here."""
        began = self.heard[to] = time.monotonic()  # its time to answer begins
        try:
            self._settle(to)
            self._post(to, what, vector)
            if self.rank > 0:
                self._settle(to)
        except RuntimeError:
            if self.rank > 0:
                os._exit(1)  # rank 0 is gone, and says why where it can
            raise self._lost(to, time.monotonic() - began > self.timeout / 2) from None

    def _post(self, to: int, what: dict[str, Any], vector: Tensor = NOTHING) -> None:
        for part in _parts(what, vector):
            self.posted[to].append((dist.isend(part, to), part))  # the part must live until it is sent

    def _settle(self, to: int) -> None:
        """Wait until what was posted is sent: at once, as the other side has taken all before it answered."""
        for work, _ in self.posted[to]:
            work.wait()
        self.posted[to].clear()

    def receive(self, awaited: Collection[int], wait: bool = True) -> tuple[int, Message] | None:
        """(rank, message), the next of anyone; None if there is none and `wait` is False. Raises `Lost` when any line
        dies, or when one of those awaited says nothing for the timeout."""
        while True:
            if time.monotonic() - self.reassured > self.timeout / 3:  # a rank that hears nothing for long leaves
                self.reassured = time.monotonic()
                for peer in self.peers:
                    with suppress(RuntimeError):  # its listener tells
                        self._post(peer, STILL_HERE)
            try:
                peer, message = self.inbox.get(wait, min(1.0, self.timeout / 3))
            except Empty:
                silent = [p for p in awaited if time.monotonic() - self.heard[p] > self.timeout]
                if silent:
                    raise self._lost(silent[0], True) from None
                if wait:
                    continue
                return None
            if message is None:
                raise self._lost(peer)
            return peer, message

    def order(self) -> Message:
        """What rank 0 wants next of this rank."""
        _, message = self.inbox.get()
        assert message is not None
        return message

    def _take(self, peer: int, patience: timedelta) -> Message:
        header = torch.empty(2, dtype=torch.int64)
        waiting = dist.irecv(header, peer)
        assert waiting is not None
        waiting.wait(patience)
        text, vector = torch.empty(int(header[0]), dtype=torch.uint8), torch.empty(int(header[1]))
        for part in (text, vector):
            if len(part):
                dist.recv(part, peer)
        self.heard[peer] = time.monotonic()
        return json.loads(text.numpy().tobytes()), vector

    def _collect(self, peer: int) -> None:
        """Rank 0's listener: what one rank says, until its line dies."""
        while True:
            try:
                message = self._take(peer, FOREVER)
            except RuntimeError:
                self.inbox.put((peer, None))
                return
            self.inbox.put((peer, message))

    def _obey(self, peer: int) -> None:
        """The other ranks' listener: this process ends with rank 0, at once, whatever it is doing."""
        while True:
            try:
                what, vector = self._take(peer, timedelta(seconds=2 * self.timeout))  # rank 0 judges before we do
            except RuntimeError:
                os._exit(1)
            if what == END:
                os._exit(0)
            if what != STILL_HERE:
                self.inbox.put((peer, (what, vector)))

    def _greet(self) -> None:
        """Every rank tells rank 0 where it is and what it runs: other versions may give other bits."""
        mine = {"host": socket.gethostname(), "versions": [version(name) for name in ("qupel", "torch", "numpy")]}
        if self.rank > 0:
            self.send(0, mine)
            return
        missing = set(self.peers)
        while missing:
            found = self.receive(missing)
            assert found is not None
            peer, (theirs, _) = found
            self.hosts[peer] = theirs["host"]
            if theirs["versions"] != mine["versions"]:
                ours = ", ".join(mine["versions"])
                raise UserError(
                    f"{self.name(peer)} has qupel, torch, numpy {', '.join(theirs['versions'])}, not {ours}"
                )
            missing.discard(peer)

    def name(self, rank: int) -> str:
        """What messages call a rank: its number, and its host if that is another."""
        host = self.hosts.get(rank, "")
        return f"rank {rank} on {host}" if host and host != socket.gethostname() else f"rank {rank}"

    def _lost(self, rank: int, silent: bool = False) -> Lost:
        if silent:
            return Lost(rank, f"{self.name(rank)} has said nothing for {self.timeout:g} s")
        code = f" (exit code {_exit_code(self.started[rank - 1])})" if self.started else ""
        return Lost(rank, f"{self.name(rank)} died{code}")


def _parts(what: dict[str, Any], vector: Tensor) -> Iterator[Tensor]:
    text = json.dumps(what).encode()
    yield torch.tensor([len(text), len(vector)])
    yield torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(vector):
        yield vector.contiguous()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        return None


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# --- who starts a group ---


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[Group | None]:
    """The group for which a launcher such as torchrun started this process (RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in the environment); None if none did."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    if os.environ["RANK"] != "0":
        for number in (signal.SIGINT, signal.SIGTERM):  # while it waits for rank 0, at once, wherever it is
            signal.signal(number, signal.SIG_DFL)
        if STARTER in os.environ and os.getppid() != int(os.environ[STARTER]):
            os._exit(1)  # it is gone already
    place, patience = os.environ.get("MASTER_ADDR", ""), timedelta(seconds=max(timeout, MEETING))
    try:
        with _on_loopback(place):
            store, rank, size = next(rendezvous("env://", timeout=patience))
            store.set(f"rank {rank}", "here")
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store, with dead addresses
            store = dist.PrefixStore(f"attempt {attempt}", store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    except (RuntimeError, ValueError) as e:
        port = os.environ.get("MASTER_PORT", "")
        who = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        raise UserError(f"{who} cannot meet the others at {place}:{port}: {str(e).splitlines()[0]}") from None
    with Group(rank, size, timeout) as group:
        if rank > 0:
            _leave_stops_to_rank_0(group)
        yield group


def _leave_stops_to_rank_0(group: Group) -> None:
    """It ends the round, saves, and sends the others home. A rank that has heard nothing of it for long goes by
    itself."""

    def stop(number: int, frame: Any) -> None:
        if time.monotonic() - group.heard[0] > group.timeout:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start(size: int, timeout: float = TIMEOUT) -> Group:
    """Rank 0 of a new group on this machine; the others are processes that it starts."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(size)
    port, patience = listener.getsockname()[1], timedelta(seconds=max(timeout, MEETING))
    store = dist.TCPStore("127.0.0.1", port, None, True, patience, False, master_listen_fd=listener.detach())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), STARTER: str(os.getpid())}
    command = [sys.executable, "-m", "qupel", "run", "--rank-timeout", str(timeout)]
    others = []
    try:
        for rank in range(1, size):  # in sessions of their own: Ctrl-C is for this process
            environment = {**os.environ, **place, "RANK": str(rank)}
            others.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True))
        for rank, process in enumerate(others, 1):
            while not store.check([f"rank {rank}"]):
                if process.poll() is not None:
                    raise Lost(rank, f"rank {rank} died while starting (exit code {process.returncode})")
                time.sleep(0.02)
        with _on_loopback("127.0.0.1"):
            first = dist.PrefixStore("attempt 0", store)
            dist.init_process_group("gloo", store=first, rank=0, world_size=size, timeout=patience)
        return Group(0, size, timeout, others)
    except BaseException:
        end(others, 0.0)
        raise


def end(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait for processes until the deadline, then kill them."""
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _on_loopback(address: str) -> Iterator[None]:
    """Where ranks meet at a loopback address they are all on this machine: let gloo listen there only."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given is not None or not names or not _is_loopback(address):
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
