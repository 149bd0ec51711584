"""The mean of the uploads, weighted by the clients' shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import ServerState, Sum, add, servers


@servers.register("mean", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class Mean:
    """w = sum_i share_i w_i / sum_i share_i."""

    sums: ClassVar[bool] = True

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Sum | None, upload: Upload, share: float) -> Sum:
        return add(so_far, upload, share)

    def finish(self, w: Rows, so_far: Sum, state: ServerState) -> tuple[Rows, ServerState]:
        return so_far.mean(w), state
