"""Clients stepped together: the formulas on stacks, stacks against the loop for every method, faults, the choice."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import qupel
from qupel.core.optim import SGD, Adam
from qupel.core.prox import RULES, prox_centers, prox_weights
from qupel.core.quantize import assign, center_gradient, counts, hard, pick, soft_at, soft_gradient, steepness
from qupel.core.schedule import Follow, Schedule, Travel
from qupel.data.sources import from_arrays
from qupel.engine import choice, stack
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.choice import choose
from qupel.engine.inline import Inline
from qupel.engine.rounds import Stopped, run
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.run import config as configs
from qupel.run import experiment
from qupel.tasks import zoo as models
from qupel.tasks.stack import StackTask
from qupel.tasks.task import ModuleTask
from qupel.util.errors import UserError
from qupel.util.files import read_json
from tiny import (
    CLASSES,
    Drops,
    beginning,
    blobs,
    bomb,
    final_models,
    make_job,
    mlp,
    norm_net,
    recipe,
    run_inline,
    same,
    timeless,
)

SIZES = (12, 5, 30, 8, 12, 12, 3, 40)


# --- formulas ---


def one_by_one(f, *stacks):
    return torch.stack([f(*rows) for rows in zip(*stacks, strict=True)])


@st.composite
def layers(draw):
    """(x (k, n), centers (k, m), upstream (k, n)); some weights on their centers, some centers equal."""
    k, n, m = draw(st.integers(1, 4)), draw(st.integers(1, 60)), draw(st.sampled_from((1, 2, 3, 8, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x, upstream = (torch.from_numpy(rng.standard_normal((k, n), dtype=np.float32)) for _ in range(2))
    c = torch.from_numpy(rng.choice([-1.0, 0.5, *rng.standard_normal(9)], (k, m)).astype(np.float32)).sort().values
    piled = torch.from_numpy(rng.random((k, n)) < draw(st.sampled_from((0.0, 0.5, 1.0))))
    return torch.where(piled, hard(x, c), x), c, upstream


@settings(deadline=None, max_examples=40)
@given(layers(), st.sampled_from((0.0, 1e-3, 0.3, 5.0)), st.sampled_from(RULES), st.booleans())
def test_a_formula_on_a_stack_is_the_formula_on_each_client(layer, strength, rule, carry):
    x, c, upstream = layer
    m, codes = c.shape[-1], assign(x, c)
    assert torch.equal(codes, one_by_one(assign, x, c))
    assert torch.equal(hard(x, c), one_by_one(hard, x, c))
    assert torch.equal(counts(codes, m), one_by_one(lambda k: counts(k, m), codes))
    assert torch.equal(
        center_gradient(upstream, codes, m), one_by_one(lambda u, k: center_gradient(u, k, m), upstream, codes)
    )
    t = strength * torch.arange(len(x), dtype=torch.float64)[:, None]  # (k, 1); the first client's is 0
    assert torch.equal(prox_weights(x, c, t), one_by_one(lambda v, a, s: prox_weights(v, a, float(s)), x, c, t))
    mu, on = c + 0.1 * upstream[:, :1], x == pick(c, codes) if carry else torch.zeros_like(x, dtype=torch.bool)
    together = prox_centers(mu, c, x, t, rule, codes=codes, without=on)
    assert torch.equal(
        together,
        one_by_one(lambda a, b, v, s, k, o: prox_centers(a, b, v, float(s), rule, codes=k, without=o),
                   mu, c, x, t, codes, on),
    )  # fmt: skip
    # sums and transcendental functions may differ in their last bits
    P = steepness(c, 8.0)  # (k, 1)
    torch.testing.assert_close(soft_at(x, c, P), one_by_one(soft_at, x, c, P), atol=1e-6, rtol=1e-5)
    for i in range(2):
        found = soft_gradient(x, c, P, upstream)[i]
        each = one_by_one(lambda *rows: soft_gradient(*rows)[i], x, c, P, upstream)  # noqa: B023
        torch.testing.assert_close(found, each, atol=1e-4, rtol=1e-4)


def test_adam_on_a_stack_of_clients_that_differ_in_age():
    adam, rng = Adam(weight_decay=0.1), torch.Generator().manual_seed(0)
    x, g, m = torch.randn(3, 3, 5, generator=rng)
    memory = (m, m.square(), torch.tensor([[0.0], [3.0], [7.0]]))
    together, (_, _, count) = adam.step(x, g, memory, 0.1)
    each = one_by_one(lambda a, b, *c: adam.step(a, b, c, 0.1)[0], x, g, *memory)
    torch.testing.assert_close(together, each, atol=1e-7, rtol=1e-6)
    assert count.flatten().tolist() == [1, 4, 8]


class Net(nn.Module):
    """No chain: goes through vmap. A convolution, a scalar parameter, one that the loss does not use, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.scale = nn.Conv2d(1, 2, 3), nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(torch.tanh(self.conv(x.view(-1, 1, 4, 4)).flatten(1)))
        return self.head(self.fc(torch.relu(h)) * self.scale)


