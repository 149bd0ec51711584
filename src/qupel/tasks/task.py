"""A task: one architecture with its loss, as functions of one flat vector. `stack` has the same for a stack of clients.

A client's problem is a pair of tasks, its own network's and the shared one's: the same where architectures are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qupel.core.layout import Layout, Slot
from qupel.tasks.convolution import use_fft
from qupel.tasks.trees import Tree, call, leaves, over
from qupel.util.errors import UserError

__all__ = [
    "Batch",
    "Diverged",
    "Evaluated",
    "Loss",
    "ModuleTask",
    "Pass",
    "Problem",
    "Task",
    "Tree",
    "Value",
    "call",
    "each_loss",
]

Loss = Callable[..., Tensor]  # (outputs, targets, *given) -> mean loss over the batch
Value = float | Tensor  # a loss; of a stack of clients one each (k,)


class Batch(NamedTuple):
    """Samples to learn from: inputs (b, ...) and targets (b, ...), each a tensor or a tree of tensors, and what the
    loss gets after the targets: `(weights,)`, (b,) each, where samples are weighted."""

    inputs: Tree
    targets: Tree
    given: tuple[Tensor, ...] = ()


class Diverged(ArithmeticError):
    """The loss or a gradient is not a finite number; `where` says what was found."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


@dataclass(frozen=True)
class Evaluated:
    """A loss at a point: its gradient (..., d), its value, and the network's outputs on the batch, without a graph."""

    gradient: Tensor
    loss: Value
    outputs: Tree


class Pass(Protocol):
    """A forward pass whose gradient can still be asked for, until the task makes its next one."""

    @property
    def outputs(self) -> Tree:
        """What the network said (..., b, classes), without a graph."""

    def gradient(
        self,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tensor] = (),
    ) -> Evaluated:
        """As the task's own; of the batch the inputs were those of the pass."""


class Task(Protocol):
    """One architecture with its loss. A toy: f = |x|^2 / 2 has gradient(x, ...).gradient = x and .loss = |x|^2 / 2."""

    @property
    def layout(self) -> Layout: ...

    @property
    def loss(self) -> Loss:
        """Its own, of one client."""

    def forward(self, x: Tensor, inputs: Tree) -> Pass:
        """What the network with weights x says while it learns, to be followed by a gradient."""

    def gradient(
        self,
        x: Tensor,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tensor] = (),
    ) -> Evaluated:
        """The gradient at x (..., d) of the mean loss over the batch. slots: where it is asked for; elsewhere it may be
        0, so that nothing has to be computed below the first layer that is asked for. loss: another one than the task's
        own, a function of (outputs, targets, *given, *batch.given), given: tensors, of a stack (k, ...) each."""

    def outputs(self, x: Tensor, inputs: Tree) -> Tree:
        """What the network with weights x says to a batch while it learns (..., b, classes)."""

    def value(self, x: Tensor, batch: Batch) -> Value:
        """The mean loss over the batch at x."""

    def loss_of(self, outputs: Tree, batch: Batch) -> Value:
        """The mean loss over the batch of what the network said."""


def each_loss(task: Task, x: Tensor, batch: Batch) -> list[float]:
    """The loss at x of every sample of a batch, after one pass of all of them."""
    outputs, count = task.outputs(x, batch.inputs), len(next(iter(leaves(batch.targets))))

    def one(tree: Tree, k: int) -> Tree:
        return over(lambda leaf: leaf[k : k + 1], tree)

    samples = (Batch(one(batch.inputs, k), one(batch.targets, k), one(batch.given, k)) for k in range(count))
    return [float(task.loss_of(one(outputs, k), sample)) for k, sample in enumerate(samples)]


@dataclass(frozen=True)
class Problem:
    """What a client optimizes: its own network x in R^d_i, and the shared one, w in R^d. They are two tasks also where
    the architecture is one: a pass of the one may be open while the other makes its own."""

    own: Task
    shared: Task


