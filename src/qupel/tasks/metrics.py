"""What a client's model is judged by, beside its loss.

A metric is a function (outputs, targets) -> number over all of a client's test data, or an object (or its class) with
update(outputs, targets), compute() and reset() as torchmetrics has them, which needs no outputs kept. One of your own
is "module:name". A 1-D tensor or a dict is several numbers: `per_class_accuracy.3`. NaN: not defined for this client.
`higher_is_better = False` on a metric says that less is better; `percent = True` that it is a share, shown in percent.

Class labels are int64, with outputs (n, C, ...) and targets (n, ...) as cross entropy takes them, -100 left out;
outputs as large as their targets are logits of as many yes or no questions, or numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qupel.util.registry import Registry

Metric = Callable[..., Any]  # a function, or what `is_streaming`
IGNORED = -100  # cross entropy's: a target that counts nowhere
M = TypeVar("M", bound=Metric)


class Metrics(Registry[Metric]):
    """Metrics by name; top2, top3 and so on need no entry of their own."""

    def __getitem__(self, name: str) -> Metric:
        if name not in self and re.fullmatch(r"top[1-9]\d*", name):
            return TopK(int(name[3:]))
        return super().__getitem__(name)


metrics = Metrics("metric")


@dataclass(frozen=True)
class Kind:
    """How the numbers of a metric are read."""

    name: str
    higher: bool = True  # more is better
    percent: bool = False  # a share of 1, shown in percent
    vector: str = ""  # the metric that it is an entry of, where that gives several numbers


ACCURACY, LOSS = Kind("accuracy", percent=True), Kind("loss", higher=False)


def kind_of(name: str, metric: Metric) -> Kind:
    higher = getattr(metric, "higher_is_better", None)  # torchmetrics says None where it does not know
    return Kind(name, higher is None or bool(higher), bool(getattr(metric, "percent", False)))


def chosen(given: Iterable[str] | Mapping[str, Metric], judge_by: str | None) -> dict[str, Metric]:
    """The metrics by name, the one to judge by among them."""
    found = dict(given) if isinstance(given, Mapping) else {name: metrics[name] for name in given}
    if judge_by and judge_by not in {"accuracy", "loss", *found}:
        found[judge_by] = metrics[judge_by]
    return found


def marked(higher: bool = True, percent: bool = False) -> Callable[[M], M]:
    def mark(metric: M) -> M:
        vars(metric).update(higher_is_better=higher, percent=percent)
        return metric

    return mark


def is_streaming(metric: Metric) -> bool:
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def numbers(name: str, value: Any) -> dict[str, float]:
    """What a metric gave, as numbers by name. Raises TypeError or ValueError where it is none."""
    if isinstance(value, Mapping):
        return {f"{name}.{key}": _number(v) for key, v in value.items()}
    if isinstance(value, Tensor | np.ndarray | list | tuple):
        flat = torch.as_tensor(value)
        if flat.ndim == 1 and len(flat) != 1:
            return {f"{name}.{k}": float(v) for k, v in enumerate(flat.tolist())}
    return {name: _number(value)}


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"text, {value[:20]!r}")
    return float(value)


# --- class labels ---


def has_labels(outputs: Any, targets: Any) -> bool:
    """Whether targets are class labels (n, ...) of outputs (n, C, ...), C > 1."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return False
    return targets.dtype == torch.int64 and outputs.ndim == targets.ndim + 1 and outputs.shape[1] > 1