LINES = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Sequential(nn.Tanh(), nn.Linear(6, 5)), nn.Flatten(), nn.GELU())
LABELS, FLOATS = torch.randint(0, CLASSES, (3, 7)), torch.rand(3, 7, 20)


@pytest.mark.parametrize(
    ("module", "loss", "targets"),
    [
        (Net(), F.cross_entropy, LABELS),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)), F.cross_entropy, LABELS.where(LABELS > 0, -100)),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 20)), F.cross_entropy, FLOATS.softmax(-1)),
        (LINES, F.mse_loss, FLOATS),
        (LINES, F.binary_cross_entropy_with_logits, FLOATS),
    ],
    ids=["vmap", "labels left out", "soft labels", "regression", "multi-label"],
)
def test_gradients_of_a_stack(module, loss, targets):
    one, many = ModuleTask(module, loss), StackTask(module, loss)
    x = one.layout.flatten(module) + 0.1 * torch.randn(3, one.layout.size)
    inputs = torch.randn(3, 7, 4, 4)
    found = many.gradient(x, (inputs, targets))
    for i in range(3):
        alone = one.gradient(x[i], (inputs[i], targets[i]))
        torch.testing.assert_close(found.gradient[i], alone.gradient, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found.outputs[i], alone.outputs, atol=1e-6, rtol=1e-4)
        assert math.isclose(float(found.loss[i]), alone.loss, rel_tol=1e-5)
    asked = one.layout.slots[-1:]
    first = inputs[0], targets[0]
    for whole, part in (
        (found, many.gradient(x, (inputs, targets), asked)),
        (one.gradient(x[0], first), one.gradient(x[0], first, asked)),
    ):
        assert torch.equal(part.gradient[..., asked[0].slice], whole.gradient[..., asked[0].slice])
        assert not part.gradient[..., : asked[0].start].any()


# --- stack against loop ---


def quantizer(**changes) -> Prox:
    return Prox(**{"eta2": Schedule(1e-2), "lam": Travel(1.0), "lam_c": Follow(0.1)} | changes)


