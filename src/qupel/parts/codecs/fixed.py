"""The difference to what the server sent, as integers of a public scale: what secure aggregation adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qupel.parts.codecs.base import codecs

Integers = npt.NDArray[np.int64]


@codecs.register("fixed", paper="Bonawitz et al., CCS 2017: integers that can be masked; unbiased rounding as in int8")
@dataclass(frozen=True)
class Fixed:
    """The difference v to the w that came, within +-clip, as integers of 16 or 32 bits, with error feedback.

    One public step s = clip / (2^(bits-1) - 1) for all, then q = floor(v / s + u) with u uniform in [0, 1): E[q s] = v.
    Sums of q over clients are exact. What is beyond the clip stays for the next upload.
    """

    clip: float = 1.0
    bits: Literal[16, 32] = 16

    def __post_init__(self) -> None:
        if not 0 < self.clip < 1e30:
            raise ValueError(f"clip = {self.clip}: a number above 0 is needed")
        if self.bits not in (16, 32):
            raise ValueError(f"bits = {self.bits}: allowed are 16 and 32")

    @property
    def most(self) -> int:
        """The largest integer; the smallest is -most."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def step(self) -> float:
        return self.clip / self.most

    def size(self, numbers: int) -> int:
        return numbers * self.bits // 8

    def encode(
        self, row: Tensor, sent: Tensor, residual: Tensor | None, rng: np.random.Generator
    ) -> tuple[bytes, Tensor | None]:
        v = row - sent if residual is None else row - sent + residual  # (d,)
        scaled = v.numpy().astype(np.float64).clip(-self.clip, self.clip) / self.step
        q = np.floor(scaled + rng.random(len(v))).clip(-self.most, self.most)
        payload = q.astype(f"<i{self.bits // 8}").tobytes()
        return payload, v - self._difference(payload)

    def decode(self, payload: bytes, sent: Tensor) -> Tensor:
        return sent + self._difference(payload)

    def integers(self, payload: bytes) -> Integers:
        return np.frombuffer(payload, f"<i{self.bits // 8}").astype(np.int64)

    def _difference(self, payload: bytes) -> Tensor:
        return torch.from_numpy((self.integers(payload) * self.step).astype(np.float32))
