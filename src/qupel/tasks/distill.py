"""Distillation: a model learns from what another one says. Its formula, and a task whose loss has it as a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from qupel.core.layout import Layout, Slot
from qupel.tasks.task import Batch, Evaluated, Loss, Pass, Task, Tree, Value
from qupel.util.errors import UserError

On = Literal["both", "teacher"]


def kd(student: Tree, teacher: Tree, temperature: float = 1.0, on: On = "both") -> Tensor:
    """KD = T^2 KL(softmax(z_teacher / T) || softmax(z_student / T)), the mean over a batch of logits (b, classes, ...).

    on: with "teacher" the student's logits are as they are, and there is no T^2: the gradient in them is
    softmax(z_student) - softmax(z_teacher / T), of the same size whatever T. Equal models have KD = 0, and with "both",
    or T = 1, a gradient of 0 in either.

    >>> import torch
    >>> float(kd(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 2.1972246]]), 2.0))  # 4 KL((1/4, 3/4) || (1/2, 1/2))
    0.5232...
    """
    if not (isinstance(student, Tensor) and isinstance(teacher, Tensor) and student.shape == teacher.shape):
        shapes = (tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__ for z in (student, teacher))
        raise UserError(
            "distillation: both networks give one tensor of logits (b, classes); here {} and {}".format(*shapes)
        )
    log_p = F.log_softmax(teacher / temperature, dim=1)
    log_q = F.log_softmax(student / temperature if on == "both" else student, dim=1)
    each = (log_p.exp() * (log_p - log_q)).sum(1)  # (b, ...)
    return each.mean() * (temperature**2 if on == "both" else 1.0)


class Around:
    """A task that is another one but for what is learned from."""

    task: Task

    @property
    def inmost(self) -> Task:
        return self.task.inmost if isinstance(self.task, Around) else self.task

    @property
    def layout(self) -> Layout:
        return self.task.layout

    def forward(self, x: Tensor, inputs: Tree) -> Pass:
        return self.inmost.forward(x, inputs)

    def outputs(self, x: Tensor, inputs: Tree) -> Tree:
        return self.inmost.outputs(x, inputs)

    def value(self, x: Tensor, batch: Batch) -> Value:
        return self.inmost.value(x, batch)

    def loss_of(self, outputs: Tree, batch: Batch) -> Value:
        return self.inmost.loss_of(outputs, batch)


@dataclass(frozen=True, eq=False)
class Taught(Around):
    """A task whose loss is (1 - weight) f + weight KD(., teacher), by what the teacher said to this very batch.

    It is a task like any other, so that every quantizer makes its own passes on it. heard: what the student said, at x
    and, the last time, elsewhere, at Q(x). Losses that are told are f, not the mixture.
    """

    task: Task
    teacher: Tree
    weight: float
    temperature: float = 1.0
    on: On = "both"
    x: Tensor | None = None
    heard: dict[Literal["x", "q"], Tree] = field(default_factory=dict)

    @property
    def teachers(self) -> tuple[Tree, ...]:
        return self.teacher, *(self.task.teachers if isinstance(self.task, Taught) else ())

    def loss(self, outputs: Tree, targets: Tree, teacher: Tree, *more: Tree) -> Tensor:
        """more: what the task's own loss takes."""
        learned = kd(outputs, teacher, self.temperature, self.on)
        return (1 - self.weight) * self.task.loss(outputs, targets, *more) + self.weight * learned

    def gradient(
        self,
        x: Tensor,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tree] = (),
    ) -> Evaluated:
        own = loss is None
        found = self.inmost.gradient(x, batch, slots, loss=loss or self.loss, given=self.teachers if own else given)
        self.hear(x, found.outputs)
        return replace(found, loss=self.loss_of(found.outputs, batch)) if own else found

    def hear(self, x: Tensor, outputs: Tree) -> None:
        self.heard["x" if x is self.x else "q"] = outputs
        if isinstance(self.task, Taught):
            self.task.hear(x, outputs)


@dataclass(eq=False)
class SelfTaught(Around):
    """A task that is itself at x, and whose loss elsewhere, at Q(x), is (1 - weight) f + weight KD(., x).

    teacher: what x said, where a pass has been made; a quantizer that makes none costs a forward pass more.
    """

    task: Task
    x: Tensor
    weight: float
    temperature: float = 1.0
    teacher: Tree | None = None

    @property
    def loss(self) -> Loss:
        return self.task.loss

    def gradient(
        self,
        x: Tensor,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tree] = (),
    ) -> Evaluated:
        if x is self.x or loss is not None:
            found = self.task.gradient(x, batch, slots, loss=loss, given=given)
            self.teacher = found.outputs if x is self.x else self.teacher
            return found
        if self.teacher is None:
            self.teacher = self.outputs(self.x, batch[0])
        return Taught(self.task, self.teacher, self.weight, self.temperature).gradient(x, batch, slots)