TUNING = QuPeL(lambda_p=Schedule(0.1), enters="free", quantizer=Frozen(center_gradient="mean", clip=0.5))
METHODS = {
    "recipe": recipe(),  # FedAvg, QuPeL, fine-tuning, with momentum
    "hard": [Phase(QuPeL(quantizer=quantizer()), 3), Phase(TUNING, 2)],
    "soft": [Phase(QuPeL(quantizer=quantizer(mode="soft", center_gradient="mean", clip=0.1)), 3)],
    "carry": [Phase(Local(optimizer=Adam(weight_decay=1e-3), quantizer=quantizer(carry=True, lam=Travel(30.0))), 4)],
    "first order": [
        Phase(Local(optimizer=SGD(momentum=0.9, nesterov=True), quantizer=quantizer(rule="first_order", lam_c=None)), 3)
    ],
    "as printed": [Phase(QuPeL(as_printed=True, quantizer=quantizer(rule="paper")), 3)],
    "adam": [Phase(FedAvg(optimizer=Adam()), 2), Phase(Local(optimizer=Adam(), quantizer=quantizer()), 3)],
    "proxquant": [Phase(Local(quantizer=ProxQuant()), 3), Phase(Local(quantizer=Frozen()), 2)],
    "binaryrelax": [
        Phase(Local(quantizer=BinaryRelax()), 2),
        Phase(Local(quantizer=BinaryRelax(lam=Schedule(math.inf))), 2),
    ],
    "posttraining": [Phase(Local(quantizer=Afterwards()), 3)],
    "fixed centers": [Phase(Local(quantizer=quantizer(eta2=Schedule(0.0))), 3)],
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "options", [{"bits": (1, 2, 32)}, {"sample": 0.5, "bits": (1, 2, 3, 4), "weighted": True}], ids=["all", "sampled"]
)
def test_stacks_give_what_the_loop_gives(monkeypatch, name, options):
    """Mixed bits, clients with fewer samples than a batch, stacks that are too small for all."""
    job = make_job(METHODS[name], sizes=SIZES, **options)
    monkeypatch.setattr(stack, "MOST", 3)
    (a, models), (b, others) = run_inline(job), run_inline(replace(job, stacked=True))
    torch.testing.assert_close(a.w[0], b.w[0], atol=1e-5, rtol=1e-4)
    for one, other in zip(models, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    for one, other in zip(a.lines, b.lines, strict=True):
        for key in ("train_loss", "train_loss_quantized"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4)
        assert one["upload_bytes"] == other["upload_bytes"]
        assert one["bits"] == other["bits"]


def test_normalization_and_few_uploads_at_a_time(monkeypatch):
    """BatchNorm goes through vmap; a rare kind of client may not make the others' uploads pile up."""
    monkeypatch.setattr(stack, "HELD", 1)
    monkeypatch.setattr(stack, "MOST", 2)
    net = norm_net()
    net[3] = nn.Identity()  # no dropout
    job = make_job(recipe(), module=net, sizes=(12,) * 7, bits=(2, 1, 1, 1, 1, 1, 1))
    (a, models), (b, others) = run_inline(job), run_inline(replace(job, stacked=True))
    torch.testing.assert_close(a.w[0], b.w[0], atol=1e-4, rtol=1e-3)
    for one, other in zip(models, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


def test_augmented_images_are_the_same_in_a_stack():
    module = models.build("mlp", (1, 8, 8), 10, seed=0)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 1, 8, 8), np.uint8), rng.integers(0, 10, 40)
    data = from_arrays(images, labels, images[:4], labels[:4])
    job = make_job([Phase(FedAvg(), 2)], module=module, data=(data, blobs((10,) * 4, test=1)[1]), bits=(32,))
    job = replace(job, transform=replace(job.transform, augment=True))
    (a, _), (b, _) = run_inline(job), run_inline(replace(job, stacked=True))
    torch.testing.assert_close(a.w[0], b.w[0], atol=1e-5, rtol=1e-4)


