"""Diagnostics tell the truth (brute force, autograd) and change nothing."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from qupel import cli
from qupel.core.codebook import plan_bits
from qupel.core.optim import SGD
from qupel.core.schedule import Clock, Schedule, Travel, half_gap, travelled, weight_pull
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.engine.workers import Pool, Workers
from qupel.paper.diagnostics import (
    NO_BATCH,
    ClientLoss,
    Diagnostics,
    decrease,
    gradients,
    lambda_p,
    objective,
    sketch,
    spread,
)
from qupel.parts.base import State
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import ModuleTask, Problem
from tiny import QUANTIZER, blobs, final_models, make_job, mlp, norm_net, recipe, run_inline, same, timeless

ONE = Clock(0, 1, 1)
SOFT = Prox(eta2=Schedule(0.002), lam=Schedule(0.05), mode="soft", P=3.0)


def told(lines):
    return [line["diagnostics"] for line in lines]


# --- F and G ---


def client(method, seed: int = 0, steps: int = 3):
    """(loss in float64, state after a few steps, w beside its w_i)."""
    data, _ = blobs((20,), seed=seed)
    module = mlp(seed).double()
    task = ModuleTask(module, F.cross_entropy, torch.float64)
    f = ClientLoss(task, [(data.train.inputs[:8].double(), data.train.targets[:8])], mu=0.1)
    x = task.layout.flatten(module)
    s = method.start(State(x, x + 0.1), plan_bits(task.layout, 2), Problem(f, f))
    for _ in range(steps):
        s, _ = method.step(s, Problem(f, f), NO_BATCH, ONE)
    return f, s, s.w - 0.05


METHODS = [
    Local(eta1=Schedule(0.05), quantizer=SOFT),
    QuPeL(eta1=Schedule(0.05), lambda_p=Schedule(0.3), eta3=Schedule(0.5), quantizer=SOFT),
    QuPeL(eta1=Schedule(0.05), lambda_p=Schedule(0.3), eta3=Schedule(0.5), quantizer=replace(SOFT, mode="hard")),
]


@pytest.mark.parametrize("method", METHODS[:2], ids=["local", "qupel"])
def test_G_is_the_gradient_of_F(method):
    """Autograd through F at (x+, c, w) and (x+, c+, w), at coordinates where R has a derivative."""
    f, s, w = client(method)
    after, _ = method.step(s, Problem(f, f), NO_BATCH, ONE)
    tie = lambda_p(method, ONE)
    (slot,) = s.codebook.slots
    module = mlp().double()
    names = [name for name, _ in module.named_parameters()]
    layout = f.task.layout

    def loss(v):
        values = {name: layout[name].view(v) for name in names}
        inputs, targets = f.batches[0]
        return F.cross_entropy(torch.func.functional_call(module, values, inputs), targets) + 0.05 * v @ v

    def F_of(x, c):
        k = s.codebook.assign(after.x)[0]  # the assignments of the step
        q = method.quantizer.quantized(x, s.codebook.with_centers([c]))
        R = (x[slot.slice] - c[k]).abs().sum() / 2
        return loss(x) + loss(q) + 0.05 * R + tie / 2 * (x - w).square().sum()

    x, c = after.x.clone().requires_grad_(), s.codebook.centers[0]
    (in_x,) = torch.autograd.grad(F_of(x, c), x)
    found = gradients(method, s, after, w, f, ONE)
    on = torch.zeros_like(in_x, dtype=torch.bool)
    nearest = s.codebook.nearest(after.x).q
    on[slot.slice] = (after.x == nearest)[slot.slice]  # there any number up to lambda/2 will do
    assert float(in_x[~on].square().sum()) <= found.x + 1e-12
    assert found.x <= float((in_x.abs() + 0.025 * on).square().sum()) + 1e-12
    c_after = after.codebook.centers[0].clone().requires_grad_()
    (in_c,) = torch.autograd.grad(F_of(after.x, c_after), c_after)
    sitting = (after.x[slot.slice, None] == c_after).sum(0)  # weights on a center: each gives any number up to lambda/2
    assert float(in_c[sitting == 0].square().sum()) <= found.c + 1e-12
    assert found.c <= float((in_c.abs() + 0.025 * sitting).square().sum()) + 1e-12
    assert (sitting == 0).any()
    assert found.w == pytest.approx(tie**2 * float((w - after.x).square().sum()))
    assert objective(method.quantizer, s.x, s.codebook, f, [0.05], tie, w) == pytest.approx(
        float(f.value(s.x) + f.value(method.quantizer.quantized(s.x, s.codebook)))
        + 0.05 * float((s.x - s.codebook.hard(s.x)).abs().sum()) / 2
        + tie / 2 * float((s.x - w).square().sum())
    )


def test_a_client_loss_is_the_mean_over_batches_and_remembers():
    module, (data, _) = mlp().double(), blobs((20,))
    task = ModuleTask(module, F.cross_entropy, torch.float64)
    inputs, targets = data.train.inputs.double(), data.train.targets
    whole = ClientLoss(task, [(inputs, targets)], mu=0.2)
    parts = ClientLoss(task, [(inputs[:13], targets[:13]), (inputs[13:], targets[13:])], mu=0.2)
    x = task.layout.flatten(module)
    assert torch.allclose(whole.at(x), parts.at(x))
    assert whole.value(x) == pytest.approx(parts.value(x))
    whole.gradient(x, NO_BATCH).gradient.zero_()  # what a method writes into its gradient stays its own
    assert torch.allclose(whole.at(x), parts.at(x))
    assert len(parts.known) == 1


@pytest.mark.parametrize("lam", [Schedule(growth=0.01), Travel(1.5)])
def test_travel_is_the_sum_of_the_steps(lam):
    c, eta1 = torch.tensor([-0.3, 0.1, 0.7]), Schedule(0.1, cosine=4)
    clock = Clock(11, 20, 5)
    moved = sum(weight_pull(lam, eta1, Clock(t, 20, 5), c) / 2 for t in range(12))
    assert travelled(lam, eta1, clock, c) == pytest.approx(moved / half_gap(c))
    assert travelled(Travel(1.5), eta1, Clock(19, 20, 5), c) == pytest.approx(1.5)


def test_a_sketch_keeps_the_spread_of_clients():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 20_000, generator=rng, dtype=torch.float64) * torch.linspace(0, 2, 20_000)
    exact = float((x - x.mean(0)).square().sum(1).mean())
    short = [sketch(v) for v in x]
    assert {len(s) for s in short} == {512}
    assert spread(short) == pytest.approx(exact, rel=0.04)
    few = x[:, :500]
    assert spread([sketch(v) for v in few]) == pytest.approx(
        float((few - few.mean(0)).square().sum(1).mean()), rel=1e-9
    )
    assert sketch(x[0] + 2 * x[1]) == pytest.approx([a + 2 * b for a, b in zip(short[0], short[1], strict=True)])


# --- runs ---


@pytest.mark.parametrize("mode", ["cheap", "full"])
def test_a_run_with_diagnostics_ends_with_the_same_bits(mode):
    for module in (mlp(), norm_net()):
        plain, watched = (make_job(recipe(), module=module, diagnostics=d) for d in (None, Diagnostics(mode)))
        (a, models), (b, others) = run_inline(plain), run_inline(watched)
        assert same(a.w, b.w)
        assert same(models, others)
        assert all(d["mode"] == mode for d in told(b.lines))
        stripped = [{k: v for k, v in line.items() if k != "diagnostics"} for line in b.lines]
        assert timeless(stripped) == timeless(a.lines)
        json.dumps(told(b.lines), allow_nan=False)


def test_workers_tell_the_same(tmp_path):
    job = make_job(recipe(), module=norm_net(), diagnostics=Diagnostics("cheap"))
    alone, _ = run_inline(job)
    with Pool(2) as pool:
        together = run(job, Workers(pool, job))
    assert told(together.lines) == told(alone.lines)
    assert told(alone.lines)[-1]["drift"] > 0


def test_numbers_against_the_states():
    """kappa, spread, distance and drift from the states themselves."""
    method = QuPeL(eta1=Schedule(0.1), lambda_p=Schedule(0.3), eta3=Schedule(1.0), quantizer=QUANTIZER)
    job = make_job([Phase(method, 2)], bits=(2,), diagnostics=Diagnostics("cheap"))
    with Inline(job) as engine:
        finished = run(job, engine)
        states = [engine.shard.state(i, 0, finished.w) for i in range(4)]
    (line,) = told(finished.lines)
    x = torch.stack([s.x for s in states]).double()
    spread = (x - x.mean(0)).square().sum(1).mean()
    assert line["spread"] == pytest.approx(float(spread.sqrt()), rel=1e-6)
    assert line["kappa"] == pytest.approx(0.09 * float(spread), rel=1e-6)
    apart = []
    for s in states:
        slot, c = next(iter(s.codebook))
        v = s.x[slot.slice]
        apart.append(float((v[:, None] - c).abs().min(1).values.mean()) / half_gap(c))
    assert line["distance"] == pytest.approx(sum(apart) / 4, rel=1e-5)
    # after the first step of G_w = lambda_p (w - x+): close to the distance of x to w
    assert line["G_w"] == pytest.approx(0.3 * float((x - finished.w[0]).square().sum(1).mean().sqrt()), rel=0.2)
    assert 0 < line["drift"] < line["spread"]


def descending(eta1: float, rounds: int = 6, **settings):
    q = Prox(eta2=Schedule(0.002), lam=Schedule(0.01), mode="soft", P=2.0)
    job = make_job(
        [Phase(Local(eta1=Schedule(eta1), quantizer=q, **settings), rounds)],
        sizes=(20,), bits=(2,), batch=20, local_steps=5, evaluate_every=1, diagnostics=Diagnostics("full"),
    )  # fmt: skip
    return told(run_inline(job)[0].lines)


def test_small_steps_decrease_F_and_stay_below_the_bound_and_large_ones_do_not():
    small, large = descending(0.02), descending(4.0)
    assert all(line["violations"] == 0 == line["excess"] for line in small)
    assert all(b["objective"] < a["objective"] for a, b in pairwise(small))
    assert "G2_bound" not in small[0]
    assert all(0 < line["G2_average"] < line["G2_bound"] for line in small[1:])
    assert small[-1]["G2_average"] == pytest.approx(sum(line["G2"] for line in small) / 6, rel=1e-6)
    assert any(line["violations"] == 1 and line["excess"] > 0 for line in large)


def test_a_bound_is_told_only_where_a_theorem_speaks():
    assert all("G2_bound" not in line for line in descending(0.02, 2, optimizer=SGD(momentum=0.5)))
    hard = make_job([Phase(METHODS[2], 4)], bits=(2,), diagnostics=Diagnostics("full"))
    assert all("G2_bound" not in line for line in told(run_inline(hard)[0].lines))
    soft = make_job([Phase(METHODS[1], 4)], bits=(2,), batch=12, diagnostics=Diagnostics("full"))
    first, last = told(run_inline(soft)[0].lines)
    assert "G2_bound" not in first
    assert last["G2_average"] < last["G2_bound"]


def test_methods_without_the_objective_tell_what_they_can():
    job = make_job([Phase(FedAvg(), 2)], diagnostics=Diagnostics("full"))
    (line,) = told(run_inline(job)[0].lines)
    assert set(line) == {"mode", "step", "drift", "spread", "kappa"}
    assert line["kappa"] == 0


def test_a_resumed_run_tells_the_same(tmp_path):
    from qupel.engine.checkpoint import Checkpoints
    from qupel.engine.rounds import Stopped

    job = make_job(recipe(), diagnostics=Diagnostics("cheap"))
    whole, _ = run_inline(job)
    rounds = iter(range(100))
    with Inline(job) as engine, pytest.raises(Stopped):
        run(job, engine, checkpoints=Checkpoints(tmp_path, "a"), should_stop=lambda: next(rounds) == 4)
    with Inline(job) as engine:
        finished = run(job, engine, checkpoints=Checkpoints(tmp_path, "a"))
        final_models(job, engine, finished.w)
    assert told(finished.lines) == told(whole.lines)


def test_decrease_asks_for_a_quarter_of_the_squared_step():
    f, s, _ = client(METHODS[0])
    after, _ = METHODS[0].step(s, Problem(f, f), NO_BATCH, ONE)
    moved = (after.x - s.x).square().sum() / (4 * 0.05)
    moved += (after.codebook.centers[0] - s.codebook.centers[0]).square().sum() / (4 * 0.002)
    assert decrease(METHODS[0], s, after, ONE) == pytest.approx(float(moved))


def test_the_command_line_writes_diagnostics(tmp_path):
    small = ["--set", "rounds=2", "--set", "data.limit=60", "--workers", "1", "--set", "save_models=false"]
    arguments = ["train", "--out", str(tmp_path / "run"), "--diagnostics", "full", *small]
    done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    log = next((tmp_path / "run" / "cells").glob("learned*/metrics.jsonl"))
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    assert all(line["diagnostics"]["mode"] == "full" for line in lines)
    assert all({"G_x", "G2_average", "objective", "violations"} <= set(line["diagnostics"]) for line in lines[:-1])
    assert {"distance", "spread"} <= set(lines[-1]["diagnostics"])
    numbers = [v for found in told(lines) for v in found.values() if not isinstance(v, str)]
    assert all(math.isfinite(v) for v in numbers)
