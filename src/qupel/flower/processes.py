"""Processes that outlive the command that started them: who they are, whether they live, how they end.

A process is known by its id and its start: an id alone may by now belong to somebody else.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qupel.util.files import write_json

PID_FILE = "worker.json"  # of a resident worker, in its state folder
_CHILDREN: dict[tuple[int, str], subprocess.Popen[bytes]] = {}  # of this process, by id and start, until they end


@dataclass(frozen=True)
class Process:
    name: str
    pid: int
    started: str

    def alive(self) -> bool:
        """Whether it runs; a child of this process lives until its body is taken away."""
        reap()
        return (self.pid, self.started) in _CHILDREN or started(self.pid) == self.started

    @classmethod
    def here(cls, name: str) -> Process:
        """This process."""
        return cls(name, os.getpid(), started(os.getpid()) or "")

    def kill(self) -> None:
        """End this process alone, at once."""
        while self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.05)

    def note(self, path: Path) -> None:
        write_json(path, {"pid": self.pid, "started": self.started})

    @classmethod
    def noted(cls, name: str, path: Path) -> Process:
        return cls(name, **json.loads(path.read_text()))


def reap() -> None:
    """Take away the bodies of children that have ended: one that stays keeps its own children waiting."""
    for key, child in list(_CHILDREN.items()):
        if child.poll() is not None:
            _CHILDREN.pop(key, None)  # another thread may have been faster


def started(pid: int) -> str | None:
    """When a process started, in the system's own terms; None when there is none, or only its body."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()  # its name, in parentheses, may hold anything
        except (FileNotFoundError, ProcessLookupError):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if fields[0] in "ZX" else f"{boot} {fields[19]}"
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return shown.stdout.strip() or None


def began(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None when there is none. Where that cannot be known: long ago."""
    known = started(pid)
    if known is None:
        return None
    try:
        boot = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
        return int(boot[1]) + int(known.split()[-1]) / os.sysconf("SC_CLK_TCK") if boot else 0.0
    except (OSError, ValueError):
        return 0.0


def start(name: str, command: Sequence[str], log: Path, environment: dict[str, str]) -> Process:
    """Start a process that leads its own group, so that it and its children can be ended together."""
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    process = Process(name, child.pid, started(child.pid) or "")
    _CHILDREN[process.pid, process.started] = child
    return process


def end(processes: Sequence[Process], seconds: float = 10.0) -> None:
    """Ask these processes and their groups to end; after a while end them."""
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
        living = [p for p in processes if p.alive()]
        for process in living:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        limit = time.monotonic() + patience
        while any(p.alive() for p in living) and time.monotonic() < limit:
            time.sleep(0.05)
