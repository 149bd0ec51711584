"""What the adaptive servers (FedAdam, FedYogi, FedAdagrad) have in common: the paper's Algorithm 2."""

from __future__ import annotations

import torch
from torch import Tensor

from qupel.parts.base import Rows, Upload
from qupel.parts.servers.base import ServerState, Sum, add, zeros_like

PAPER = "Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, ICLR 2021"


class Adaptive:
    """With D = mean - w:  m <- beta1 m + (1 - beta1) D,  v <- second(v, D^2),  w <- w + rate m / (sqrt(v) + tau).

    v starts at tau^2. The paper's form has no bias correction.
    """

    rate: float
    beta1: float
    tau: float

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v."""
        raise NotImplementedError

    def start(self, w: Rows) -> ServerState:
        return (*zeros_like(w), *(torch.full_like(row, self.tau**2) for row in w))

    def send(self, w: Rows, state: ServerState) -> Rows:
        return w

    def add(self, so_far: Sum | None, upload: Upload, share: float) -> Sum:
        return add(so_far, upload, share)

    def finish(self, w: Rows, so_far: Sum, state: ServerState) -> tuple[Rows, ServerState]:
        r, new, first, squares = len(w), [], [], []
        for mean, old, m, v in zip(so_far.mean(w), w, state[:r], state[r:], strict=True):
            difference = mean - old
            first.append(self.beta1 * m + (1 - self.beta1) * difference)
            squares.append(self.second(v, difference.square()))
            new.append(old + self.rate * first[-1] / (squares[-1].sqrt() + self.tau))
        return tuple(new), (*first, *squares)
