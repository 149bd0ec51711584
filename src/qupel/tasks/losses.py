"""Losses by name. Any function (outputs, targets) -> mean loss over the batch works in their place; where samples are
weighted it gets their weights, too: (outputs, targets, weights)."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from qupel.tasks.task import Loss
from qupel.util.errors import UserError
from qupel.util.registry import Registry

losses: Registry[Loss] = Registry("loss")
losses.register("cross_entropy", about="class labels (n,), outputs (n, classes)")(F.cross_entropy)


@losses.register("mse", about="mean squared error of numbers")
def mse(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.mse_loss(outputs, targets.to(outputs.dtype), reduction=reduction)


@losses.register("mae", about="mean absolute error of numbers")
def mae(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.l1_loss(outputs, targets.to(outputs.dtype), reduction=reduction)


@losses.register("huber", about="squared near 0, absolute beyond 1")
def huber(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.huber_loss(outputs, targets.to(outputs.dtype), reduction=reduction)


@losses.register("bce", about="several yes-or-no labels, 0 or 1; outputs are logits")
def bce(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction=reduction)


_REDUCED = {F.cross_entropy, F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits}
_REDUCED |= {mse, mae, huber, bce, F.nll_loss, F.binary_cross_entropy}


def weighted_mean(loss: Any, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over samples of weight x loss. Weights of 1, or none, give the plain mean; those with a mean of 1 keep
    the size of a step."""
    if weights is None:
        return loss(outputs, targets)
    each = loss(outputs, targets, reduction="none")  # (n, ...)
    return (each * weights.view(-1, *[1] * (each.ndim - 1))).mean()


def with_weights(loss: Loss) -> Loss:
    """The form of a loss that takes (outputs, targets, weights), weights (n,)."""
    if isinstance(loss, partial) and loss.func is weighted_mean:
        return loss
    if loss in _REDUCED:
        return partial(weighted_mean, loss)
    try:
        inspect.signature(loss).bind(None, None, None)
    except TypeError:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UserError(
            f"samples have weights, but the loss {name} takes (outputs, targets) only; needed is a third argument, "
            "the weights (n,)"
        ) from None
    except ValueError:  # a builtin that tells no signature
        pass
    return loss
