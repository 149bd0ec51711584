"""A temporary folder of this process that is known as ours: TMP/qupel-<random>, locked while the process lives.

multiprocessing keeps its sockets in TMP/pymp-<random>, and leaves it there when the process is killed; nobody can say
whose it was. Ours lies in a folder of our name. The lock ends with its process, however that ends and whatever its id
becomes; so who can take the lock of such a folder may remove it.
"""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

PREFIX = "qupel-"
_HELD: dict[Path, int] = {}  # folders of this process, and the open handles that hold their locks


def own_folder() -> Path:
    """This process's folder; it goes when the process ends."""
    if _HELD:
        return next(iter(_HELD))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = _lock(folder)
        if handle is not None:
            _HELD[folder] = handle
            multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)  # not in forks
            return folder


def hold_multiprocessing() -> None:
    """Let multiprocessing, here and in the processes it starts, keep its sockets in this process's folder. What killed
    processes have left goes now."""
    if sys.platform == "win32":  # no such sockets there
        return
    for folder in abandoned():
        remove(folder)
    before, tempfile.tempdir = tempfile.tempdir, str(own_folder())
    try:
        multiprocessing.util.get_temp_dir()  # makes it, once a process
    finally:
        tempfile.tempdir = before


def abandoned() -> list[Path]:
    """Folders of this user's processes that live no more."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        handle = None if folder in _HELD else _lock(folder)
        if handle is not None:
            os.close(handle)
            found.append(folder)
    return found


def remove(folder: Path) -> None:
    """Remove an abandoned folder; one that is not, stays."""
    handle = _lock(folder)
    if handle is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """An open handle that holds the lock of a folder of this user; None if another has it, or it is not there."""
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, there = os.fstat(handle), folder.lstat()  # it may have been removed before we had the lock
        if held.st_uid == os.getuid() and os.path.samestat(held, there):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None
