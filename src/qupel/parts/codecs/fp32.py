"""The vector itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from qupel.parts.codecs.base import codecs, floats


@codecs.register("fp32")
@dataclass(frozen=True)
class Float32:
    """The vector itself, bit for bit: 4 bytes a number."""

    def size(self, numbers: int) -> int:
        return 4 * numbers

    def encode(
        self, row: Tensor, sent: Tensor, residual: Tensor | None, rng: np.random.Generator
    ) -> tuple[bytes, Tensor | None]:
        return row.contiguous().numpy().tobytes(), None

    def decode(self, payload: bytes, sent: Tensor) -> Tensor:
        return floats(payload)
