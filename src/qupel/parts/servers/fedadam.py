"""The server's step by Adam on the mean difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import ServerState, Sum, add, servers, zeros_like


@servers.register("fedadam", paper="Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, ICLR 2021")
@dataclass(frozen=True)
class FedAdam:
    """With D = mean - w:  m <- beta1 m + (1 - beta1) D,  v <- v's update,  w <- w + rate m / (sqrt(v) + tau).

    `adam`: v <- beta2 v + (1 - beta2) D^2;  `yogi`: v <- v - (1 - beta2) D^2 sign(v - D^2). v starts at tau^2. The
    paper's form has no bias correction.
    """

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    kind: Literal["adam", "yogi"] = "adam"

    def start(self, w: Rows) -> ServerState:
        return (*zeros_like(w), *(torch.full_like(row, self.tau**2) for row in w))

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Sum | None, upload: Upload, share: float) -> Sum:
        return add(so_far, upload, share)

    def finish(self, w: Rows, so_far: Sum, state: ServerState) -> tuple[Rows, ServerState]:
        r, new, first, second = len(w), [], [], []
        for mean, old, m, v in zip(so_far.mean(w), w, state[:r], state[r:], strict=True):
            difference = mean - old
            first.append(self.beta1 * m + (1 - self.beta1) * difference)
            square = difference.square()
            lead = v - square if self.kind == "adam" else square * (v - square).sign()
            second.append(v - (1 - self.beta2) * lead)
            new.append(old + self.rate * first[-1] / (second[-1].sqrt() + self.tau))
        return tuple(new), (*first, *second)
