"""The difference to what the server sent, as float16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qupel.parts.codecs.base import codecs, floats

LARGEST = 65504.0  # of float16; what is beyond stays in the residual


@codecs.register("fp16", paper="Seide, Fu, Droppo, Li, Yu, Interspeech 2014: error feedback")
@dataclass(frozen=True)
class Float16:
    """The difference to the w that came, as float16, with error feedback: 2 bytes a number."""

    def size(self, numbers: int) -> int:
        return 2 * numbers

    def encode(
        self, row: Tensor, sent: Tensor, residual: Tensor | None, rng: np.random.Generator
    ) -> tuple[bytes, Tensor | None]:
        v = row - sent if residual is None else row - sent + residual  # (d,)
        payload = v.clamp(-LARGEST, LARGEST).half().numpy().tobytes()
        return payload, v - self._difference(payload)

    def decode(self, payload: bytes, sent: Tensor) -> Tensor:
        return sent + self._difference(payload)

    def _difference(self, payload: bytes) -> Tensor:
        return floats(payload, torch.float16).to(torch.float32)
