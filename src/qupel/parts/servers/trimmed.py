"""The coordinate-wise trimmed mean: a share of the clients at either end may send what they like."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import Columns, ServerState, collect, servers


@servers.register("trimmed", paper="Yin, Chen, Ramchandran, Bartlett, ICML 2018")
@dataclass(frozen=True)
class TrimmedMean:
    """w_k = mean of w_{i,k} over clients, without the least and the largest `trim` n of them, rounded up.

    trim = 0: the mean where all shares are equal. Shares do not count, but a row of share 0 was not sent; of one or two
    clients nobody is left out. All uploads of a round are in memory.
    """

    trim: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim = {self.trim}: allowed is a share from 0 up to below 0.5")

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Columns | None, upload: Upload, share: float) -> Columns:
        return collect(so_far, upload)

    def finish(self, w: Rows, so_far: Columns, state: ServerState) -> tuple[Rows, ServerState]:
        return tuple(self._mean(column) if column else old for column, old in zip(so_far, w, strict=True)), state

    def _mean(self, rows: list[Tensor]) -> Tensor:
        n, ordered = len(rows), torch.stack(rows).sort(0).values  # (n, d)
        cut = min(math.ceil(self.trim * n - 1e-9), (n - 1) // 2)
        return ordered[cut : n - cut].double().mean(0).to(ordered.dtype)
