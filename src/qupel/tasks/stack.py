"""A task of a stack of clients: x (k, d), inputs (k, b, ...), targets (k, b, ...), each client by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.nn import functional as F

from qupel.core.layout import Layout, Slot
from qupel.tasks.task import Batch, Evaluated, Loss, Value, detached, first_bad, for_training, gradients, one_vector
from qupel.tasks.trees import Tree, arguments, length


class StackTask:
    """A module and a loss as a task of k clients at once: gradients (k, d), each client's in its row and of nothing but
    its row.

    A chain of layers known to take a stack runs as it is, one batched product a layer; any other module goes through
    torch.func.vmap. Both refuse to draw random numbers. `faults` says what was first found at clients whose loss is not
    finite.
    """

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self.module = for_training(module)
        self.layout = Layout.of(self.module)
        self.loss = loss
        self.faults: dict[int, str] = {}
        self.call = _forward(self.module)

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

    def forward(self, x: Tensor, inputs: Tree) -> StackPass:
        x = x.expand(length(inputs), -1)  # clients that start from one model share it
        parameters = {slot.name: slot.view(x).detach().requires_grad_() for slot in self.layout.slots}
        return StackPass(self, x, parameters, self.call(parameters, inputs))

    def outputs(self, x: Tensor, inputs: Tree) -> Tree:
        x = x.expand(length(inputs), -1)
        with torch.no_grad():
            return self.call({slot.name: slot.view(x) for slot in self.layout.slots}, inputs)

    def value(self, x: Tensor, batch: Batch) -> Value:
        return self.loss_of(self.outputs(x, batch[0]), batch)

    def loss_of(self, outputs: Tree, batch: Batch) -> Value:
        _, targets, given = Batch(*batch)
        return _each(self.loss)(outputs, targets, *given)


@dataclass(frozen=True, eq=False)
class StackPass:
    """A pass of a `StackTask`; said (k, b, ...): with its graph."""

    task: StackTask
    x: Tensor
    parameters: dict[str, Tensor]
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
        values = _each(loss or task.loss)(self.said, targets, *given, *more)  # (k,)
        found = gradients(values.sum(), self.parameters, layout.slots if slots is None else slots)
        values = values.detach()
        if not bool(torch.isfinite(values).all()):
            for row, value in enumerate(values.tolist()):
                if not math.isfinite(value):
                    task.faults.setdefault(row, f"the loss is {value}; {first_bad(self.x[row], layout)}")
        return Evaluated(one_vector(found, self.x, layout), values, self.outputs)


def _forward(module: nn.Module) -> Callable[[dict[str, Tensor], Tree], Tree]:
    layers = _chain(module)
    trained = all(p.requires_grad for p in module.parameters())  # frozen ones are the same for all clients
    if not (trained and all(_takes_a_stack(layer) for layer in layers)):
        return vmap(lambda own, inputs: functional_call(module, own, *_arguments(inputs)), randomness="error")
    names = {id(p): name for name, p in module.named_parameters()}
    chain = [(layer, {own: names[id(p)] for own, p in layer.named_parameters()}) for layer in layers]

    def forward(parameters: dict[str, Tensor], inputs: Tree) -> Tensor:
        (h,), _ = arguments(inputs)  # (k, b, ...)
        for layer, its in chain:
            h = _through(layer, {own: parameters[name] for own, name in its.items()}, h)
        return h

    return forward


def _arguments(inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional, named = arguments(inputs)
    return tuple(positional), dict(named)


def _each(loss: Loss) -> Loss:
    """The loss of every client (k,)."""
    return _cross_entropies if loss is F.cross_entropy else vmap(loss, randomness="error")


# --- layers that take a stack (k, b, ...) ---

_ELEMENTWISE = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid)


def _chain(module: nn.Module) -> list[nn.Module]:
    """The layers that a module runs one after the other: those of a Sequential, else itself."""
    if type(module) is not nn.Sequential:
        return [module]
    return [layer for child in module for layer in _chain(child)]


def _takes_a_stack(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) is nn.Linear or type(layer) in _ELEMENTWISE


def _through(layer: nn.Module, parameters: dict[str, Tensor], h: Tensor) -> Tensor:
    """A layer on a stack, each client with its own parameters."""
    if isinstance(layer, nn.Flatten):
        return h.flatten(2)
    if not isinstance(layer, nn.Linear):
        return layer(h)
    out = _StackedLinear.apply(h.flatten(1, -2), parameters["weight"], parameters.get("bias"))  # (k, rows, o)
    return out.unflatten(1, h.shape[1:-1])


class _StackedLinear(torch.autograd.Function):
    """h W^T + b of every client: h (k, rows, i), W (k, o, i), b (k, o). Autograd's own gradients of a batched product
    come in an order that costs twice as much, and another time when they are put into one vector."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(h, weight)
        return torch.bmm(h, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), h, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        at_input, at_weight, at_bias = ctx.needs_input_grad
        return (
            torch.bmm(g, weight) if at_input else None,
            torch.bmm(g.mT, h) if at_weight else None,
            g.sum(1) if at_bias else None,
        )


_each_cross_entropy = vmap(F.cross_entropy, randomness="error")


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each client's mean cross entropy (k,); vmap's own way to labels (k, b) calls some 20 functions more."""
    if targets.ndim > 2 or outputs.ndim > 3:
        return _each_cross_entropy(outputs, targets)
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")  # (k b,); 0 where it is ignored
    return each.unflatten(0, targets.shape).sum(1) / (targets != -100).sum(1)
