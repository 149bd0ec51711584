"""The head of a safetensors file: written compactly, read with distrust.

    8 bytes     length of the head, unsigned, little endian
    head        JSON: {"__metadata__": {string: string}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data        the tensors, C order, little endian, offsets counted from here

What is checked here takes time and memory in proportion to the file, so that a reader can slice the data without fear:
the head is at most 1 MiB and ends inside the file, no name comes twice, every size follows from dtype and shape, and
the tensors lie one after the other and fill the data exactly.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from qupel.util.errors import UserError

LARGEST_HEAD = 1 << 20  # also of our JSON in the metadata of other formats
LONGEST_NAME = 255
MOST_DIMENSIONS = 8
METADATA = "__metadata__"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class FormatError(UserError):
    """A file that is not what docs/format.md describes."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes; exact for any shape, for Python's whole numbers do not overflow."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def dump(value: Any) -> str:
    """Compact JSON; NaN and infinity, which JSON does not know, are refused."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"the description of a model must be plain JSON: {error}") from error


def parse(text: str | bytes, what: str) -> Any:
    """JSON of at most 1 MiB, strictly: no name twice in an object, no NaN, no infinity, names that can be printed."""
    if len(text) > LARGEST_HEAD:
        raise FormatError(f"{what}: {len(text):,} bytes of JSON; allowed are {LARGEST_HEAD:,}")
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON ({str(error)[:80]!r})") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if len(name) > LONGEST_NAME:
            raise FormatError(f"a name of {len(name)} characters, {name[:20]!r}...; allowed are {LONGEST_NAME}")
        if not name.isprintable():
            raise FormatError(f"a name that cannot be printed: {ascii(name)[:80]}")
        if name in table:
            raise FormatError(f"the name {name[:80]!r} comes twice")
        table[name] = value
    return table


def _no_constant(name: str) -> float:
    raise FormatError(f"the number {name}")


def shape_of(value: Any, what: str) -> tuple[int, ...]:
    """A list of at most 8 whole numbers from 0 on, as a tuple."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS or any(type(v) is not int or v < 0 for v in value):
        raise FormatError(f"the shape of {what} is not a list of at most {MOST_DIMENSIONS} whole numbers")
    if math.prod(v or 1 for v in value) >= 2**59:  # numpy cannot even make an empty array of such a shape
        raise FormatError(f"the shape of {what} is absurd")
    return tuple(value)


def write(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """The length and the head; the tensors must follow in the order of the entries.

    The head is padded with blanks so that the data begins at a multiple of 8 bytes; entries whose dtypes go from wide
    to narrow are then all aligned.
    """
    table: dict[str, Any] = {METADATA: metadata}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.size
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    head = dump(table).encode()
    if len(head) > LARGEST_HEAD:
        raise UserError(f"the names and descriptions in this model take {len(head):,} of {LARGEST_HEAD:,} bytes")
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def length(start: bytes, file_size: int) -> int:
    """The length of the head from the first 8 bytes of a file."""
    if len(start) < 8:
        raise FormatError(f"{file_size} bytes: too short for a model file")
    size = int.from_bytes(start[:8], "little")
    if LARGEST_HEAD < size <= file_size - 8:
        raise FormatError(f"its head has {size:,} bytes; allowed are {LARGEST_HEAD:,}")
    if not 2 <= size <= file_size - 8:
        raise FormatError(f"not a safetensors file, or cut short: its head should have {size} bytes of {file_size}")
    return size


def read(head: bytes, data_size: int) -> tuple[list[tuple[Entry, int]], dict[str, str]]:
    """(entry, begin) in the order of the data, and the metadata."""
    table = parse(head, "the head")
    if not isinstance(table, dict):
        raise FormatError("the head is not an object")
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{METADATA} must hold strings")
    found = sorted((_entry(name, fields) for name, fields in table.items()), key=lambda item: item[1:])
    end = 0
    for entry, begin, stop in found:
        if begin != end or stop - begin != entry.size:
            needed = f"{end} to {end + entry.size}"
            raise FormatError(f"{entry.name}: lies at bytes {begin} to {stop} of the data; its shape needs {needed}")
        end = stop
    if end != data_size:
        raise FormatError(f"the tensors take {end} bytes, but the file holds {data_size}")
    return [(entry, begin) for entry, begin, _ in found], metadata


def _entry(name: str, fields: Any) -> tuple[Entry, int, int]:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{name}: must have dtype, shape and data_offsets, and nothing else")
    dtype, offsets = fields["dtype"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{name}: unknown dtype {dtype!r:.40}; allowed: {', '.join(DTYPES)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(v) is not int or v >> 63 for v in offsets):
        raise FormatError(f"{name}: data_offsets must be two whole numbers below 2^63")
    return Entry(name, dtype, shape_of(fields["shape"], name)), offsets[0], offsets[1]