def test_a_client_that_diverges_is_refused_and_the_others_do_not_notice():
    data, parts = blobs((12,) * 6)
    inputs = data.train.inputs.clone()
    inputs[parts[2].train_rows] *= 1e30
    sick = from_arrays(inputs, data.train.targets, data.test.inputs, data.test.targets, classes=CLASSES), parts
    job = make_job(recipe(1, 2, 1), data=sick, bits=(2,), evaluate_every=1)
    (a, models), (b, others) = run_inline(job), run_inline(replace(job, stacked=True))
    for one, other in zip(a.lines, b.lines, strict=True):
        assert one["refused"] == other["refused"]
        assert len(one["refused"]) == 1
        assert "client 2: round" in one["refused"][0]
        assert "the loss is nan" in one["refused"][0]
    torch.testing.assert_close(a.w[0], b.w[0], atol=1e-5, rtol=1e-4)
    for one, other in zip(models, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def steep(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1e3 * F.cross_entropy(outputs, targets)


def test_a_state_that_is_not_finite_is_refused_in_a_stack():
    """The loss is finite, the step is not: eta1 is beyond all numbers."""
    job = make_job([Phase(FedAvg(eta1=Schedule(3e38)), 1)], local_steps=1, stacked=True, loss=steep)
    with Inline(job) as engine:
        w = beginning(job).w
        for done in engine.train(0, w, range(4)):
            assert done.upload is None
            assert done.fault == "round 1: upload holds values that are not finite"
            assert engine.shard.store.get(done.client, w[0]) is None


# --- the choice ---


class Counts(nn.Module):
    """Not a function of weights and batch: what it gives depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * self.calls


def many(phases=None, **options):
    return make_job(phases or recipe(1, 2, 1), sizes=(12,) * choice.LEAST, bits=(2, 1), **options)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (make_job(recipe()), "4 clients a round, fewer than 32"),
        (many(module=Drops()), "draws random numbers"),
        (many(module=norm_net()), "draws random numbers"),
        (many(loss=bomb), "data-dependent control flow"),
        (many(module=Counts()), "other gradients"),
    ],
    ids=["few", "dropout by a call", "dropout layer", "a loss that branches", "a module with a memory"],
)
def test_what_cannot_be_stacked_is_told(job, why):
    found = choose(job, "auto")
    assert not found.stacked
    assert found.ratio is None
    assert why in found.why
    if "fewer" not in why:
        with pytest.raises(UserError, match='vectorize = "on"'):
            choose(job, "on")


def test_a_large_model_is_not_even_measured(monkeypatch):
    monkeypatch.setattr(stack, "STACK", 100)
    assert "has work enough" in choose(many(), "auto").why


@pytest.mark.parametrize(("gain", "stacked"), [(0.0, True), (1e9, False)])
def test_the_measurement_decides_once_and_is_recorded(monkeypatch, tmp_path, gain, stacked):
    monkeypatch.setattr(choice, "GAIN", gain)
    before = torch.get_rng_state()
    job, found = choice.settled(many(), "auto", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert job.stacked == found.stacked == stacked
    assert found.ratio > 0
    assert f"{found.ratio:.2f}" in found.why
    monkeypatch.setattr(choice, "choose", None)  # not asked again
    assert choice.settled(many(), "auto", tmp_path)[1] == found
    assert json.loads((tmp_path / "engine.json").read_text())["stacked"] == stacked


def test_a_stacked_run_resumes_to_the_same_bits(tmp_path):
    job = make_job(recipe(), sizes=SIZES, sample=0.6, stacked=True)
    whole, models = run_inline(job)
    for stop in (1, 3, 7):
        (tmp_path / str(stop)).mkdir()
        checkpoints = Checkpoints(tmp_path / str(stop), "x")
        asked = iter(range(stop - 1))
        with Inline(job) as engine, pytest.raises(Stopped):
            run(job, engine, checkpoints=checkpoints, should_stop=lambda: next(asked, None) is None)  # noqa: B023
        with Inline(job) as engine:
            rest = run(job, engine, checkpoints=checkpoints)
            others = final_models(job, engine, rest.w)
        assert same(rest.w, whole.w)
        assert same(models, others)
        assert timeless(rest.lines) == timeless(whole.lines)


CONFIG = """
rounds = 3
local_steps = 2
batch = 4
save_models = false
model.name = "mlp"
data.limit = 200
split = {kind = "iid", clients = 32, train_per_client = 4, test_per_client = 1}
[methods.QuPeL]
recipe = "qupel-prox"
warmup = 0.4
finetune = 0.3
"""


def test_a_run_says_how_its_clients_were_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "GAIN", 0.0)
    (result,) = experiment.run_experiment(configs.parse(CONFIG, "c"), tmp_path)
    assert result["engine"]["stacked"]
    assert result["engine"]["ratio"] > 0
    assert result["engine"] == read_json(tmp_path / "cells" / "QuPeL-s0" / "engine.json")
    assert len(list(tmp_path.rglob("engine.json"))) == 2  # the warm-up's is its own


def test_fit_takes_the_setting():
    rng = np.random.default_rng(0)
    people = [(rng.standard_normal((6, 6), np.float32), rng.integers(0, CLASSES, 6)) for _ in range(3)]
    options = {"rounds": 1, "local_steps": 2, "method": "fedavg"}
    with pytest.raises(UserError, match="draws random numbers"):
        qupel.fit(norm_net(), people, vectorize="on", **options)
    fits = [qupel.fit(mlp(), people, vectorize=v, **options) for v in ("on", "off", "auto")]
    assert [f.engine.stacked for f in fits] == [True, False, False]
    on, off, auto = (torch.cat([p.flatten() for p in f.global_model.parameters()]) for f in fits)
    assert torch.equal(off, auto)
    torch.testing.assert_close(on, off, atol=1e-6, rtol=1e-5)
