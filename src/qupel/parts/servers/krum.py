"""Multi-Krum: only the uploads that lie closest to most others count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import Columns, ServerState, collect, servers


@servers.register("krum", paper="Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017")
@dataclass(frozen=True)
class Krum:
    """w = mean of the `keep` uploads with the least  s_i = sum of |w_i - w_j|^2 over the n - f - 2 nearest j.

    f: `bad` n clients, rounded up, may send what they like; n > 2 f + 2 is what its proof needs. keep: None is n - f
    (multi-Krum), 1 Krum itself. Of uploads that score alike the first counts. Shares do not count, but a row of share 0
    was not sent. All uploads of a round are in memory.
    """

    bad: float = 0.3
    keep: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.bad < 0.5:
            raise ValueError(f"bad = {self.bad}: allowed is a share from 0 up to below 0.5")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep = {self.keep}: a whole number from 1 on is needed")

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Columns | None, upload: Upload, share: float) -> Columns:
        return collect(so_far, upload)

    def finish(self, w: Rows, so_far: Columns, state: ServerState) -> tuple[Rows, ServerState]:
        return tuple(self._mean(column) if column else old for column, old in zip(so_far, w, strict=True)), state

    def _mean(self, rows: list[Tensor]) -> Tensor:
        n, all_rows = len(rows), torch.stack(rows).double()  # (n, d)
        f = math.ceil(self.bad * n - 1e-9)
        near = max(1, n - f - 2)
        apart = torch.stack([(all_rows - row).square().sum(1) for row in all_rows])  # (n, n)
        scores = apart.sort(1).values[:, 1 : 1 + near].sum(1)  # (n,); the nearest is itself
        best = scores.nan_to_num(torch.inf).sort(stable=True).indices[: self.keep or n - f]
        return all_rows[best.sort().values].mean(0).to(rows[0].dtype)