class ModuleTask:
    """A module and a loss as a task of one client.

    The module is copied once and bound to flat buffers. It runs in training mode: BatchNorm uses the batch's own
    statistics, its running ones are never used while learning.
    """

    def __init__(self, module: nn.Module, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        self.module = for_training(module)
        use_fft(self.module)
        self.layout = Layout.of(self.module, dtype)
        self.values = self.layout.bind(self.module)
        self.parameters = dict(self.module.named_parameters())
        self.loss = loss

    def gradient(
        self,
        x: Tensor,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tensor] = (),
    ) -> Evaluated:
        return self.forward(x, batch[0]).gradient(batch, slots, loss=loss, given=given)

    def forward(self, x: Tensor, inputs: Tree) -> ModulePass:
        self.values.copy_(x)
        with blamed(x, self.layout):
            return ModulePass(self, x, call(self.module, inputs))

    def outputs(self, x: Tensor, inputs: Tree) -> Tree:
        self.values.copy_(x)
        with torch.no_grad():
            return call(self.module, inputs)

    def value(self, x: Tensor, batch: Batch) -> Value:
        return self.loss_of(self.outputs(x, batch[0]), batch)

    def loss_of(self, outputs: Tree, batch: Batch) -> Value:
        _, targets, given = Batch(*batch)
        return float(self.loss(outputs, targets, *given))


@dataclass(frozen=True, eq=False)
class ModulePass:
    """A pass of a `ModuleTask`; said: with its graph, which holds until the task's buffers are written anew."""

    task: ModuleTask
    x: Tensor
    said: Tree

    @property
    def outputs(self) -> Tree:
        return detached(self.said)

    def gradient(
        self,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tensor] = (),
    ) -> Evaluated:
        _, targets, more = Batch(*batch)
        task, layout = self.task, self.task.layout
        with blamed(self.x, layout, self.said):
            value = (loss or task.loss)(self.said, targets, *given, *more)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise NoScalar(value)
        found = gradients(value, task.parameters, layout.slots if slots is None else slots)
        number = value.item()
        if not math.isfinite(number):
            raise Diverged(f"the loss is {number}; {first_bad(self.x, layout)}")
        return Evaluated(one_vector(found, self.x, layout), number, self.outputs)


@contextmanager
def blamed(x: Tensor, layout: Layout, outputs: Tree | None = None) -> Iterator[None]:
    """Some losses and networks refuse what is not a number: that is a client that diverged, not a mistake."""
    try:
        yield
    except Exception as e:
        if is_finite(x) and is_finite(outputs):
            raise
        raise Diverged(f"{str(e).splitlines()[0]}; {first_bad(x, layout)}") from e


class NoScalar(UserError):
    """A loss that is not one number."""

    def __init__(self, value: object) -> None:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        super().__init__(f"the loss returns {what}; needed is one number, the mean over the batch, as a tensor")


def detached(outputs: Tree) -> Tree:
    """Outputs without their graph."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    return over(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def is_finite(value: object) -> bool:
    """Whether nothing in it is known to be infinite or NaN; what is no tensor of numbers is not known."""
    if not isinstance(value, Tensor):
        return not isinstance(value, Mapping | tuple | list) or all(map(is_finite, leaves(value)))
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def for_training(module: nn.Module) -> nn.Module:
    """A copy in training mode: batch statistics only, and no buffer is written in the hot path."""
    module = copy.deepcopy(module).train()
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._NormBase):
            m.track_running_stats = False
    return module


def gradients(loss: Tensor, parameters: Mapping[str, Tensor], slots: Sequence[Slot]) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(loss, [parameters[slot.name] for slot in slots], allow_unused=True)
    return {slot.name: g for slot, g in zip(slots, found, strict=True)}


def one_vector(found: dict[str, Tensor | None], x: Tensor, layout: Layout) -> Tensor:
    """Gradients in the order of the vector (..., d); 0 for a parameter not asked for, or that the loss does not use."""
    parts = ((slot, found.get(slot.name)) for slot in layout.slots)
    return torch.cat([torch.zeros_like(x[..., s.slice]) if g is None else s.flat(g) for s, g in parts], dim=-1)


def first_bad(x: Tensor, layout: Layout) -> str:
    for slot in layout.slots:
        if not torch.isfinite(x[slot.slice]).all():
            return f"layer {slot.name!r} holds values that are not finite"
    largest = max(layout.slots, key=lambda s: float(x[s.slice].abs().max()))
    return f"largest weight {float(x[largest.slice].abs().max()):.3g} in layer {largest.name!r}"
