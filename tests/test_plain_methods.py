"""Rounds of the methods people compare with, as one writes them in plain PyTorch from their papers' formulas alone:
parameters by name, autograd's own .grad, lists of clients. Nothing is shared with ours but the data."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qupel.core.layout import Layout
from qupel.core.schedule import Schedule
from qupel.data.batches import rows
from qupel.parts.methods.apfl import APFL
from qupel.parts.methods.fedbn import FedBN
from qupel.parts.methods.feddyn import FedDyn
from qupel.parts.methods.fedper import FedPer
from qupel.parts.methods.fedrep import FedRep
from qupel.parts.methods.l2gd import L2GD
from qupel.parts.methods.perfedavg import PerFedAvg
from qupel.parts.methods.pfedme import PFedMe
from qupel.parts.methods.scaffold import Scaffold
from qupel.parts.phase import Phase
from qupel.parts.quantizers.none import NoQuantizer
from tiny import make_job, mlp, run_inline

ROUNDS, STEPS, BATCH, SIZES, ETA = 3, 4, 6, (14, 9, 20), 0.2


class World:
    """A federation in plain torch: models are dictionaries of tensors."""

    def __init__(self, job, module):
        self.job, self.module = job, module
        self.first = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.clients = range(len(SIZES))

    def batch(self, client, step):
        owned = self.job.parts[client].train_rows
        picked = torch.as_tensor(owned[rows(self.job.seed, client, step, len(owned), BATCH)])
        return self.job.data.train.inputs[picked], self.job.data.train.targets[picked]

    def batches(self, client, round):
        return [self.batch(client, round * STEPS + k) for k in range(STEPS)]

    def grad(self, model, batch):
        leaves = {name: p.clone().requires_grad_() for name, p in model.items()}
        F.cross_entropy(torch.func.functional_call(self.module.train(), leaves, (batch[0],)), batch[1]).backward()
        return {name: p.grad for name, p in leaves.items()}

    def zeros(self):
        return {name: torch.zeros_like(p) for name, p in self.first.items()}


def plus(a, b, factor=1.0):
    return {name: a[name] + factor * b[name] for name in a}


def minus(a, b):
    return plus(a, b, -1.0)


def mean(models):
    return {name: sum(m[name] for m in models) / len(models) for name in models[0]}


def dot(a, b):
    return float(sum((a[name] * b[name]).sum() for name in a))


def sgd(world, model, batch, eta=ETA):
    return plus(model, world.grad(model, batch), -eta)


def perfedavg(world, hessian):
    """(w, the models shipped): a = 0.1, halves of six samples."""
    w, a, d = world.first, 0.1, 1e-2
    for r in range(ROUNDS):
        own = []
        for i in world.clients:
            x = w
            for inputs, targets in world.batches(i, r):
                near, far = (inputs[:3], targets[:3]), (inputs[3:], targets[3:])
                v = world.grad(sgd(world, x, near, a), far)
                if hessian:
                    unit = d / dot(v, v) ** 0.5
                    bend = minus(world.grad(plus(x, v, unit), near), world.grad(plus(x, v, -unit), near))
                    v = plus(v, bend, -a / (2 * unit))
                x = plus(x, v, -ETA)
            own.append(x)
        w = mean(own)
    return w, [sgd(world, w, world.batch(i, ROUNDS * STEPS), a) for i in world.clients]


def apfl(world, adaptive):
    w, v, a = world.first, [world.first] * len(SIZES), [0.5] * len(SIZES)

    def mixed(i, own):
        return {name: a[i] * v[i][name] + (1 - a[i]) * own[name] for name in own}

    for r in range(ROUNDS):
        uploads = []
        for i in world.clients:
            own = w
            for batch in world.batches(i, r):
                g = world.grad(mixed(i, own), batch)
                slope = dot(g, minus(v[i], own))
                v[i], own = plus(v[i], g, -ETA * a[i]), sgd(world, own, batch)
                if adaptive:
                    a[i] = min(max(a[i] - ETA * slope, 0.0), 1.0)
            uploads.append(own)
        w = mean(uploads)
    assert not adaptive or min(a) != 0.5
    return w, [mixed(i, w) for i in world.clients]


def l2gd(world):
    w, x = world.first, [world.first] * len(SIZES)
    for r in range(ROUNDS):
        for i in world.clients:
            x[i] = plus(x[i], minus(w, x[i]), 0.3)
            for batch in world.batches(i, r):
                x[i] = sgd(world, x[i], batch)
        w = mean(x)
    return w, [plus(v, minus(w, v), 0.3) for v in x]


def split(world, own, turns):
    """FedPer and FedBN, and with turns (2 of the head, 2 of the body) FedRep. own: the names that stay at home."""
    w, x = world.first, [world.first] * len(SIZES)
    for r in range(ROUNDS):
        for i in world.clients:
            x[i] = {name: x[i][name] if name in own else w[name] for name in w}
            for k, batch in enumerate(world.batches(i, r)):
                moved = sgd(world, x[i], batch)
                now = [n for n in w if not turns or (n in own) == (k < 2)]
                x[i] = {name: moved[name] if name in now else x[i][name] for name in w}
        w = {name: world.first[name] if name in own else p for name, p in mean(x).items()}
    return w, [{name: v[name] if name in own else w[name] for name in w} for v in x]


def feddyn(world):
    theta, h, g, alpha = world.first, world.zeros(), [world.zeros() for _ in SIZES], 0.1
    for r in range(ROUNDS):
        own = []
        for i in world.clients:
            t = theta
            for batch in world.batches(i, r):
                t = plus(t, plus(minus(world.grad(t, batch), g[i]), minus(t, theta), alpha), -ETA)
            g[i] = plus(g[i], minus(t, theta), -alpha)
            own.append(t)
        h = plus(h, minus(mean(own), theta), -alpha)
        theta = plus(mean(own), h, -1 / alpha)
    return theta, [theta] * len(SIZES)


def pfedme(world):
    """w_i <- w_i - 0.1 (w_i - theta), theta by five steps on f + |theta - w_i|^2 / 2 from w_i."""
    w, shipped = world.first, [world.first] * len(SIZES)
    for r in range(ROUNDS):
        uploads = []
        for i in world.clients:
            own = w
            for batch in world.batches(i, r):
                theta = own
                for _ in range(5):
                    theta = plus(theta, plus(world.grad(theta, batch), minus(theta, own)), -ETA)
                own = plus(own, minus(own, theta), -0.1)
                shipped[i] = theta
            uploads.append(own)
        w = mean(uploads)
    return w, shipped


def scaffold(world):
    w, c, own = world.first, world.zeros(), [world.zeros() for _ in SIZES]
    for r in range(ROUNDS):
        models, controls = [], []
        for i in world.clients:
            y = w
            for batch in world.batches(i, r):
                y = plus(y, plus(minus(world.grad(y, batch), own[i]), c), -ETA)
            models.append(y)
            controls.append(plus(minus(own[i], c), minus(w, y), 1 / (STEPS * ETA)))
        c = plus(c, mean([minus(new, old) for new, old in zip(controls, own, strict=True)]))
        w, own = mean(models), controls
    return w, [w] * len(SIZES)


def small_norm_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


HEAD = {"4.weight", "4.bias"}
CASES = {
    "perfedavg": (PerFedAvg(alpha=0.1), lambda world: perfedavg(world, hessian=False), mlp),
    "perfedavg-hf": (PerFedAvg(alpha=0.1, kind="hessian-free"), lambda world: perfedavg(world, hessian=True), mlp),
    "apfl": (APFL(), lambda world: apfl(world, adaptive=True), mlp),
    "apfl-fixed": (APFL(adaptive=False), lambda world: apfl(world, adaptive=False), mlp),
    "l2gd": (L2GD(), l2gd, mlp),
    "fedper": (FedPer(), lambda world: split(world, HEAD, turns=False), mlp),
    "fedrep": (FedRep(head_steps=2, body_steps=2), lambda world: split(world, HEAD, turns=True), mlp),
    "fedbn": (FedBN(), lambda world: split(world, {"1.weight", "1.bias"}, turns=False), small_norm_net),
    "feddyn": (FedDyn(), feddyn, mlp),
    "pfedme": (PFedMe(), pfedme, mlp),
    "scaffold": (Scaffold(), scaffold, mlp),
}


@pytest.mark.parametrize("stacked", [False, True], ids=["loop", "stack"])
@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_plain_pytorch(case, stacked):
    method, plain, network = CASES[case]
    method = replace(method, eta1=Schedule(ETA), quantizer=NoQuantizer())
    settings = {"sizes": SIZES, "bits": (32,), "batch": BATCH, "local_steps": STEPS, "module": network()}
    job = make_job([Phase(method, ROUNDS)], **settings, stacked=stacked)
    finished, models = run_inline(job)
    world = World(job, network())
    w, shipped = plain(world)
    slots = Layout.of(network()).slots
    for slot in slots:
        torch.testing.assert_close(slot.view(finished.w[0]), w[slot.name], rtol=1e-4, atol=1e-5)
        for got, expected in zip(models, shipped, strict=True):
            torch.testing.assert_close(slot.view(got), expected[slot.name], rtol=1e-4, atol=1e-5)
    assert max(float((w[s.name] - world.first[s.name]).abs().max()) for s in slots) > 0.05
