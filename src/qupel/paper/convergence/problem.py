"""The problems that the theorems run on: digits in a few whitened features, softmax regression or a small tanh network,
in float64 and full batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.core.schedule import Schedule
from qupel.data import sources
from qupel.data.batches import generator
from qupel.paper.convergence.config import ProblemConfig
from qupel.paper.diagnostics import ClientLoss
from qupel.paper.theory import LossConstants, estimate_constants, regression_constants
from qupel.parts.base import State
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, ModuleTask
from qupel.util.errors import UserError

Arrays = tuple[Tensor, Tensor]  # inputs (N, p), labels (N,)


@dataclass(frozen=True, eq=False)
class Problem:
    """Clients' losses, where all of them start, what is quantized, and the constants that hold for every client."""

    config: ProblemConfig
    layout: Layout
    plan: Plan
    x: Tensor  # (d,)
    losses: Sequence[ClientLoss]
    constants: LossConstants

    @property
    def sizes(self) -> list[int]:
        return [self.layout[name].size for name in self.plan]

    @property
    def free(self) -> int:
        return self.layout.size - sum(self.sizes)

    @property
    def span(self) -> float:
        return 2 * self.config.center_bound

    def quantizer(self) -> Prox:
        return Prox(lam=Schedule(self.config.lam), mode="soft", P=self.config.P, init="quantile")

    def start(self) -> State:
        return State(self.x, self.x)


def build(config: ProblemConfig, shares: Sequence[float] = (0.0,)) -> Problem:
    """One client for each share: `samples` rows, of which the share is of one class of its own (client i: class i) and
    the rest is common to all clients. One client with share 0 is the centralized problem."""
    clients = [_rows(config, i, share) for i, share in enumerate(shares)]
    module = _network(config)
    layout = Layout.of(module, torch.float64)
    plan = plan_bits(layout, config.bits, config.layers or layout.weights)
    losses = [
        ClientLoss(ModuleTask(module, F.cross_entropy, torch.float64), [Batch(*rows)], config.mu) for rows in clients
    ]
    x = layout.flatten(module)
    if config.hidden:
        found = [_estimate(config, loss, layout, plan, x) for loss in losses]
    else:
        found = [
            regression_constants(inputs, "softmax", config.mu, config.center_bound, config.classes)
            for inputs, _ in clients
        ]
    constants = LossConstants(max(c.L for c in found), max(c.G for c in found))
    return Problem(config, layout, plan, x, losses, constants)


def _rows(config: ProblemConfig, client: int, share: float) -> Arrays:
    inputs, labels = _digits(config.classes, config.features)
    rng = generator(config.seed, "theory", 0)
    own = round(share * config.samples)
    if own and client >= config.classes:
        raise UserError(f"client {client} has no class of its own: there are {config.classes} classes")
    common = rng.choice(len(labels), config.samples - own, replace=False)
    mine = np.flatnonzero(labels.numpy() == client)
    if own > len(mine):
        raise UserError(f"samples = {config.samples}: class {client} has only {len(mine)}")
    rows = torch.from_numpy(np.concatenate([common, mine[:own]]).astype(np.int64))
    return inputs[rows], labels[rows]


def _digits(classes: int, features: int) -> Arrays:
    """scikit-learn's digits of the first classes in whitened principal components: mean 0, covariance 1."""
    train = sources.load("digits").train
    inputs, targets, _ = train.read(slice(0, len(train)))
    keep = targets < classes
    a = inputs[keep].flatten(1).double()
    u, _, _ = torch.linalg.svd(a - a.mean(0), full_matrices=False)
    return u[:, :features] * len(u) ** 0.5, targets[keep]


def _network(config: ProblemConfig) -> nn.Module:
    sizes = [config.features, *config.hidden, config.classes]
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def _estimate(config: ProblemConfig, loss: ClientLoss, layout: Layout, plan: Plan, x: Tensor) -> LossConstants:
    """Constants from random points: quantized weights uniform between the bounds of the centers, the rest normal."""
    rng = torch.Generator().manual_seed(config.seed)

    def point() -> Tensor:
        v = x + torch.randn(x.shape, generator=rng, dtype=x.dtype) / 2
        for name in plan:
            low = torch.rand(layout[name].size, generator=rng, dtype=x.dtype)
            v[layout[name].slice] = (2 * low - 1) * config.center_bound
        return v

    return estimate_constants(loss.at, [x, *(point() for _ in range(config.points))], config.safety, config.seed)
