"""Which model is judged, on what. Every method is judged by `deployed(state)`, here and nowhere else.

BatchNorm: a deployed model's statistics are measured on that very model (its quantized weights), with the client's own
training data, never taken over from the float model it was made of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from qupel.core.layout import Layout
from qupel.tasks.metrics import Metric
from qupel.tasks.task import Batch, Loss, call, is_finite
from qupel.tasks.trees import Tree, length, over

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


class Judge:
    """Loads a vector into a copy of the module, measures BatchNorm statistics if it has any, and scores it."""

    def __init__(self, module: nn.Module, loss: Loss, metrics: Mapping[str, Metric] = NO_METRICS) -> None:
        self.module = copy.deepcopy(module)
        self.layout = Layout.of(self.module)
        self.loss, self.metrics = loss, metrics
        self.norms = [m for m in self.module.modules() if isinstance(m, _NormBase) and m.track_running_stats]

    def load(self, x: Tensor, calibration: Batches) -> nn.Module:
        """The module with weights x, ready for inference. `calibration`: training data for BatchNorm's statistics."""
        self.layout.load(self.module, x)
        self.module.eval()
        if self.norms:
            calibrate(self.module, self.norms, calibration)
        return self.module

    def score(self, x: Tensor, calibration: Batches, test: Batches) -> Score:
        module = self.load(x, calibration)
        loss, correct, count, labelled = 0.0, 0, 0, False
        kept: list[tuple[Tree, Tree]] = []
        with torch.inference_mode():
            for batch in test:
                inputs, targets, given = Batch(*batch)
                outputs = call(module, inputs)
                loss += self._loss(outputs, targets, given) * length(targets)
                count += length(targets)
                labelled = is_labelled(outputs, targets)
                if labelled:
                    correct += int((outputs.argmax(1) == targets).sum())
                if self.metrics:
                    kept.append((outputs, targets))
        if count == 0:
            return Score(float("nan"), None, 0)
        return Score(loss / count, correct / count if labelled else None, count, self._more(kept))

    def _more(self, kept: Sequence[tuple[Tree, Tree]]) -> dict[str, float]:
        """The metrics on all outputs and targets together."""
        if not self.metrics:
            return {}
        outputs, targets = (over(lambda *leaf: torch.cat(leaf), *parts) for parts in zip(*kept, strict=True))
        return {name: float(metric(outputs, targets)) for name, metric in self.metrics.items()}

    def _loss(self, outputs: Tree, targets: Tree, given: Sequence[Tensor] = ()) -> float:
        try:
            return float(self.loss(outputs, targets, *given))
        except Exception:  # some losses refuse what is not a number
            if is_finite(outputs):
                raise
            return float("nan")


def is_labelled(outputs: Tree, targets: Tree) -> bool:
    """Whether there is an accuracy: one label (n,) and one output for each class (n, classes)."""
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    return tensors and targets.dtype == torch.int64 and targets.ndim == 1 and outputs.ndim == 2


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
