"""The coordinate-wise median: up to half of the clients may send what they like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import Columns, ServerState, collect, servers


@servers.register("median", paper="Yin, Chen, Ramchandran, Bartlett, ICML 2018")
@dataclass(frozen=True)
class Median:
    """w_k = median over clients of w_{i,k}; of an even number the mean of the middle two.

    Shares do not count, but a row of share 0 was not sent. All uploads of a round are in memory.
    """

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Columns | None, upload: Upload, share: float) -> Columns:
        return collect(so_far, upload)

    def finish(self, w: Rows, so_far: Columns, state: ServerState) -> tuple[Rows, ServerState]:
        return tuple(_median(column) if column else old for column, old in zip(so_far, w, strict=True)), state


def _median(rows: list[Tensor]) -> Tensor:
    n, ordered = len(rows), torch.stack(rows).sort(0).values  # (n, d)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
