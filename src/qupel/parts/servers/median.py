"""The coordinate-wise median: up to half of the clients may send what they like."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qupel.parts.servers.base import Together, servers


@servers.register("median", paper="Yin, Chen, Ramchandran, Bartlett, ICML 2018")
@dataclass(frozen=True)
class Median(Together):
    """w_k = median over clients of w_{i,k}; of an even number the mean of the middle two."""

    def meet(self, uploads: Tensor, w: Tensor) -> Tensor:
        n, ordered = len(uploads), uploads.sort(0).values  # (n, d)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
