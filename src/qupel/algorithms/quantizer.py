"""The quantization half of Algorithms 1 and 2 on whole models: settings, gradients and proximal steps, layer by layer.

The formulas themselves live in `quantize` and `prox`; here they are applied to every layer of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qupel.algorithms.base import Batch, Gradient
from qupel.codebook import Codebook, Nearest, Plan, start_codebook
from qupel.flat import Layout
from qupel.prox import Pull, prox_centers, prox_weights
from qupel.quantize import center_gradient, counts, pick, soft_at, soft_gradient, steepness
from qupel.schedule import Clock, Follow, Schedule, Travel, center_pull, weight_pull


@dataclass(frozen=True)
class Quantizer:
    """How weights and centers learn to meet.

    lam, lam_c: strength of R on weights and on centers (None: the same lambda for both, as in the paper).
    mode: `hard` takes grad_x f(Q_c(x)) as 0 and passes df/dQ straight to the centers; `soft` differentiates Q~.
    gradient: a center's gradient is the `sum` (the paper) or the `mean` over its weights.
    carry: weights that sit exactly on a center move along with it.
    P: steepness of the soft quantizer whatever its centers, as the theorems want it; None: it follows from sharpness.
    """

    eta2: Schedule = Schedule(1e-4)
    lam: Schedule | Travel = Travel(1.0)
    lam_c: Schedule | Follow | None = None
    mode: Literal["hard", "soft"] = "hard"
    sharpness: float = 8.0
    P: float | None = None
    rule: Literal["exact", "first_order", "paper"] = "exact"
    gradient: Literal["sum", "mean"] = "sum"
    clip: float | None = None
    carry: bool = False
    init: Literal["paper", "range", "kmeans", "quantile"] = "paper"

    def start(self, before: Codebook, x: Tensor, plan: Plan, layout: Layout) -> Codebook:
        """The codebook of the phase before where it has the same layers and sizes, else fresh centers."""
        if {slot.name: len(c) for slot, c in before} == dict(plan):
            return before
        return start_codebook(layout, x, plan, self.init)

    def steepness(self, c: Tensor) -> Tensor | float:
        """P of a layer with centers c."""
        return steepness(c, self.sharpness) if self.P is None else self.P

    def strength(self, c: Tensor, eta1: Schedule, clock: Clock) -> Pull:
        """lambda of a layer with centers c."""
        return weight_pull(self.lam, eta1, clock, c) / max(eta1(clock.time), 1e-30)

    def quantized(self, x: Tensor, codebook: Codebook) -> Tensor:
        """What f(Q(x)) is taken of: Q_c(x) in hard mode, Q~_c(x) in soft mode (..., d)."""
        if self.mode == "hard":
            return codebook.hard(x)
        return codebook.map(x, lambda v, c: soft_at(v, c, self.steepness(c)))

    def add_weight_gradient(self, g: Tensor, gradient: Gradient, x: Tensor, codebook: Codebook, batch: Batch) -> Tensor:
        """g + grad_x f(Q~_c(x)); the second term is taken as 0 in hard mode."""
        if self.mode == "hard" or not codebook:
            return g
        upstream = gradient(self.quantized(x, codebook), batch, None, "quantized")
        for slot, c in codebook:
            part = upstream[..., slot.slice]  # (..., n)
            part[...], _ = soft_gradient(x[..., slot.slice], c, self.steepness(c), part)
        return g + upstream

    def prox_weights(self, y: Tensor, codebook: Codebook, eta1: Schedule, clock: Clock) -> tuple[Tensor, Nearest]:
        """prox of eta1 lambda R(., c) at y, written into y, and each weight's center, which it never leaves."""
        near = codebook.nearest(y)
        for slot, c in codebook:
            t, v = weight_pull(self.lam, eta1, clock, c), y[..., slot.slice]
            prox_weights(v, c, t, q=near.q[..., slot.slice], out=v)
        return y, near

    def center_gradient(
        self, gradient: Gradient, x: Tensor, codebook: Codebook, near: Nearest, batch: Batch, clock: Clock
    ) -> Sequence[Tensor]:
        """h = grad_c f(Q~_c(x)), (..., m) a layer. No pass is made where no center could move."""
        if not codebook or self.eta2(clock.time) == 0:
            return [torch.zeros_like(c) for c in codebook.centers]
        q = near.q if self.mode == "hard" else self.quantized(x, codebook)
        upstream = gradient(q, batch, codebook.slots, "quantized")
        return [
            self._center_gradient(x[..., slot.slice], c, k, upstream[..., slot.slice])
            for (slot, c), k in zip(codebook, near.codes, strict=True)
        ]

    def _center_gradient(self, x: Tensor, c: Tensor, codes: Tensor, upstream: Tensor) -> Tensor:
        if self.mode == "hard":
            h = center_gradient(upstream, codes, c.shape[-1])
        else:
            _, h = soft_gradient(x, c, self.steepness(c), upstream)
        if self.gradient == "mean":
            h = h / counts(codes, c.shape[-1]).clamp(min=1)
        return h if self.clip is None else h.clamp(-self.clip, self.clip)

    def prox_centers(
        self, x: Tensor, codebook: Codebook, near: Nearest, h: Sequence[Tensor], eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook]:
        """prox of eta2 lambda_c R(x, .) at c - eta2 h. x changes only where `carry` moves weights with their center."""
        eta2, moved = self.eta2(clock.time), []
        for (slot, c), k, h_layer in zip(codebook, near.codes, h, strict=True):
            if self.lam_c is None:
                t = eta2 * self.strength(c, eta1, clock)
            else:
                t = center_pull(self.lam_c, self.eta2, clock, c, slot.size)
            mu, v = c - eta2 * h_layer, x[..., slot.slice]  # (..., m), (..., n)
            on = v == near.q[..., slot.slice] if self.carry else None  # (..., n)
            new = prox_centers(mu, c, v, t, self.rule, codes=k, without=on)
            if on is not None:
                x[..., slot.slice] = torch.where(on, pick(new, k), v)
            moved.append(new)
        return x, codebook.with_centers(moved)
