"""The coordinate-wise trimmed mean: a share of the clients at either end may send what they like."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qupel.parts.servers.base import Together, servers


@servers.register("trimmed", paper="Yin, Chen, Ramchandran, Bartlett, ICML 2018")
@dataclass(frozen=True)
class TrimmedMean(Together):
    """w_k = mean of w_{i,k} over clients, without the least and the largest `trim` n of them, rounded up.

    trim = 0: the mean where all shares are equal. Of one or two clients nobody is left out.
    """

    trim: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim = {self.trim}: allowed is a share from 0 up to below 0.5")

    def meet(self, uploads: Tensor, w: Tensor) -> Tensor:
        n, ordered = len(uploads), uploads.sort(0).values  # (n, d)
        cut = min(math.ceil(self.trim * n - 1e-9), (n - 1) // 2)
        return ordered[cut : n - cut].double().mean(0)
