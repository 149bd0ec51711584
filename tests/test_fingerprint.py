"""The one digest: the same for the same run in any process, another for another one."""

import copy
import functools
import os
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qupel.core.codebook import Plan
from qupel.data.batches import Transform
from qupel.engine.accounting import Budget
from qupel.engine.fingerprint import of_job
from qupel.paper.diagnostics import Diagnostics
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.phase import Phase
from qupel.tasks.metrics import top5
from tiny import blobs, make_job, mlp, norm_net, recipe, wide_mlp

FACTOR = 2.0


class Scaled(nn.Module):
    """A number, a function and a global that no parameter and no `extra_repr` shows."""

    def __init__(self, scale=1.0, act=F.relu):
        super().__init__()
        self.net, self.scale, self.act = mlp(), scale, act
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, x):
        return FACTOR * self.scale * self.act(self.net(x)) + self.shift


class Doubled(Scaled):
    def forward(self, x):
        return 2 * super().forward(x)


def smoothed(outputs, targets, smoothing=0.0):
    return F.cross_entropy(outputs, targets, label_smoothing=smoothing)


def halved(outputs, targets):
    return smoothed(outputs, targets) / 2


def weighted(weight):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, weight=weight)

    return loss


def job(module=None, **settings):
    return make_job(recipe(), module=module, **settings)


def digest_of_scaled():
    return of_job(job(Scaled(), loss=halved))


def dropout(p):
    net = norm_net()
    net[3].p = p
    return net


def changed(module, change):
    module = copy.deepcopy(module)
    change(module)
    return module


def tie(module):
    module[0].bias = module[2].bias


def same_numbers(module):
    with torch.no_grad():
        module[0].bias.copy_(module[2].bias)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (mlp, lambda: changed(mlp(), lambda m: m.__setitem__(1, nn.Tanh()))),
        (lambda: dropout(0.2), lambda: dropout(0.3)),
        (Scaled, lambda: Scaled(scale=1.5)),
        (Scaled, lambda: Scaled(act=F.gelu)),
        (Scaled, lambda: Scaled(act=lambda x: x)),
        (lambda: Scaled(act=lambda x: x), lambda: Scaled(act=lambda x: -x)),
        (Scaled, Doubled),
        (Scaled, lambda: changed(Scaled(), lambda m: m.shift.add_(1))),
        (mlp, lambda: mlp(1)),
        (mlp, lambda: changed(mlp(), lambda m: m[2].bias.requires_grad_(False))),
        (lambda: changed(mlp(), same_numbers), lambda: changed(mlp(), tie)),
        (mlp, lambda: changed(mlp(), lambda m: m[0].register_forward_hook(lambda *a: a[-1] * 2))),
    ],
)
def test_models(one, other):
    first, second = of_job(job(one())), of_job(job(other()))
    assert first != second
    assert (of_job(job(copy.deepcopy(one()))), of_job(job(other()))) == (first, second)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
LOSSES = {
    "cross entropy": F.cross_entropy,
    "of ones own": smoothed,
    "that calls one": halved,
    "with a setting": functools.partial(smoothed, smoothing=0.1),
    "with another": functools.partial(smoothed, smoothing=0.2),
    "a module": nn.CrossEntropyLoss(),
    "a module with a setting": nn.CrossEntropyLoss(label_smoothing=0.1),
    "a module with weights": nn.CrossEntropyLoss(WEIGHTS),
    "a closure": weighted(WEIGHTS),
    "a closure over others": weighted(WEIGHTS.flip(0)),
}


def test_losses():
    found = {name: of_job(job(loss=loss)) for name, loss in LOSSES.items()}
    assert len(set(found.values())) == len(LOSSES)
    assert of_job(job(loss=weighted(WEIGHTS.clone()))) == found["a closure"]


def test_what_a_function_reads_from_outside(monkeypatch):
    before = of_job(job(Scaled())), of_job(job(loss=halved))
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert of_job(job(Scaled())) != before[0]
    monkeypatch.setitem(globals(), "smoothed", lambda outputs, targets: F.cross_entropy(outputs, targets) ** 2)
    assert of_job(job(loss=halved)) != before[1]


CHANGES = {
    "module": mlp(1),
    "loss": F.multi_margin_loss,
    "data": blobs(seed=1)[0],
    "parts": blobs()[1][::-1],
    "plans": [Plan()] * 4,
    "phases": [Phase(FedAvg(), 8)],
    "seed": 1,
    "local_steps": 4,
    "batch": 5,
    "epoch_steps": 7,
    "sample": 0.5,
    "sampling": "poisson",
    "budget": Budget(1e-5),
    "secret": 1,
    "weighted": True,
    "evaluate_every": 3,
    "evaluate_sample": 0.5,
    "on_bad_upload": "stop",
    "upload_bound": 10.0,
    "transform": Transform(torch.tensor([0.5]), torch.tensor([0.5])),
    "transforms": [Transform(torch.tensor([0.5]), torch.tensor([0.5]))] * 4,
    "names": ("a", "b", "c", "d"),
    "diagnostics": Diagnostics("cheap"),
    "networks": {"wide": wide_mlp()},
    "network": ("", "", "", ""),
    "metrics": {"top5": top5},
    "judge_by": "loss",
}


def test_every_setting_of_a_job_counts():
    base = job()
    no_result_depends_on = {"checkpoint_every", "stacked"}
    assert CHANGES.keys() == {f.name for f in fields(base)} - no_result_depends_on
    found = [of_job(replace(base, **{name: value})) for name, value in CHANGES.items()]
    assert len({of_job(base), *found}) == 1 + len(CHANGES)
    assert of_job(replace(base, checkpoint_every=5, stacked=True)) == of_job(base)


def test_test_data_count():
    data, parts = blobs()
    inputs = data.test.inputs.clone()
    inputs[3, 2] += 1e-3
    other = replace(data, test=replace(data.test, inputs=inputs))
    assert of_job(job(data=(data, parts))) != of_job(job(data=(other, parts)))


def test_another_process_finds_the_same():
    """Whatever the seed of Python's hashes, and wherever things lie in memory."""
    code = "import test_fingerprint as t; print(t.digest_of_scaled())"
    tests = os.path.dirname(__file__)
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == digest_of_scaled()


class Odd:
    """An object that holds itself, a generator, a set and numbers of numpy."""

    def __init__(self):
        self.me, self.rng, self.known, self.n = self, np.random.default_rng(0), {"a", "b"}, np.float32(1.5)
        self.mixed = np.array(["a", None], object)

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


def test_odd_objects_are_no_obstacle():
    other = Odd()
    other.known = {"a", "c"}
    assert of_job(job(loss=Odd())) == of_job(job(loss=Odd())) != of_job(job(loss=other))
