"""Codes of b bits in a byte string, least significant bit first.

Code k occupies bits k*b .. k*b + b - 1 of the string, where bit i of the string is bit i mod 8 (value 2^(i mod 8)) of
byte i // 8. So eight codes fill exactly b bytes; codes of 3, 5, 6 and 7 bits may straddle two bytes. Bits after the
last code are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK = 1 << 20  # codes handled at a time where the whole layer must not be unpacked; a multiple of 8


def bits_for(levels: int) -> int:
    """Bits of one code: max(1, ceil(log2 m)) for m centers."""
    return max(1, (levels - 1).bit_length())


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes take."""
    return (count * bits + 7) // 8


def pack(codes: Bytes, bits: int) -> Bytes:
    """Codes (n,) below 2^bits -> bytes (ceil(n * bits / 8),)."""
    n = len(codes)
    groups = np.zeros((-(-n // 8), 8), np.uint8)  # eight codes each, the last group padded with zeros
    groups.reshape(-1)[:n] = codes
    words = np.zeros(len(groups), "<u8")  # 8 * bits <= 64 bits each
    for i in range(8):
        words |= groups[:, i].astype("<u8") << np.uint64(bits * i)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)[: packed_size(n, bits)].copy()


def unpack(packed: Bytes, count: int, bits: int) -> Bytes:
    """The inverse of `pack`: bytes -> codes (count,)."""
    groups = -(-count // 8)
    octets = np.zeros((groups, 8), np.uint8)
    whole = len(packed) // bits
    octets[:whole, :bits] = packed[: whole * bits].reshape(whole, bits)
    if whole < groups:  # the last group is cut short
        octets[whole, : len(packed) - whole * bits] = packed[whole * bits :]
    words = octets.view("<u8")[:, 0]  # (groups,)
    codes = np.empty((groups, 8), np.uint8)
    for i in range(8):
        codes[:, i] = (words >> np.uint64(bits * i)) & np.uint64(2**bits - 1)
    return codes.reshape(-1)[:count]


def chunks(packed: Bytes, count: int, bits: int) -> Iterator[Bytes]:
    """The codes, at most 2^20 at a time."""
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        first = start * bits // 8  # a whole byte, for the chunk is a multiple of eight codes
        yield unpack(packed[first : first + packed_size(size, bits)], size, bits)


def padding_is_zero(packed: Bytes, count: int, bits: int) -> bool:
    """Whether the bits after the last code are 0."""
    used = count * bits % 8
    return used == 0 or int(packed[-1]) >> used == 0


@cache
def digits(bits: int) -> Bytes:
    """The codes in every byte, for bits that divide 8: (256, 8 / bits)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8(2**bits - 1)


def decode(packed: Bytes, count: int, centers: Floats) -> Floats:
    """centers[code] of every code (count,): one table look-up a byte where codes do not straddle bytes."""
    bits = bits_for(len(centers))
    if 8 % bits:
        return np.take(centers, unpack(packed, count, bits), out=_aligned(count), mode="clip")
    table = np.zeros(2**bits, np.float32)
    table[: len(centers)] = centers
    dense = _aligned(len(packed) * (8 // bits))
    np.take(table[digits(bits)], packed, axis=0, out=dense.reshape(len(packed), -1), mode="clip")
    return dense[:count]


def _aligned(count: int) -> Floats:
    """Room for numbers that begins where torch's would, at 64 bytes: the last bits of some products depend on it."""
    room = np.empty(count + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + count]
