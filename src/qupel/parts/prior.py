"""A client's own label prior in the last layer's bias.

A shared model knows all classes, a client may have a few. Where class c is absent from the client's training labels,
the bias of c is lowered by

    log((0 + a) / (n + a C)),      n samples, C classes, a pseudo-counts (1/2: Krichevsky and Trofimov, 1981)

the logarithm of the class's estimated probability; classes that are there are left to training. The result is an
ordinary model. In a phase with a prior the client sees every shared model in this way: the shift is added to what comes
and taken off what goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qupel.core.layout import Layout, Slot
from qupel.parts.base import Rows, State, Upload
from qupel.tasks.trees import Tree, call


@dataclass(frozen=True)
class Prior:
    """A client's shift of its classes (C,), and where it goes in x and in w; none: models are seen as they are."""

    shift: Tensor | None = None
    x: Slot | None = None
    w: Slot | None = None

    def seen(self, rows: Rows, models: int, apart: bool = False) -> Rows:
        """Shared models, the first of the rows, as this client sees them. apart: after w there may be one of x's
        network."""
        slots = [self.x if apart and k else self.w if k < models else None for k in range(len(rows))]
        return tuple(self._moved(row, slot, 1.0) for row, slot in zip(rows, slots, strict=True))

    def sent(self, upload: Upload | None, models: int, apart: bool = False) -> Upload | None:
        """An upload without what `seen` added."""
        if upload is None or self.shift is None:
            return upload
        return replace(upload, rows=replace(self, shift=-self.shift).seen(upload.rows, models, apart))

    def entered(self, before: Prior, state: State) -> State:
        """The state of a client that saw models by another prior before, or by none."""
        if before.shift is self.shift:
            return state
        x = self._moved(before._moved(state.x, before.x, -1.0), self.x, 1.0)
        w = self._moved(before._moved(state.w, before.w, -1.0), self.w, 1.0)
        return replace(state, x=x, w=w)

    def _moved(self, v: Tensor, slot: Slot | None, sign: float) -> Tensor:
        if self.shift is None or slot is None:
            return v
        v = v.clone()
        v[..., slot.slice] += sign * self.shift.to(v)
        return v


NO_PRIOR = Prior()


def shift(labels: Tensor, classes: int, pseudo: float) -> Tensor | None:
    """What is added to the bias of each class (C,); None where no class is absent.

    >>> shift(torch.tensor([0, 0, 2]), 3, 0.5).tolist()
    [0.0, -2.1972246170043945, 0.0]
    """
    labels = labels.flatten()
    labels = labels[labels >= 0]  # losses leave out what is marked by a negative number
    n = torch.bincount(labels, minlength=classes).cpu()
    if bool((n > 0).all()):
        return None
    lowered = torch.tensor(pseudo / (len(labels) + pseudo * classes)).log()
    return torch.where(n > 0, torch.zeros(()), lowered)


@torch.no_grad()
def output_bias(module: nn.Module, layout: Layout, inputs: Tree, classes: int) -> Slot | None:
    """The parameter that is added to the network's outputs (b, C), as a look at the network itself tells: what one adds
    to it comes out, whatever the inputs. None where there is none."""
    was_training = module.training
    module.eval()
    try:
        before = call(module, inputs)
        if not isinstance(before, Tensor) or before.ndim < 2 or before.shape[1] != classes:
            return None
        parameters = dict(module.named_parameters())
        asked = torch.linspace(-1, 1, classes)
        for slot in reversed(layout.slots):
            if slot.shape != (classes,):
                continue
            value = parameters[slot.name]
            kept = value.clone()
            value.add_(asked.to(value.device))
            moved = call(module, inputs) - before
            value.copy_(kept)
            want = asked.to(moved.device).view(1, classes, *[1] * (before.ndim - 2)).expand_as(moved)
            if torch.allclose(moved, want, atol=1e-4, rtol=1e-4):
                return slot
        return None
    finally:
        module.train(was_training)
