"""Files that are never half-written: a temporary name, flushed to disk, renamed. Files that a run is resumed from are
sealed: they carry a checksum, and one that was damaged since is not believed. A folder is one process's at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qupel.util.errors import UserError, warn

SEAL = "checksum"
LOCK = "lock"


class Damaged(UserError):
    """A file is not what was written."""


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise OSError(e.errno, e.strerror, str(path)) from None  # a write that fails does not say where
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """A table as JSON with a checksum of its content and its file's name: a copy under another name is damaged, too."""
    write_json(path, {**value, SEAL: _seal(path, value)})


def _seal(path: Path, value: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(value))  # as it will be read: keys are strings
    return hashlib.sha256(f"{path.name}\n{json.dumps(plain, sort_keys=True)}".encode()).hexdigest()


def read_json(path: Path, sealed: bool = False) -> Any:
    """What a JSON file holds, without its checksum; `sealed`: one that carries none (older versions wrote such) is not
    believed. Raises `Damaged` where it is no JSON or not what was written."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        raise Damaged(f"{path} is damaged: not JSON") from None
    seal = value.pop(SEAL, None) if isinstance(value, dict) else None
    if seal is None and not sealed:
        return value
    if not isinstance(value, dict) or seal != _seal(path, value):
        raise Damaged(f"{path} is damaged: its checksum is wrong")
    return value


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """name -> sha256 of these files of a folder."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def check_files(folder: Path, expected: dict[str, str]) -> None:
    """Raise `Damaged` unless these files of a folder are what they were."""
    for name, known in expected.items():
        if not (folder / name).is_file():
            raise Damaged(f"{folder / name} is missing")
        if checksums(folder, [name])[name] != known:
            raise Damaged(f"{folder / name} is damaged: its checksum is wrong")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have a folder for this process alone. The lock ends with the process, however that ends; over NFS it holds
    between hosts where the server grants locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            raise UserError(f"{folder} is in use by {holder}; wait for it, or give another folder") from None
        except OSError as e:
            warn(f"{folder} cannot be locked ({e.strerror}): see to it that no other process uses it")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder that is complete or absent: filled under another name by the body, which flushes its files, renamed."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
