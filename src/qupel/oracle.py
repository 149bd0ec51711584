"""The gradient oracle: a module and a loss, seen as a function of one flat vector, or of a stack of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.nn import functional as F

from qupel.convolution import use_fft
from qupel.flat import Layout, Slot

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean loss over the batch
Of = Literal["x", "quantized", "both"]  # where a gradient is asked for: at x, at Q(x), or at an x that is its own Q(x)


class Diverged(ArithmeticError):
    """The loss or a gradient is not a finite number; `where` says what was found."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def is_finite(value: object) -> bool:
    """Whether nothing in it is known to be infinite or NaN; what is no tensor of numbers is not known."""
    return not (isinstance(value, Tensor) and value.is_floating_point()) or bool(torch.isfinite(value).all())


class Losses(NamedTuple):
    """f(x) and f(Q(x)) of a step or a mean of them; NaN where it was not evaluated. Of a stack of clients (k,)."""

    x: Any = math.nan
    quantized: Any = math.nan

    def told(self, value: Any, of: Of) -> Losses:
        return Losses(self.x if of == "quantized" else value, self.quantized if of == "x" else value)


class Oracle:
    """oracle(x, batch): the gradient at x of the mean loss over the batch, as a new vector (d,); with slots only there,
    0 elsewhere.

    The module is copied once and bound to flat buffers. It runs in training mode: BatchNorm uses the batch's own
    statistics, its running ones are never used while learning. `loss_value` is the loss of the last call, `losses` the
    last of each kind.
    """

    def __init__(self, module: nn.Module, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        self.module = _for_training(module)
        use_fft(self.module)
        self.layout = Layout.of(self.module, dtype)
        self.values = self.layout.bind(self.module)
        self.parameters = dict(self.module.named_parameters())
        self.loss = loss
        self.loss_value = math.nan
        self.losses = Losses()

    def __call__(
        self, x: Tensor, batch: tuple[Tensor, Tensor], slots: Sequence[Slot] | None = None, of: Of = "x"
    ) -> Tensor:
        inputs, targets = batch
        self.values.copy_(x)
        try:
            outputs = None
            outputs = self.module(inputs)
            loss = self.loss(outputs, targets)
        except Exception as e:  # some losses refuse what is not a number
            if is_finite(x) and is_finite(outputs):
                raise
            raise Diverged(f"{str(e).splitlines()[0]}; {_first_bad(x, self.layout)}") from e
        found = _gradients(loss, self.parameters, self.layout.slots if slots is None else slots)
        self.loss_value = loss.item()
        self.losses = self.losses.told(self.loss_value, of)
        if not math.isfinite(self.loss_value):
            raise Diverged(f"the loss is {self.loss_value}; {_first_bad(x, self.layout)}")
        return _one_vector(found, x, self.layout)


class StackOracle:
    """oracle(x, batch) of k clients at once: x (k, d), inputs (k, b, ...), targets (k, b, ...) -> gradients (k, d),
    each client's in its row and of nothing but its row.

    A chain of layers known to take a stack runs as it is, one batched product a layer; any other module goes through
    torch.func.vmap. Both refuse to draw random numbers. `losses`, each (k,), are the last of each kind; `faults` says
    what was first found at clients whose loss is not finite.
    """

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self.module = _for_training(module)
        self.layout = Layout.of(self.module)
        self.losses = Losses()
        self.faults: dict[int, str] = {}
        layers = _chain(self.module)
        trained = all(p.requires_grad for p in self.module.parameters())  # frozen ones are the same for all clients
        if trained and all(_takes_a_stack(layer) for layer in layers):
            names = {id(p): name for name, p in self.module.named_parameters()}
            chain = [(layer, {own: names[id(p)] for own, p in layer.named_parameters()}) for layer in layers]
            losses = _cross_entropies if loss is F.cross_entropy else vmap(loss, randomness="error")

            def whole(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
                h = inputs  # (k, b, ...)
                for layer, its in chain:
                    h = _through(layer, {own: parameters[name] for own, name in its.items()}, h)
                return losses(h, targets)

            self.compute = whole  # -> (k,)
        else:

            def one(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
                return loss(functional_call(self.module, parameters, (inputs,)), targets)

            self.compute = vmap(one, randomness="error")

    def __call__(
        self, x: Tensor, batch: tuple[Tensor, Tensor], slots: Sequence[Slot] | None = None, of: Of = "x"
    ) -> Tensor:
        inputs, targets = batch
        x = x.expand(len(inputs), -1)  # clients that start from one model share it
        parameters = {slot.name: slot.view(x).detach().requires_grad_() for slot in self.layout.slots}
        losses = self.compute(parameters, inputs, targets)  # (k,)
        found = _gradients(losses.sum(), parameters, self.layout.slots if slots is None else slots)
        values = losses.detach()
        self.losses = self.losses.told(values, of)
        if not bool(torch.isfinite(values).all()):
            for row, value in enumerate(values.tolist()):
                if not math.isfinite(value):
                    self.faults.setdefault(row, f"the loss is {value}; {_first_bad(x[row], self.layout)}")
        return _one_vector(found, x, self.layout)


def _for_training(module: nn.Module) -> nn.Module:
    """A copy in training mode: batch statistics only, and no buffer is written in the hot path."""
    module = copy.deepcopy(module).train()
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._NormBase):
            m.track_running_stats = False
    return module


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor], slots: Sequence[Slot]) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(loss, [parameters[slot.name] for slot in slots], allow_unused=True)
    return {slot.name: g for slot, g in zip(slots, found, strict=True)}


def _one_vector(found: dict[str, Tensor | None], x: Tensor, layout: Layout) -> Tensor:
    """Gradients in the order of the vector (..., d); 0 for a parameter not asked for, or that the loss does not use."""
    parts = ((slot, found.get(slot.name)) for slot in layout.slots)
    return torch.cat([torch.zeros_like(x[..., s.slice]) if g is None else s.flat(g) for s, g in parts], dim=-1)


def _first_bad(x: Tensor, layout: Layout) -> str:
    for slot in layout.slots:
        if not torch.isfinite(x[slot.slice]).all():
            return f"layer {slot.name!r} holds values that are not finite"
    largest = max(layout.slots, key=lambda s: float(x[s.slice].abs().max()))
    return f"largest weight {float(x[largest.slice].abs().max()):.3g} in layer {largest.name!r}"


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
