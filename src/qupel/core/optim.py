"""Optimizers of the x step, on flat vectors (d,) or stacks of them (k, d), one a client. Each equals torch.optim's of
the same name, step for step.

An optimizer is a frozen dataclass with `memory(x)`, the tensors it keeps at the start, and
`step(x, g, memory, lr) -> (new x, new memory)`. Weight decay belongs to the x step only, never to centers or w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Memory = tuple[Tensor, ...]


@dataclass(frozen=True)
class SGD:
    """x - lr v,  v = momentum v + g + weight_decay x  (v = g + weight_decay x without momentum).

    clip: g is at most so long, g <- g min(1, clip / |g|), before anything else (`torch.nn.utils.clip_grad_norm_`).
    """

    name: Literal["sgd"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None

    def memory(self, x: Tensor) -> Memory:
        return (torch.zeros_like(x),) if self.momentum else ()

    def step(self, x: Tensor, g: Tensor, memory: Memory, lr: float) -> tuple[Tensor, Memory]:
        if self.clip is not None:
            g = g * (self.clip / g.norm(dim=-1, keepdim=True).clamp_min(self.clip))  # (..., d), lengths (..., 1)
        if self.weight_decay:
            g = torch.add(g, x, alpha=self.weight_decay)
        if not self.momentum:
            return torch.add(x, g, alpha=-lr), ()
        v = torch.add(g, memory[0], alpha=self.momentum)
        direction = torch.add(g, v, alpha=self.momentum) if self.nesterov else v
        return torch.add(x, direction, alpha=-lr), (v,)


@dataclass(frozen=True)
class Adam:
    """x - lr m^ / (sqrt(v^) + eps) with bias-corrected first and second moments m^, v^ of g + weight_decay x."""

    name: Literal["adam"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def memory(self, x: Tensor) -> Memory:
        return (torch.zeros_like(x), torch.zeros_like(x), torch.zeros(1, dtype=torch.float32, device=x.device))

    def step(self, x: Tensor, g: Tensor, memory: Memory, lr: float) -> tuple[Tensor, Memory]:
        m, v, count = memory
        if self.weight_decay:
            g = torch.add(g, x, alpha=self.weight_decay)
        t = int(count.item()) + 1 if count.numel() == 1 else count.double() + 1  # a stack's clients may differ (k, 1)
        m = torch.lerp(m, g, 1 - self.beta1)
        v = torch.mul(v, self.beta2).addcmul_(g, g, value=1 - self.beta2)
        denominator = v.sqrt().div_((1 - self.beta2**t) ** 0.5).add_(self.eps)
        size = lr / (1 - self.beta1**t)
        if isinstance(size, Tensor):
            return torch.addcdiv(x, m * size.to(m.dtype), denominator, value=-1), (m, v, count + 1)
        return torch.addcdiv(x, m, denominator, value=-size), (m, v, count + 1)


Optimizer = SGD | Adam
