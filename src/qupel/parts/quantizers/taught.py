"""Self-distillation while quantizing, around any other quantizer: the full-precision x teaches Q(x)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import Deployed, Info, State
from qupel.parts.quantizers.base import Descent, Quantizer, quantizers
from qupel.tasks.distill import SelfTaught
from qupel.tasks.task import Batch, Task


@quantizers.register("taught", paper="Polino, Pascanu, Alistarh, ICLR 2018: distillation; here from the client's own x")
@dataclass(frozen=True)
class TaughtQuantizer:
    """Any quantizer, with (1 - weight) f(Q(x)) + weight KD(Q(x), x) in place of f(Q(x)): x teaches its low-bit model.

    What x said is taken from the quantizer's own pass at x where it makes one, and within a step x teaches with that.
    For class labels. weight = 0: the quantizer itself.
    """

    labels_only: ClassVar[bool] = True

    quantizer: Quantizer = field(default_factory=lambda: quantizers["prox"]())
    weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight = {self.weight}: a share, allowed are 0 to 1")
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature}: allowed are numbers greater than 0")
        if isinstance(self.quantizer, TaughtQuantizer):
            raise ValueError("quantizer: it is taught already")

    def start(self, before: State, plan: Plan, layout: Layout) -> tuple[Tensor, Codebook]:
        return self.quantizer.start(before, plan, layout)

    def gradient(self, x: Tensor, codebook: Codebook, task: Task, batch: Batch, clock: Clock) -> Descent:
        if not codebook or not self.weight:
            return self.quantizer.gradient(x, codebook, task, batch, clock)
        lesson = SelfTaught(task, x, self.weight, self.temperature)
        found = self.quantizer.gradient(x, codebook, lesson, batch, clock)
        said = lesson.outputs(x, batch[0]) if lesson.teacher is None else lesson.teacher
        return replace(found, said=said)

    def settle(
        self, y: Tensor, codebook: Codebook, descent: Descent, task: Task, batch: Batch, eta1: Schedule, clock: Clock
    ) -> tuple[Tensor, Codebook, Info]:
        if descent.said is not None:
            task = SelfTaught(task, y.new_empty(0), self.weight, self.temperature, descent.said)
        return self.quantizer.settle(y, codebook, descent, task, batch, eta1, clock)

    def deployed(self, x: Tensor, codebook: Codebook) -> Deployed:
        return self.quantizer.deployed(x, codebook)
