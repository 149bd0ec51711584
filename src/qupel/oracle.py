"""The gradient oracle: a module and a loss, seen as a function of one flat vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qupel.flat import Layout

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean loss over the batch


class Diverged(ArithmeticError):
    """The loss or a gradient is not a finite number; `where` says what was found."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Oracle:
    """oracle(x, batch): the gradient at x of the mean loss over the batch, as a new vector (d,).

    The module is copied once and bound to flat buffers. It runs in training mode: BatchNorm uses the batch's own
    statistics, its running ones are never used while learning. `loss_value` is the loss of the last call.
    """

    def __init__(self, module: nn.Module, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        self.module = copy.deepcopy(module).train()
        self.layout = Layout.of(self.module, dtype)
        self.values = self.layout.bind(self.module)
        named = dict(self.module.named_parameters())
        self.parameters = [named[slot.name] for slot in self.layout.slots]
        self.loss = loss
        self.loss_value = math.nan
        for m in self.module.modules():
            if isinstance(m, nn.modules.batchnorm._NormBase):
                m.track_running_stats = False  # batch statistics only; and no buffer is written in the hot path

    def __call__(self, x: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        self.values.copy_(x)
        loss = self.loss(self.module(inputs), targets)
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self.loss_value = loss.item()
        if not math.isfinite(self.loss_value):
            raise Diverged(f"the loss is {self.loss_value}; {self._first_bad(x)}")
        return torch.cat([_flat(g, p) for g, p in zip(found, self.parameters, strict=True)])

    def _first_bad(self, x: Tensor) -> str:
        for slot in self.layout.slots:
            if not torch.isfinite(x[slot.slice]).all():
                return f"layer {slot.name!r} holds values that are not finite"
        largest = max(self.layout.slots, key=lambda s: float(x[s.slice].abs().max()))
        return f"largest weight {float(x[largest.slice].abs().max()):.3g} in layer {largest.name!r}"


def _flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient in the memory order of its slot (`flat.Slot.view`); zeros for a parameter the loss does not use."""
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    return (gradient.permute(0, 2, 3, 1) if gradient.ndim == 4 else gradient).reshape(-1)
