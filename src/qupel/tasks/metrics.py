"""What a client's model is judged by, beside its loss. A metric is a function (outputs, targets) -> number over all of
a client's test data; one of your own is "module:name"."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qupel.util.registry import Registry

Metric = Callable[[Tensor, Tensor], float | Tensor]

metrics: Registry[Metric] = Registry("metric")


@metrics.register("accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose largest output is their label."""
    return float((outputs.argmax(1) == targets).double().mean())


@metrics.register("top5")
def top5(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose label is among the five largest outputs."""
    best = outputs.topk(min(5, outputs.shape[1]), 1).indices  # (n, 5)
    return float((best == targets.unsqueeze(1)).any(1).double().mean())


@metrics.register("macro_f1")
def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """The mean over the classes present of 2 TP / (2 TP + FP + FN)."""
    said, scores = outputs.argmax(1), []
    for label in targets.unique():
        hit = ((said == label) & (targets == label)).sum()
        scores.append(2 * hit / ((said == label).sum() + (targets == label).sum()))
    return float(torch.stack(scores).double().mean())


@metrics.register("mae")
def mae(outputs: Tensor, targets: Tensor) -> float:
    """The mean absolute error."""
    return float((outputs - targets).abs().double().mean())


@metrics.register("r2")
def r2(outputs: Tensor, targets: Tensor) -> float:
    """1 - (sum of squared errors) / (sum of squared distances from the mean)."""
    spread = (targets - targets.mean(0)).square().sum()
    return float(1 - (outputs - targets).square().sum() / spread)


@metrics.register("perplexity")
def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """exp of the mean cross entropy."""
    return float(torch.nn.functional.cross_entropy(outputs, targets).exp())
