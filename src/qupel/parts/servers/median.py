"""The coordinate-wise median: up to half of the clients may send what they like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import ServerState, servers


@servers.register("median", paper="Yin, Chen, Ramchandran, Bartlett, ICML 2018")
@dataclass(frozen=True)
class Median:
    """w_k = median over clients of w_{i,k}; of an even number the mean of the middle two. Shares do not count, and all
    uploads of a round are in memory."""

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: list[Rows] | None, upload: Upload, share: float) -> list[Rows]:
        return [*(so_far or []), tuple(row.clone() for row in upload.rows)]

    def finish(self, w: Rows, so_far: list[Rows], state: ServerState) -> tuple[Rows, ServerState]:
        n = len(so_far)
        ordered = (torch.stack(rows).sort(0).values for rows in zip(*so_far, strict=True))  # each (n, d)
        return tuple((rows[(n - 1) // 2] + rows[n // 2]) / 2 for rows in ordered), state
