"""FedAvg's and QuPeL's local work as one writes them in plain PyTorch: parameters by name, formula by formula."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from work import Work

from qupel.core.layout import Layout

Named = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]
loss_of = nn.functional.cross_entropy


def sgd_round(module: nn.Module, batches: Batches, eta: float) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=eta)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(module(inputs), targets).backward()
        optimizer.step()


def first_state(module: nn.Module, bits: int) -> tuple[Named, Named]:
    """A client's model and centers at the start: evenly from a layer's least weight to its largest."""
    x = {name: p.detach().clone() for name, p in module.named_parameters()}
    quantized = Layout.of(module).default_layers()
    return x, {name: torch.linspace(float(x[name].min()), float(x[name].max()), 2**bits) for name in quantized}


def gradients(module: nn.Module, values: Named, inputs: Tensor, targets: Tensor) -> Named:
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(values[name])
    module.zero_grad()
    loss_of(module(inputs), targets).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def qupel_round(module: nn.Module, x: Named, w: Named, centers: Named, batches: Batches, work: Work) -> None:
    """tau steps of Algorithm 2; x, w and centers are changed in place."""
    for inputs, targets in batches:
        g = gradients(module, x, inputs, targets)
        codes = {}
        with torch.no_grad():
            for name in x:
                x[name] -= work.eta1 * (g[name] + work.lambda_p * (x[name] - w[name]))
            for name, c in centers.items():
                codes[name] = (x[name].unsqueeze(-1) - c).abs().argmin(-1)
                q = c[codes[name]]
                x[name] = q + nn.functional.softshrink(x[name] - q, work.eta1 * work.lam / 2)
        quantized = x | {name: c[codes[name]] for name, c in centers.items()}
        g = gradients(module, quantized, inputs, targets)
        with torch.no_grad():
            for name, c in centers.items():
                h = torch.zeros_like(c).index_add_(0, codes[name].flatten(), g[name].flatten())
                centers[name] = prox_centers(c - work.eta2 * h, x[name], codes[name], work.eta2 * work.lam / 2)
            for name in w:
                w[name] += work.share * (x[name] - w[name])


def prox_centers(mu: Tensor, x: Tensor, codes: Tensor, kappa: float) -> Tensor:
    """The median of a center's weights and of mu + kappa (n - 2k), k = 0..n."""
    moved = []
    for j, m in enumerate(mu):
        near = x[codes == j]
        n = len(near)
        moved.append(torch.cat([near, m + kappa * (n - 2 * torch.arange(n + 1))]).median())
    return torch.stack(moved).sort().values
