"""What a quantizer is: four small functions in a frozen dataclass.

    start(before, plan, layout)                      -> x, codebook       levels for a model that comes from elsewhere
    gradient(x, codebook, task, batch, clock)        -> descent           what the x step descends on
    settle(y, codebook, descent, task, batch, ...)   -> x, codebook, info    weights and levels after the x step to y
    deployed(x, codebook)                            -> model             what is judged and shipped

Between the second and the third stands the method: it adds its own terms to the gradient and lets its optimizer take
the x step. A client with an empty codebook is trained at full precision by every quantizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qupel.core.codebook import Codebook, Codes, Layer, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.quantize import assign, center_gradient, counts
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.tasks.task import Batch, Task, Tree
from qupel.util.registry import Registry

quantizers: Registry[type[Quantizer]] = Registry("quantizer", "qupel.parts.quantizers")


@dataclass(frozen=True)
class Descent:
    """What was found at x: the gradient for the x step (..., d), which the method may write into; the losses seen on
    the way; and, where the quantizer wants them again after the step, each weight's center and the gradients of the
    levels (..., m), a layer each. said: the network's outputs at x, where they teach what comes (`taught`)."""

    gradient: Tensor
    info: Info
    codes: Codes = ()
    levels: tuple[Tensor, ...] = ()
    said: Tree | None = None


class Quantizer(Protocol):
    """The protocol above."""

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]: ...

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent: ...

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        """y (..., d), the optimizer's step from x, may be written into. eta1: the schedule of x steps."""

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed: ...


quantizers.protocol = Quantizer


def descend_at(x: Tensor, task: Task, batch: Batch) -> Descent:
    """The plain gradient: of f at x."""
    found = task.gradient(x, batch)
    return Descent(found.gradient, Info(loss=found.loss))


def straight_through(x: Tensor, codebook: Codebook, task: Task, batch: Batch) -> Descent:
    """The gradient of f at Q_c(x), for x as it is; without levels that of f at x."""
    if not codebook:
        return descend_at(x, task, batch)
    near = codebook.nearest(x)
    found = task.gradient(near.q, batch)
    return Descent(found.gradient, Info(quantized_loss=found.loss), near.codes)


def nearest_levels(x: Tensor, codebook: Codebook) -> Deployed:
    """Q_c(x): what every quantizer with levels of its own ships."""
    return Deployed(codebook.hard(x), codebook)


def keep_or_place(before: State, plan: Plan, layout: Layout, init: str) -> Codebook:
    """The codebook of the phase before where it is of this plan, else fresh centers."""
    known = before.codebook
    same_kind = bool(known.scales) == getattr(plan, "channels", False)
    if {slot.name: len(c) for slot, c in known} == dict(plan) and same_kind:
        return known
    return start_codebook(layout, before.x, plan, init)


def level_gradients(
    codebook: Codebook, codes: Codes, upstream: Tensor, how: str, clip: float | None = None
) -> tuple[Tensor, ...]:
    """Of f(Q_c(x)) in the centers, straight through: the sum (or the `mean`) of df/dQ (..., d) over a center's weights.
    (..., m) a layer."""
    found = []
    for layer, k in zip(codebook.layers, codes, strict=True):
        m = layer.centers.shape[-1]
        found.append(bounded(center_gradient(layer.pulled(upstream), k, m), k, how, clip))
    return tuple(found)


def bounded(h: Tensor, codes: Tensor, how: str, clip: float | None) -> Tensor:
    """A layer's center gradients h (..., m), sums over their weights, as they are or as means, and clipped."""
    if how == "mean":
        h = h / counts(codes, h.shape[-1]).clamp(min=1)
    return h if clip is None else h.clamp(-clip, clip)


def lloyd(layer: Layer, x: Tensor, codes: Tensor) -> Tensor:
    """One Lloyd step of a layer: every center at the mean of its weights, where it has any; sorted (..., m)."""
    n = counts(codes, layer.centers.shape[-1])  # (..., m)
    means = center_gradient(layer.of(x), codes, layer.centers.shape[-1]) / n.clamp(min=1)
    return torch.where(n > 0, means, layer.centers).sort().values


def best_levels(layer: Layer, x: Tensor) -> Tensor:
    """Toward the levels nearest to a layer. Two: -s, +s with s = mean |x|, at once; more: one Lloyd step. (..., m)."""
    if layer.centers.shape[-1] > 2:
        return lloyd(layer, x, assign(layer.of(x), layer.centers))
    s = layer.of(x).abs().mean(-1)  # (...)
    return torch.stack((-s, s), -1)


def zeros(codebook: Codebook) -> Sequence[Tensor]:
    return [torch.zeros_like(c) for c in codebook.centers]
