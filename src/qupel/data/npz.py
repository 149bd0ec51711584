"""`.npz` files read with distrust: only the arrays that are needed, only once their headers have told a sound size."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from qupel.util.errors import UserError

_FREE, _RATIO = 512 << 20, 100  # bytes that arrays may take; a larger file may unfold to 100 times its size
_SUFFIX = ".npy"


def read(path: Path, wanted: Callable[[list[str]], Sequence[str]]) -> dict[str, np.ndarray]:
    """The arrays that `wanted` chooses of the names in the file; nothing is unpickled."""
    try:
        with path.open("rb") as stream:
            if stream.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                raise UserError("a single array; a .npz file is needed")
            file_size = os.fstat(stream.fileno()).st_size
            with zipfile.ZipFile(stream) as archive:
                members = {info.filename.removesuffix(_SUFFIX): info for info in archive.infolist()}
                chosen = list(wanted(list(members)))
                total = 0
                for name in chosen:
                    total += _size(archive, members[name])
                    if total > (most := max(_FREE, _RATIO * file_size)):
                        raise UserError(f"{file_size:,} bytes that unfold to {total:,} or more; allowed are {most:,}")
                return {name: _array(archive, members[name]) for name in chosen}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path}: not a readable .npz file of plain numbers ({line})") from None


def _size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Bytes that an array takes by its header, as float32 at least, which it may become."""
    with archive.open(member) as stream:
        shape, dtype = _header(stream)
        begin = stream.tell()
    count = math.prod(shape)
    if dtype.hasobject:
        raise ValueError(f"{member.filename}: objects, which would have to be unpickled")
    if min(shape, default=0) < 0 or member.file_size != begin + count * dtype.itemsize:
        raise ValueError(f"{member.filename}: {member.file_size} bytes, which is not what its header tells")
    return count * max(4, dtype.itemsize)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"format version {version}")
    reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = reader(stream)
    return shape, dtype


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as stream:
        array: np.ndarray = npy.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError(f"{member.filename}: more bytes than its header tells")
        return array
