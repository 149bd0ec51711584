"""A log that can only grow: a line of JSON an entry, each with a hash of itself and of all before it.

    {"entry": {...}, "hash": sha256(hash before | entry)}

A line is on disk when `append` returns. What was being written when the machine went down is cut off by the next entry;
any other change, a missing line included, breaks the chain. Whoever kept the last hash sees a missing end, too.
Nothing but the standard library and `util`: also a SuperNode appends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qupel.util.errors import UserError
from qupel.util.files import Damaged, sync_folder

START = "0" * 64
_TAIL = 2**16  # bytes at the end in which the last line is looked for, at first


@dataclass(frozen=True)
class Line:
    entry: dict[str, Any]
    hash: str


def linked(before: str, entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{before}\n{json.dumps(entry, sort_keys=True)}".encode()).hexdigest()


def append(path: Path, entry: Mapping[str, Any]) -> str:
    """One entry more; its hash. Several processes may append."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before, end = _last(handle, path)
        link = linked(before, plain := json.loads(json.dumps(dict(entry))))
        os.ftruncate(handle, end)
        line = (json.dumps({"entry": plain, "hash": link}) + "\n").encode()
        if os.pwrite(handle, line, end) != len(line):
            raise OSError(f"{path}: no room")
        os.fsync(handle)
    finally:
        os.close(handle)
    if new:
        sync_folder(path.parent)
    return link


def _last(handle: int, path: Path) -> tuple[str, int]:
    """(hash of the last whole line, where it ends)."""
    size, reach = os.fstat(handle).st_size, _TAIL
    while True:
        start = max(0, size - reach)
        text = os.pread(handle, size - start, start)
        whole = text[: text.rfind(b"\n") + 1]
        at = whole.rfind(b"\n", 0, -1) + 1  # of the last line
        if at or not start:
            break
        reach *= 4
    if not whole:
        return START, 0
    return parsed(whole[at:-1], path).hash, start + len(whole)


def parsed(text: bytes, path: Path) -> Line:
    try:
        raw = json.loads(text)
        line = Line(raw["entry"], raw["hash"])
        if set(raw) != {"entry", "hash"} or not isinstance(line.entry, dict) or len(line.hash) != 64:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{path} is damaged: {text[:60].decode(errors='replace')!r} is no line of a log") from None
    return line


def read(path: Path) -> Iterator[Line]:
    """Every line, checked; raises `Damaged` at the first that is not what was written. A last line without an end, of
    a machine that went down, does not count."""
    before = START
    try:
        file = path.open("rb")
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    with file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            line = parsed(text[:-1], path)
            if line.hash != linked(before, line.entry):
                raise Damaged(f"{path}, line {number}: it, or one before it, was changed after it was written")
            before = line.hash
            yield line
