"""What killed processes and old jobs have left in a federation's folders; removed at every start and by `clean`.

Only what is ours by its name and nobody's any more: temporaries of `files` whose process is gone, the resident worker
of a SuperNode that is gone, folders of multiprocessing (`engine.scratch`), and the states of jobs that nobody has asked
for in a long while. Exported models, the ledger of a private client and everything else stay. No torch here.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qupel.engine import scratch
from qupel.flower.processes import PID_FILE, Process, began, end
from qupel.util.errors import UserError
from qupel.util.files import write_atomic

SUPERNODE = "supernode.json"  # in a client's folder: the process that serves it
SWEPT = "swept"  # in a job's folder: its states are gone
KEEP_DAYS = 30.0
_FILE = re.compile(r"\..+\.(\d+)(?:-\w+)?\.tmp")  # of files.write_atomic
_FOLDER = re.compile(r"\.round-\d+\.(\d+)(?:-\w+)?")  # of files.new_folder


@dataclass(frozen=True)
class Left:
    """Something that can go, and how."""

    what: str
    remove: Callable[[], None]


def of_client(folder: Path, days: float | None = None) -> list[Left]:
    """What can go of a client's folder; `days`: after which a job is old, in place of client.toml's keep_days."""
    raw, state = _settings(folder), state_of(folder)
    keep = float(raw.get("keep_days", KEEP_DAYS)) if days is None else days
    found = [*temporaries(folder), *_worker(folder, state)]
    if state.is_dir():
        found += of_state(state, keep)
    return found


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "client.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"cannot read {folder / 'client.toml'}: {e}") from None


def state_of(folder: Path) -> Path:
    """Where a client's folder has its states."""
    return folder / str(_settings(folder).get("state", "state"))


def of_state(state: Path, days: float) -> list[Left]:
    jobs = [path for path in sorted(state.iterdir()) if path.is_dir() and not path.is_symlink()]
    found = [*temporaries(state), *(left for job in jobs for left in temporaries(job))]
    return [*found, *(left for job in jobs for left in _old(job, days))]


def of_federation(folder: Path, days: float | None = None) -> list[Left]:
    """What can go of the folder that `init` made, of its clients that are still in it, and of its runs."""
    found = list(temporaries(folder))
    for place in (folder / "server", *sorted((folder / "runs").glob("*/"))):
        found += temporaries(place)
    for client in sorted((folder / "clients").glob("*/")):
        if (client / "client.toml").exists():
            found += of_client(client, days)
    return found


def of_machine() -> list[Left]:
    return [Left(f"{path}: of a process that is gone", partial(scratch.remove, path)) for path in scratch.abandoned()]


def sweep(found: list[Left]) -> None:
    for left in found:
        left.remove()


def noted(name: str, path: Path) -> Process | None:
    """The process that a file names; None if there is no such file, or it is damaged."""
    try:
        return Process.noted(name, path)
    except (OSError, ValueError, TypeError):
        return None


def temporaries(folder: Path) -> Iterator[Left]:
    """What `files` was writing into a folder when its process was killed."""
    for path in sorted(folder.glob(".*")) if folder.is_dir() else []:
        pattern = _FOLDER if path.is_dir() else _FILE
        named = None if path.is_symlink() else pattern.fullmatch(path.name)
        if named and not _owned(int(named[1]), path):
            remove = partial(shutil.rmtree, path, ignore_errors=True) if path.is_dir() else partial(_unlink, path)
            yield Left(f"{path}: half-written by a process that is gone", remove)


def _owned(pid: int, path: Path) -> bool:
    """Whether the process with this id lives and can have made the file: it did not begin after it."""
    since = began(pid)
    try:
        return since is not None and since <= path.lstat().st_mtime + 2
    except FileNotFoundError:
        return True  # its owner has just renamed it


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _worker(folder: Path, state: Path) -> Iterator[Left]:
    """The resident worker of a SuperNode that is gone; the next SuperNode gets one of its own."""
    node, worker = noted("SuperNode", folder / SUPERNODE), noted("worker", state / PID_FILE)
    if node and worker and not node.alive() and worker.alive():
        yield Left(f"{state}: the worker, process {worker.pid}, of a SuperNode that is gone", partial(end, [worker]))


def _old(job: Path, days: float) -> Iterator[Left]:
    """The states of a job whose last round is so old; its exported model stays."""
    rounds = [path for path in job.glob("round-*") if re.fullmatch(r"round-\d+", path.name) and path.is_dir()]
    answered = [path / "answer.json" for path in rounds if (path / "answer.json").is_file()]
    if not answered:
        return
    age = (time.time() - max(path.stat().st_mtime for path in answered)) / 86400
    if age > days:
        yield Left(f"{job}: states of a job whose last round was {age:.0f} days ago", partial(_drop, job, rounds))


def _drop(job: Path, rounds: list[Path]) -> None:
    write_atomic(job / SWEPT, json.dumps({"removed": time.strftime("%Y-%m-%d")}) + "\n")  # first: it says why
    for path in rounds:
        shutil.rmtree(path, ignore_errors=True)
