"""Multi-Krum: only the uploads that lie closest to most others count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.parts.servers.base import Together, servers


@servers.register("krum", paper="Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017")
@dataclass(frozen=True)
class Krum(Together):
    """w = mean of the `keep` uploads with the least  s_i = sum of |w_i - w_j|^2 over the n - f - 2 nearest j.

    f: `bad` n clients, rounded up, may send what they like; n > 2 f + 2 is what its proof needs. keep: None is n - f
    (multi-Krum), 1 Krum itself. Of uploads that score alike the first counts.
    """

    bad: float = 0.3
    keep: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.bad < 0.5:
            raise ValueError(f"bad = {self.bad}: allowed is a share from 0 up to below 0.5")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep = {self.keep}: a whole number from 1 on is needed")

    def meet(self, uploads: Tensor, w: Tensor) -> Tensor:
        n, uploads = len(uploads), uploads.double()
        f = math.ceil(self.bad * n - 1e-9)
        near = max(1, n - f - 2)
        apart = torch.stack([(uploads - row).square().sum(1) for row in uploads])  # (n, n)
        scores = apart.sort(1).values[:, 1 : 1 + near].sum(1)  # (n,); the nearest is itself
        best = scores.nan_to_num(torch.inf).sort(stable=True).indices[: self.keep or n - f]
        return uploads[best.sort().values].mean(0)
