"""The difference to what the server sent, in 8 bits a number, rounded without bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qupel.parts.codecs.base import codecs

BLOCK = 256  # numbers that share a scale: 1.6 % more bytes


@codecs.register("int8", paper="Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017: unbiased rounding")
@dataclass(frozen=True)
class Int8:
    """The difference to the w that came in blocks of 256, with error feedback: 1.02 bytes a number.

    One float32 scale s = max |v| / 127 a block, then q = floor(v / s + u) with u uniform in [0, 1): E[q s] = v.
    """

    def size(self, numbers: int) -> int:
        return numbers + 4 * -(-numbers // BLOCK)

    def encode(
        self, row: Tensor, sent: Tensor, residual: Tensor | None, rng: np.random.Generator
    ) -> tuple[bytes, Tensor | None]:
        v = row - sent if residual is None else row - sent + residual  # (d,)
        blocks = np.pad(v.numpy(), (0, -len(v) % BLOCK)).reshape(-1, BLOCK)  # (blocks, 256)
        # (blocks,); a little more, so that |v| / s <= 127
        scales = np.nextafter(np.abs(blocks).max(1) / np.float32(127), np.float32(np.inf))
        codes = np.floor(blocks / scales.astype(np.float64)[:, None] + rng.random(blocks.shape)).astype(np.int8)
        payload = scales.tobytes() + codes.reshape(-1)[: len(v)].tobytes()
        return payload, v - self._difference(payload, len(v))

    def decode(self, payload: bytes, sent: Tensor) -> Tensor:
        return sent + self._difference(payload, len(sent))

    def _difference(self, payload: bytes, size: int) -> Tensor:
        cut = 4 * -(-size // BLOCK)
        scales = np.frombuffer(payload[:cut], np.float32)  # (blocks,)
        codes = np.frombuffer(payload[cut:], np.int8)  # (d,)
        return torch.from_numpy(codes * np.repeat(scales, BLOCK)[:size])