def by_label(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(n, C, ...) and (n, ...) -> (N, C) and (N,): every position counts, but for ignored ones."""
    if not has_labels(outputs, targets):
        raise ValueError(
            f"class labels are needed, outputs (n, C, ...) and int64 targets (n, ...); they are "
            f"{_shape(outputs)} and {targets.dtype} {_shape(targets)}"
        )
    flat, labels = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
    return (flat, labels) if bool((labels != IGNORED).all()) else (flat[labels != IGNORED], labels[labels != IGNORED])


def _decided(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What was said and what is true: labels (N,); answers (n, k) to questions of yes or no."""
    if has_labels(outputs, targets):
        scores, labels = by_label(outputs, targets)
        return scores.argmax(1), labels
    outputs, targets = _paired(outputs, targets)
    return outputs > 0, targets > 0


@metrics.register("accuracy")
@marked(percent=True)
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose largest output is their label; of yes or no questions answered rightly."""
    said, true = _decided(outputs, targets)
    return float((said == true).double().mean())


@dataclass(frozen=True)
class TopK:
    """The share of samples whose label is among the k largest outputs."""

    k: int
    higher_is_better: ClassVar[bool] = True
    percent: ClassVar[bool] = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        scores, labels = by_label(outputs, targets)
        best = scores.topk(min(self.k, scores.shape[1]), 1).indices  # (N, k)
        return float((best == labels.unsqueeze(1)).any(1).double().mean())


@metrics.register("top5")
@marked(percent=True)
def top5(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose label is among the five largest outputs; top2, top3, ... likewise."""
    return TopK(5)(outputs, targets)


@metrics.register("macro_f1")
@marked(percent=True)
def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """The mean over the classes (or questions) present of 2 TP / (2 TP + FP + FN)."""
    said, true = _decided(outputs, targets)
    if true.dtype == torch.bool:  # (n, k) -> a pair of columns each
        pairs = [(s, t) for s, t in zip(said.flatten(1).T, true.flatten(1).T, strict=True) if t.any()]
    else:
        pairs = [(said == label, true == label) for label in true.unique()]
    scores = [2 * (s & t).sum() / (s.sum() + t.sum()) for s, t in pairs]
    return float(torch.stack(scores).double().mean()) if scores else float("nan")


@metrics.register("per_class_accuracy")
@marked(percent=True)
def per_class_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of every class the share of its samples that are recognized (C,); NaN where there is none."""
    scores, labels = by_label(outputs, targets)
    classes = scores.shape[1]
    right = torch.bincount(labels[scores.argmax(1) == labels], minlength=classes)
    return right.double() / torch.bincount(labels, minlength=classes)


@metrics.register("auroc")
@marked(percent=True)
def auroc(outputs: Tensor, targets: Tensor) -> float:
    """The chance that a positive is ranked above a negative, ties half: the mean over the classes present of one
    against the rest by softmax, or over yes or no questions; NaN where there are no two kinds to tell apart."""
    if has_labels(outputs, targets):
        scores, labels = by_label(outputs, targets)
        present = labels.unique()
        columns = scores.double().log_softmax(1).T[present]  # (present, N)
        areas = [_area(column, labels == label) for column, label in zip(columns, present, strict=True)]
    else:
        outputs, targets = _paired(outputs, targets)
        asked = (targets > 0).flatten(1).T if targets.ndim > 1 else (targets > 0).unsqueeze(0)
        columns = outputs.flatten(1).T if outputs.ndim > 1 else outputs.unsqueeze(0)
        areas = [_area(column, true) for column, true in zip(columns, asked, strict=True)]
    told = [area for area in areas if area is not None]
    return sum(told) / len(told) if told else float("nan")


def _area(scores: Tensor, positive: Tensor) -> float | None:
    """(sum of the positives' ranks - P (P + 1) / 2) / (P N); equal scores share the mean of their ranks."""
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return None
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # of each value, from 1
    return float((ranks[place[positive]].sum() - p * (p + 1) / 2) / (p * n))


@metrics.register("perplexity")
@marked(higher=False)
def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """exp of the mean cross entropy."""
    return float(F.cross_entropy(outputs, targets).exp())


# --- numbers ---


def _paired(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs in the shape of their targets; (n, 1) and (n,) are alike, and nothing is ever stretched."""
    if outputs.numel() != targets.numel() or len(outputs) != len(targets):
        raise ValueError(f"outputs {_shape(outputs)} and targets {_shape(targets)} are not alike")
    return outputs.reshape(targets.shape), targets


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


@metrics.register("mae")
@marked(higher=False)
def mae(outputs: Tensor, targets: Tensor) -> float:
    """The mean absolute error."""
    outputs, targets = _paired(outputs, targets)
    return float((outputs - targets).abs().double().mean())


@metrics.register("rmse")
@marked(higher=False)
def rmse(outputs: Tensor, targets: Tensor) -> float:
    """The square root of the mean squared error."""
    outputs, targets = _paired(outputs, targets)
    return float((outputs - targets).double().square().mean().sqrt())


@metrics.register("r2")
@marked()
def r2(outputs: Tensor, targets: Tensor) -> float:
    """1 - (sum of squared errors) / (sum of squared distances from the mean); NaN where targets do not differ."""
    outputs, targets = _paired(outputs, targets)
    targets = targets.to(outputs.dtype)
    spread = (targets - targets.mean(0)).square().sum()
    return float(1 - (outputs - targets).square().sum() / spread) if spread > 0 else float("nan")
