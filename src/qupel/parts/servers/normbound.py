"""No client moves the shared model farther than a bound."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qupel.parts.servers.base import Together, servers


@servers.register("normbound", paper="Sun, Kairouz, Suresh, McMahan, 2019")
@dataclass(frozen=True)
class NormBound(Together):
    """w <- w + mean of D_i min(1, bound / |D_i|) with D_i = w_i - w.

    bound: a length; None: the median of the round's |D_i|, so that up to half of the clients may send what they like.
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and not self.bound > 0:
            raise ValueError(f"bound = {self.bound}: a length above 0 is needed")

    def meet(self, uploads: Tensor, w: Tensor) -> Tensor:
        away = uploads.double() - w  # (n, d)
        length = away.norm(dim=1, keepdim=True)  # (n, 1)
        bound = length.quantile(0.5) if self.bound is None else self.bound
        return w + (away * (bound / length.clamp(min=1e-300)).clamp(max=1)).mean(0)
