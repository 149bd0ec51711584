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
from qupel.tasks.task import Loss, is_finite

Batches = Iterable[tuple[Tensor, Tensor]]
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
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.inference_mode():
            for inputs, targets in test:
                outputs = module(inputs)
                loss += self._loss(outputs, targets) * len(targets)
                count += len(targets)
                labelled = targets.dtype == torch.int64 and outputs.ndim == 2
                if labelled:
                    correct += int((outputs.argmax(1) == targets).sum())
                if self.metrics:
                    kept.append((outputs, targets))
        if count == 0:
            return Score(float("nan"), None, 0)
        return Score(loss / count, correct / count if labelled else None, count, self._more(kept))

    def _more(self, kept: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """The metrics on all outputs and targets together."""
        if not self.metrics:
            return {}
        outputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
        return {name: float(metric(outputs, targets)) for name, metric in self.metrics.items()}

    def _loss(self, outputs: Tensor, targets: Tensor) -> float:
        try:
            return float(self.loss(outputs, targets))
        except Exception:  # some losses refuse what is not a number
            if is_finite(outputs):
                raise
            return float("nan")


@torch.no_grad()
def calibrate(module: nn.Module, norms: list[_NormBase], batches: Batches) -> None:
    """Set every BatchNorm's running statistics to their plain average over the batches, at the module's weights."""
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # a cumulative average
        m.train()
    for inputs, _ in batches:
        module(inputs)
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum
        m.eval()
