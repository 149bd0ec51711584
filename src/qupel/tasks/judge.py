"""Which model is judged, on what. Every method is judged by `deployed(state)`, here and nowhere else.

BatchNorm: a deployed model's statistics are measured on that very model (its quantized weights), with the client's own
training data, never taken over from the float model it was made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from qupel.core.layout import Layout
from qupel.tasks.metrics import IGNORED, Metric, has_labels, is_streaming, numbers
from qupel.tasks.task import Batch, Loss, call, is_finite
from qupel.tasks.trees import Tree, length, over
from qupel.util.errors import UserError

Batches = Iterable[Batch]
NO_METRICS: Mapping[str, Metric] = MappingProxyType({})
EVALUATION_BATCH = 256
CALIBRATION_SAMPLES = 2048  # enough for BatchNorm statistics; more changes them by less than their own noise


@dataclass(frozen=True)
class Score:
    """Mean loss, and accuracy (a fraction) where targets are class labels."""

    loss: float
    accuracy: float | None
    count: int
    more: Mapping[str, float] = field(default_factory=dict)  # other metrics, by name


def value(score: Score, by: str = "") -> float:
    """A client's score: what it is judged `by`, else accuracy where targets are labels, else the loss."""
    if not by:
        return score.loss if score.accuracy is None else score.accuracy
    told = {"loss": score.loss, "accuracy": score.accuracy, **score.more}
    found = told.get(by)
    if found is None:
        why = "there are no class labels" if by == "accuracy" else "it gives several numbers, and one is needed"
        raise UserError(f"judge_by = {by!r}: {why}; allowed: {', '.join(n for n, v in told.items() if v is not None)}")
    return found


class Judge:
    """Loads a vector into a copy of the module, measures BatchNorm statistics if it has any, and scores it."""

    def __init__(self, module: nn.Module, loss: Loss, metrics: Mapping[str, Metric] = NO_METRICS) -> None:
        self.module = copy.deepcopy(module)
        self.layout = Layout.of(self.module)
        self.loss = loss
        self.functions = {name: metric for name, metric in metrics.items() if not is_streaming(metric)}
        self.streams = {name: _stream(metric) for name, metric in metrics.items() if is_streaming(metric)}
        self.names = tuple(metrics)
        self.norms = [m for m in self.module.modules() if isinstance(m, _NormBase) and m.track_running_stats]

    def load(self, x: Tensor, calibration: Batches) -> nn.Module:
        """The module with weights x, ready for inference. `calibration`: training data for BatchNorm's statistics."""
        self.layout.load(self.module, x)
        self.module.eval()
        if self.norms:
            calibrate(self.module, self.norms, calibration)
        return self.module

    def score(self, x: Tensor, calibration: Batches, test: Batches, who: str = "a client") -> Score:
        """who: whose test data they are, for what is said of a metric that fails. Outputs are kept where a metric is a
        function; those that are streamed see them batch by batch."""
        module = self.load(x, calibration)
        loss, right, places, count, labelled = 0.0, 0, 0, 0, False
        kept: list[tuple[Tree, Tree]] = []
        asked = Asked(self, who)
        with torch.inference_mode():
            for batch in test:
                inputs, targets, given = Batch(*batch)
                outputs = call(module, inputs)
                loss += self._loss(outputs, targets, given) * length(targets)
                count += length(targets)
                labelled = has_labels(outputs, targets)
                if labelled:
                    right += int((outputs.argmax(1) == targets).sum())
                    places += int((targets != IGNORED).sum())
                asked.update(outputs, targets)
                if self.functions:
                    kept.append((outputs, targets))
            if count == 0:
                return Score(float("nan"), None, 0)
            return Score(loss / count, right / places if labelled and places else None, count, asked.answers(kept))

    def _loss(self, outputs: Tree, targets: Tree, given: Sequence[Tensor] = ()) -> float:
        try:
            return float(self.loss(outputs, targets, *given))
        except Exception:  # some losses refuse what is not a number
            if is_finite(outputs):
                raise
            return float("nan")


def _stream(metric: Metric) -> Any:
    """A metric whose state is ours alone: the user's object is not touched, and torchmetrics, which would add up the
    states of all ranks, judges one client at a time."""
    made = metric() if isinstance(metric, type) else copy.deepcopy(metric)
    for part in made.modules() if isinstance(made, nn.Module) else ():
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = _never  # type: ignore[assignment]
    return made


def _never() -> bool:
    return False


class Asked:
    """The metrics of a judge, asked about one client's test data."""

    def __init__(self, judge: Judge, who: str) -> None:
        self.judge, self.who, self.finite = judge, who, True
        for stream in judge.streams.values():
            stream.reset()

    def update(self, outputs: Tree, targets: Tree) -> None:
        if self.judge.names:
            self.finite = self.finite and is_finite(outputs)
        for name, stream in self.judge.streams.items():
            if isinstance(stream, nn.Module):
                stream.to(outputs.device)
            self._try(name, stream.update, outputs, targets)

    def answers(self, kept: Sequence[tuple[Tree, Tree]]) -> dict[str, float]:
        """Every number of every metric, by name."""
        together = tuple(over(lambda *leaf: torch.cat(leaf), *parts) for parts in zip(*kept, strict=True))
        found: dict[str, float] = {}
        for name in self.judge.names:
            if name in self.judge.streams:
                given = self._try(name, self.judge.streams[name].compute)
            else:
                given = self._try(name, self.judge.functions[name], *together)
            try:
                found |= numbers(name, given)
            except (TypeError, ValueError, RuntimeError):
                what = f"{type(given).__name__} {' '.join(repr(given).split())[:60]}"
                raise UserError(f"metric {name!r}, {self.who}: a number is needed, not {what}") from None
        return found

    def _try(self, name: str, ask: Callable[..., Any], *given: Tree) -> Any:
        try:
            return ask(*given)
        except Exception as e:
            if not self.finite:  # a model that diverged has no score
                return float("nan")
            shapes = " and ".join(str(tuple(t.shape)) for t in given)
            of = f" (outputs and targets {shapes})" if given else ""
            said = str(e).partition("\n")[0]
            raise UserError(f"metric {name!r}, {self.who}: {type(e).__name__}: {said}{of}") from e


@torch.no_grad()
def calibrate(module: nn.Module, norms: list[_NormBase], batches: Batches) -> None:
    """Set every BatchNorm's running statistics to their plain average over the batches, at the module's weights."""
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # a cumulative average
        m.train()
    for batch in batches:
        call(module, batch[0])
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum
        m.eval()
