"""The server's step by Yogi on the mean difference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qupel.parts.servers.base import Adaptive, servers


@servers.register("fedyogi", paper="Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, ICLR 2021")
@dataclass(frozen=True)
class FedYogi(Adaptive):
    """w <- w + rate m / (sqrt(v) + tau):  m averages D = mean - w by beta1,  v <- v - (1 - beta2) D^2 sign(v - D^2)."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
