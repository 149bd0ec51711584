"""No client moves the shared model farther than a bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import Columns, ServerState, collect, servers


@servers.register("normbound", paper="Sun, Kairouz, Suresh, McMahan, 2019")
@dataclass(frozen=True)
class NormBound:
    """w <- w + mean of D_i min(1, bound / |D_i|) with D_i = w_i - w.

    bound: a length; None: the median of the round's |D_i|, so that up to half of the clients may send what they like.
    Shares do not count, but a row of share 0 was not sent. All uploads of a round are in memory.
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and not self.bound > 0:
            raise ValueError(f"bound = {self.bound}: a length above 0 is needed")

    def start(self, w: Rows) -> ServerState:
        return ()

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Columns | None, upload: Upload, share: float) -> Columns:
        return collect(so_far, upload)

    def finish(self, w: Rows, so_far: Columns, state: ServerState) -> tuple[Rows, ServerState]:
        return tuple(self._moved(old, column) if column else old for column, old in zip(so_far, w, strict=True)), state

    def _moved(self, w: Tensor, rows: list[Tensor]) -> Tensor:
        away = torch.stack(rows).double() - w  # (n, d)
        length = away.norm(dim=1, keepdim=True)  # (n, 1)
        bound = length.quantile(0.5) if self.bound is None else self.bound
        return (w + (away * (bound / length.clamp(min=1e-300)).clamp(max=1)).mean(0)).to(w.dtype)
