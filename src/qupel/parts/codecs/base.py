"""What a codec is: an upload's row as bytes and back, for a server that knows what it sent.

    size(d)                                -> bytes of a row of d numbers
    encode(row, sent, residual, rng)       -> bytes, what they leave for the next upload (None: nothing)
    decode(payload, sent)                  -> the row as the server takes it

Error feedback (Seide et al., 2014): what rounding took away is kept at the client and added to its next upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qupel.parts.base import Rows
from qupel.util.errors import UserError
from qupel.util.registry import Registry

codecs: Registry[type[Codec]] = Registry("codec", "qupel.parts.codecs")


class Codec(Protocol):
    """The protocol above; rows are (d,)."""

    def size(self, numbers: int) -> int: ...

    def encode(
        self, row: Tensor, sent: Tensor, residual: Tensor | None, rng: np.random.Generator
    ) -> tuple[bytes, Tensor | None]: ...

    def decode(self, payload: bytes, sent: Tensor) -> Tensor: ...


codecs.protocol = Codec


def encode_rows(
    codec: Codec, rows: Rows, sent: Rows, residuals: Sequence[Tensor], rng: np.random.Generator
) -> tuple[bytes, Rows]:
    """All rows of an upload one after the other, and what they leave."""
    before: Sequence[Tensor | None] = residuals or [None] * len(rows)
    made = [codec.encode(row, w, left, rng) for row, w, left in zip(rows, sent, before, strict=True)]
    return b"".join(payload for payload, _ in made), tuple(left for _, left in made if left is not None)


def decode_rows(codec: Codec, payload: bytes, sent: Rows) -> Rows:
    """The rows of an upload to a server that sent these; as many of them."""
    each = codec.size(len(sent[0]))
    if len(payload) != each * len(sent):
        wanted = f"{len(sent)} x {len(sent[0])} numbers take {each * len(sent)}"
        raise UserError(f"upload has {len(payload)} bytes; {wanted}")
    return tuple(codec.decode(payload[k * each : (k + 1) * each], row) for k, row in enumerate(sent))


def floats(payload: bytes, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=dtype)
