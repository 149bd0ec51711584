"""What a Flower ClientApp does: pass the message on to the resident worker, and start that one if it is not there.

Flower starts a new process for every message. This one imports nothing heavy; torch, data and state stay loaded in the
worker.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any

from qupel.flower import boundary, frames
from qupel.flower.frames import Header
from qupel.flower.processes import PID_FILE, start

START_SECONDS = 300.0  # loading torch and data on a small, busy machine


class WorkerMissing(RuntimeError):
    """The resident worker could not be started."""


def failed(error: Exception) -> tuple[Header, bytes]:
    """The answer where there is none. Flower would send the text of the exception, which may hold anything."""
    traceback.print_exception(error)
    missing = isinstance(error, WorkerMissing)
    return boundary.refused("", True, boundary.NO_WORKER if missing else boundary.FAILED)


def forward(config: Path, header: Header, body: bytes) -> tuple[Header, bytes]:
    """The answer of the client with this config file."""
    raw = tomllib.loads(config.read_text())
    return boundary.passed_on(header.get("kind"), "privacy" in raw, *_ask(config, raw, header, body))


def _ask(config: Path, raw: dict[str, Any], header: Header, body: bytes) -> tuple[Header, bytes]:
    if not raw.get("resident", True):
        from qupel.flower.worker import answer_alone

        return answer_alone(config, header, body)
    state = config.resolve().parent / raw.get("state", "state")
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return frames.ask(state, header, body)
    except (FileNotFoundError, ConnectionError):  # not there, or died at work: a round that is asked twice counts once
        _start(config, state)
        return frames.ask(state, header, body)


def _start(config: Path, state: Path) -> None:
    """Start the worker; of several that try, one does."""
    with (state / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _listens(state):
            return
        command = [sys.executable, "-m", "qupel.flower.worker", str(config.resolve())]
        process = start("worker", command, state / "worker.log", dict(os.environ))
        process.note(state / PID_FILE)  # not later: it may have to be ended while it loads
        end = time.monotonic() + START_SECONDS
        while not _listens(state):
            if not process.alive() or time.monotonic() > end:
                last = (state / "worker.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise WorkerMissing(f"the worker of {config} did not start: {''.join(last)}")
            time.sleep(0.05)


def _listens(state: Path) -> bool:
    try:
        frames.ask(state, {"kind": "ping"})
    except (FileNotFoundError, ConnectionError):
        return False
    return True
