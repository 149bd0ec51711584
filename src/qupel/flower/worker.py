"""The resident worker of a client: `python -m qupel.flower.worker client.toml`. It answers on a socket in the state
folder, one question at a time, until it is told to stop or nobody has asked for a long while."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qupel.flower import clean, frames
from qupel.flower.client import Client
from qupel.flower.processes import PID_FILE, Process
from qupel.flower.task import ClientConfig, load_client
from qupel.util.errors import UserError


def open_client(path: Path) -> Client:
    """The client of a config file, computing with one thread: then its bits are those of every other engine."""
    torch.set_num_threads(1)
    return Client(load_client(path))


def answer_alone(path: Path, header: frames.Header, body: bytes) -> tuple[frames.Header, bytes]:
    """One question to a client without a resident worker."""
    client = open_client(path)
    client.config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone(client.config.state, wait=True):
        return client.answer(header, body)


def serve(client: Client) -> None:
    config = client.config
    with alone(config.state), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        clean.sweep(clean.of_state(config.state, config.keep_days))
        (config.state / frames.SOCKET).unlink(missing_ok=True)  # of a worker that is gone
        with frames.inside(config.state):
            listener.bind(frames.SOCKET)
        listener.listen()
        listener.settimeout(60 * config.idle_minutes)
        Process.here("worker").note(config.state / PID_FILE)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return
            with connection:
                connection.settimeout(60)
                _one(client, connection)


@contextmanager
def alone(state: Path, wait: bool = False) -> Iterator[None]:
    """Two workers on one state would undo each other's rounds, and spend a private client's budget twice."""
    with (state / "worker.alone").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"{state} already has a worker") from None
        yield


def _one(client: Client, connection: socket.socket) -> None:
    """One question. What goes wrong with it must not end the worker."""
    try:
        frames.send(connection, *client.answer(*frames.receive(connection)))
    except (OSError, ValueError) as e:
        print(f"a question was lost: {e}", file=sys.stderr, flush=True)


def main(path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config: ClientConfig = load_client(path)
    os.nice(config.nice)
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    serve(open_client(path))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as e:
        sys.exit(f"error: {e}")
