"""The server's step by Adagrad on the mean difference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qupel.parts.servers.base import Adaptive, servers


@servers.register("fedadagrad", paper="Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, ICLR 2021")
@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """w <- w + rate m / (sqrt(v) + tau):  m averages D = mean - w by beta1,  v <- v + D^2."""

    rate: float = 0.03
    beta1: float = 0.0
    tau: float = 1e-3

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
