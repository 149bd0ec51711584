"""The paper's quantizer, the heart of Algorithms 1 and 2: weights and centers are trained together, by alternating
proximal steps on f(x) + f(Q~_c(x)) + lambda R(x, c). The formulas live in `core`; here they meet whole models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Nearest, Plan
from qupel.core.layout import Layout
from qupel.core.prox import Pull, prox_centers, prox_weights
from qupel.core.quantize import pick, soft_at, soft_gradient, steepness
from qupel.core.schedule import Clock, Follow, Schedule, Travel, center_pull, weight_pull
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import (
    Descent,
    bounded,
    keep_or_place,
    level_gradients,
    nearest_levels,
    quantizers,
    zeros,
)
from qupel.tasks.task import Batch, Task


@quantizers.register("prox", paper="Ozkara, Singh, Data, Diggavi, 2021")
@dataclass(frozen=True)
class Prox:
    """Learned centers by alternating proximal steps (Algorithm 1, lines 2 to 5).

        g = grad f(x) + grad_x f(Q~_c(x)),   x = prox of eta1 lambda R(., c) at the optimizer's step
        h = grad_c f(Q~_c(x)) at the new x,  c = prox of eta2 lambda_c R(x, .) at c - eta2 h

    lam, lam_c: strength of R on weights and on centers (None: the same lambda for both, as in the paper).
    mode: `hard` takes grad_x f(Q_c(x)) as 0 and passes df/dQ straight to the centers; `soft` differentiates Q~.
    center_gradient: a center's gradient is the `sum` (the paper) or the `mean` over its weights.
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
    center_gradient: Literal["sum", "mean"] = "sum"
    clip: float | None = None
    carry: bool = False
    init: Literal["paper", "range", "kmeans", "quantile"] = "paper"

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return before.x, keep_or_place(before, plan, layout, self.init)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        """grad f(x) + grad_x f(Q~_c(x)); the second term is taken as 0 in hard mode."""
        found = task.gradient(x, batch)
        if self.mode == "hard" or not codebook:
            return Descent(found.gradient, Info(loss=found.loss))
        at_q = task.gradient(self.quantized(x, codebook), batch)
        upstream = at_q.gradient
        for layer in codebook.layers:
            part, _ = soft_gradient(layer.of(x), layer.centers, self.steepness(layer.centers), layer.pulled(upstream))
            layer.put_gradient(upstream, part)
        return Descent(found.gradient + upstream, Info(loss=found.loss, quantized_loss=at_q.loss))

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        x, near = self.prox_weights(y, codebook, eta1, clock)
        h, info = self.center_gradients(x, codebook, near, task, batch, clock, descent.info)
        x, codebook = self.prox_centers(x, codebook, near, h, eta1, clock)
        return x, codebook, info

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return nearest_levels(x, codebook)

    # --- its parts ---

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
        return codebook.map(x, lambda u, c: soft_at(u, c, self.steepness(c)))

    def prox_weights(self, y: Tensor, codebook: Codebook, eta1: Schedule, clock: Clock) -> tuple[Tensor, Nearest]:
        """prox of eta1 lambda R(., c) at y, written into y, and each weight's center, which it never leaves."""
        near = codebook.nearest(y)
        for layer in codebook.layers:
            u, t = layer.of(y), weight_pull(self.lam, eta1, clock, layer.centers)
            prox_weights(u, layer.centers, t, q=layer.of(near.q), out=u)
            if codebook.scales:
                layer.put(y, u)
        return y, near

    def center_gradients(
        self, x: Tensor, codebook: Codebook, near: Nearest, task: Task, batch: Batch, clock: Clock, info: Info
    ) -> tuple[Sequence[Tensor], Info]:
        """h = grad_c f(Q~_c(x)), (..., m) a layer. No pass is made where no center could move."""
        if not codebook or self.eta2(clock.time) == 0:
            return zeros(codebook), info
        q = near.q if self.mode == "hard" else self.quantized(x, codebook)
        found = task.gradient(q, batch, codebook.slots)
        info = replace(info, quantized_loss=found.loss)
        if self.mode == "hard":
            return level_gradients(codebook, near.codes, found.gradient, self.center_gradient, self.clip), info
        h = []
        for layer, k in zip(codebook.layers, near.codes, strict=True):
            c = layer.centers
            _, soft = soft_gradient(layer.of(x), c, self.steepness(c), layer.pulled(found.gradient))
            h.append(bounded(soft, k, self.center_gradient, self.clip))
        return h, info

    def prox_centers(
        self, x: Tensor, codebook: Codebook, near: Nearest, h: Sequence[Tensor], eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook]:
        """prox of eta2 lambda_c R(x, .) at c - eta2 h. x changes only where `carry` moves weights with their center."""
        eta2, moved = self.eta2(clock.time), []
        for layer, k, h_layer in zip(codebook.layers, near.codes, h, strict=True):
            c, u = layer.centers, layer.of(x)  # (..., m), (..., n)
            if self.lam_c is None:
                t = eta2 * self.strength(c, eta1, clock)
            else:
                t = center_pull(self.lam_c, self.eta2, clock, c, layer.slot.size)
            on = u == layer.of(near.q) if self.carry else None  # (..., n)
            new = prox_centers(c - eta2 * h_layer, c, u, t, self.rule, codes=k, without=on)
            if on is not None:
                layer.put(x, torch.where(on, pick(new, k), u))
            moved.append(new)
        return x, codebook.with_centers(moved)
