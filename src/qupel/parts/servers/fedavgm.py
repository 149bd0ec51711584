"""Server momentum: rounds are steps, and their direction is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import ServerState, Sum, add, servers, zeros_like


@servers.register("fedavgm", paper="Hsu, Qi, Brown, 2019")
@dataclass(frozen=True)
class FedAvgM:
    """v <- momentum v + (mean - w),  w <- w + rate v.  momentum = 0, rate = 1: the mean.

    nesterov: clients start from w + momentum v, where w is going, and v <- momentum v + (mean - that).
    """

    momentum: float = 0.9
    rate: float = 1.0
    nesterov: bool = False

    sums: ClassVar[bool] = True

    def start(self, w: Rows) -> ServerState:
        return zeros_like(w)

    def send(self, w: Rows, state: ServerState) -> Rows:
        return tuple(a + self.momentum * v for a, v in zip(w, state, strict=True)) if self.nesterov else w

    def add(self, so_far: Sum | None, upload: Upload, share: float) -> Sum:
        return add(so_far, upload, share)

    def finish(self, w: Rows, so_far: Sum, state: ServerState) -> tuple[Rows, ServerState]:
        sent = self.send(w, state)
        found = zip(so_far.mean(sent), sent, state, strict=True)
        v = tuple(self.momentum * v + (mean - a) for mean, a, v in found)
        return tuple(a + self.rate * step for a, step in zip(w, v, strict=True)), v
