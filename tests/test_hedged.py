"""Sharing that a client may leave: what it is where nobody does, where all do, and who decides."""

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Schedule
from qupel.data.batches import generator, held_back
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.parts.evidence import DOUBT, MARGIN, SURE, choice, gain
from qupel.parts.methods import hedged as hedged_file
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.hedged import Hedged
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase, phase_from
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.ste import StraightThrough
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.run.recipes import find
from qupel.run.settings import Length, Settings, stages
from qupel.tasks.task import Batch, ModuleTask, each_loss
from qupel.util.errors import UserError
from tiny import make_job

RATES = {"eta1": Schedule(0.1), "alone_eta1": Schedule(0.02), "alone_optimizer": Adam()}
STE = StraightThrough(eta2=Schedule(0.1))


def ended(phases, **how):
    """Every client's model, w, and the last states."""
    job = replace(make_job(phases), **how)
    with Inline(job) as engine:
        done = run(job, engine)
        last, clients = job.rounds - 1, range(len(job.parts))
        models = [engine.deployed(last, done.w, i).x for i in clients]
        return models, done.w[0], [engine.shard.state(i, len(job.phases) - 1, done.w) for i in clients]


def hedged(pull=0.0, held=0.0, levels=STE):
    stages = (("both", NoQuantizer()), ("both", levels), ("asked", levels), ("own", levels))
    made = [Hedged(stage, quantizer=q, lambda_p=Schedule(pull), **RATES) for stage, q in stages]
    return [Phase(method, 2, held=held if method.stage == "both" else 0.0) for method in made]


@pytest.fixture
def all_go(monkeypatch):
    """Whatever the evidence says."""
    monkeypatch.setattr(hedged_file, "choice", lambda evidence, told, before: torch.ones_like(before))


def same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


def test_where_nobody_goes_alone_it_is_fedavg_and_then_qupel_whose_w_rests():
    eta1 = RATES["eta1"]
    plain = [
        Phase(FedAvg(eta1), 2),
        *[Phase(FedAvg(eta1, quantizer=STE), 2)] * 2,
        Phase(QuPeL(eta1, lambda_p=Schedule(0.5), coupling=0.0, quantizer=STE), 2),
    ]
    models, w, states = ended(hedged(pull=0.5))
    expected, w_expected, _ = ended(plain)
    same(models, expected)
    torch.testing.assert_close(w, w_expected)
    assert not any(bool(s.alone.any()) for s in states)


@pytest.mark.parametrize("sample", [1.0, 0.5])
@pytest.mark.parametrize("held", [0.0, 0.5])
def test_where_all_go_alone_it_is_local_on_all_samples(all_go, held, sample):
    """To the bit, also with samples held back, by what each learns anew; in the rounds that it took part in."""
    eta1, adam = RATES["alone_eta1"], Adam()
    steps = replace(STE, lloyd=0)  # a phase counts its steps anew, and Local's is one
    plain = [Phase(Local(eta1, adam, NoQuantizer()), 2), Phase(Local(eta1, adam, steps), 6)]
    models, _, states = ended(hedged(pull=0.5, levels=steps, held=held), sample=sample)
    for model, alone in zip(models, ended(plain, sample=sample)[0], strict=True):
        assert torch.equal(model, alone)
    assert all(bool(s.alone.all()) for s in states)


def test_a_sample_held_back_that_nobody_can_train_on_ends_no_run(all_go):
    """Its client is refused as soon as it trains on all samples, as Local is; the others learn theirs anew."""
    job = make_job(hedged(held=0.5), bits=(2,))
    with Inline(job) as engine:
        bad = job.parts[0].train_rows[engine.shard.steps.held(0, 0)]
        job.data.train.inputs[bad] = math.nan
        refused = [name for line in run(job, engine).lines for name in line.get("refused", [])]
    assert refused
    assert all(name.startswith("client 0") for name in refused)


def test_where_all_go_alone_w_is_fedavgs(all_go):
    steps = replace(STE, lloyd=0)
    w = ended(hedged(pull=0.5, levels=steps))[1]
    rate = RATES["eta1"]
    torch.testing.assert_close(w, ended([Phase(FedAvg(rate), 2), Phase(FedAvg(rate, quantizer=steps), 4)])[1])


def test_samples_held_back_are_seen_by_no_step_of_the_phase_and_by_all_later_ones():
    job = make_job([Phase(Hedged("both"), 3, held=0.5), Phase(Hedged("asked"), 3)])
    with Inline(job) as engine:
        shard, own = engine.shard, set(job.parts[0].train_rows.tolist())
        held = set(job.parts[0].train_rows[shard.steps.held(0, 0)].tolist())
        assert len(held) == 2
        first, later = (
            {*np.concatenate([shard.steps.rows(0, r) for r in rounds]).ravel()} for rounds in ((0, 1, 2), (3, 4, 5))
        )
        assert first == own - held
        assert later == own
        tried = islice(shard.steps.ahead(0, 2, 0), 9)  # what w is tried with
        inputs = {tuple(x.ravel().tolist()) for x in job.data.train.read(sorted(held)).inputs}
        assert not any(tuple(x.ravel().tolist()) in inputs for batch in tried for x in batch.inputs)


@pytest.mark.parametrize(("fits", "alone"), [("v", 1.0), ("w", 0.0), ("both", 0.0)])
def test_samples_held_back_decide_between_ones_own_model_and_w(fits, alone):
    """Whichever has learned them loses less on them; of two equal ones it is w."""
    method = Hedged("both", eta1=Schedule(1e-6))
    job = make_job([Phase(method, 1, held=0.5), Phase(replace(method, stage="own"), 1)])
    with Inline(job) as engine:
        shard = engine.shard
        problem, w = shard.problem(0), shard.initial
        held = shard.steps.augmented(0, 0, job.parts[0].train_rows[shard.steps.held(0, 0)])
        good = w.clone()
        for _ in range(60):
            good = good - 0.2 * problem.own.gradient(good, held).gradient
        state = shard.state(0, 0, (w,))
        first, _ = method.step(state, problem, held, job.clock(0, 0))
        at = {"v": (good, w), "w": (w, good), "both": (good, good)}[fits]
        state = replace(first, v=at[:1], x=at[1], w=at[1])
        assert shard._chosen(0, state, 0).alone.tolist() == [alone]
        shard.store.put(0, 0, state)
        assert shard.state(0, 1, (at[1],)).alone.tolist() == [alone]  # as it enters the next phase


def test_the_evidence_is_what_the_formula_says():
    """e, e^2, the variance of e: of the samples' differences in units of the first loss, no loss above 1."""
    method = Hedged("both", eta1=Schedule(0.05))
    job = make_job([Phase(method, 1, held=0.5)])
    with Inline(job) as engine:
        shard, held = engine.shard, engine.shard.steps.held(0, 0)
        problem, w, batches = shard.problem(0), shard.initial, list(islice(shard.steps.ahead(0, 0, 0), 30))
        unseen = shard.steps.augmented(0, 0, job.parts[0].train_rows[held])
        state = shard.state(0, 0, (w,))
        first = problem.own.value(w, batches[0])
        state, _ = method.step(state, problem, batches[0], job.clock(0, 0))
        again, _ = method.step(state, problem, batches[1], job.clock(0, 1))
        assert again.first.tolist() == pytest.approx([first])  # only the very first step looks
        found = method.choose(replace(state, w=w), problem, batches, unseen, job.clock(0, 0)).evidence
        u = w
        for batch in batches:
            u = u - 0.05 * problem.own.gradient(u, batch).gradient
        losses = [np.minimum(each_loss(problem.own, x, unseen), first) / first for x in (u, state.v[0])]
        gains = losses[0] - losses[1]
        e, n = gains.mean(), len(gains)
        assert found.tolist() == pytest.approx([e, e**2, gains.var(ddof=1) / n, 1.0, float(n >= 5)], rel=1e-3)


def test_samples_that_no_model_can_be_tried_with_say_nothing():
    """Losses that are no numbers count as the worst; a client that diverges when w is tried stays with the others."""
    worst, fine = [math.nan, math.inf, 9.0], [0.5, 0.5, 0.5]
    assert gain(worst, worst, 1.0)[0] == 0
    assert gain(worst, fine, 1.0)[0] == 0.5
    phases = hedged(held=0.4)[1:]
    job = make_job(phases)
    broken = replace(job, loss=lambda outputs, targets: (outputs * math.inf).sum())
    with Inline(job) as engine, Inline(broken) as other:
        w = engine.shard.initial
        state = replace(engine.shard.state(0, 0, (w,)), first=torch.ones(1))
        assert engine.shard._chosen(0, state, 0).evidence.any()
        assert other.shard._chosen(0, state, 0) is state


def test_each_loss_is_the_loss_of_each_sample():
    task = ModuleTask(nn.Linear(3, 4), nn.functional.cross_entropy)
    x, batch = torch.randn(16), Batch(torch.randn(6, 3), torch.arange(6) % 4)
    each = each_loss(task, x, batch)
    assert np.mean(each) == pytest.approx(task.value(x, batch), rel=1e-5)
    alone = [task.value(x, Batch(batch.inputs[k : k + 1], batch.targets[k : k + 1])) for k in range(6)]
    assert each == pytest.approx(alone, rel=1e-4)


def test_a_client_takes_for_its_gain_what_all_have_seen():
    """Shrunk to the clients' mean: entirely where they differ no more than chance lets them, hardly where they do."""

    def choices(gains, variance, enough=1.0):
        evidence = torch.tensor([[e, e * e, variance, 1.0, enough] for e in gains])
        return choice(evidence, evidence.mean(0).expand(len(gains), 5), torch.zeros(len(gains), 1))[:, 0].tolist()

    assert choices([0.3, 0.2, -0.1, 0.2], 0.05) == [1.0] * 4  # noise: all like the mean
    assert choices([-0.3, -0.2, 0.1, -0.2], 0.05) == [0.0] * 4
    assert choices([0.3, 0.2, -0.1, 0.2], 0.0001) == [1.0, 1.0, 0.0, 1.0]  # differences: each like itself
    m, m_2, s = MARGIN + 0.1, 0.06 + (MARGIN + 0.1) ** 2, 0.02  # by hand: t = 0.02, so e and m count alike
    told, stays, goes = torch.tensor([m, m_2, s, 1.0]), torch.zeros(1), torch.ones(1)
    for enough, most in ((1.0, MARGIN - SURE * s**0.5), (0.0, max(MARGIN, DOUBT * s**0.5))):
        for apart, expected in ((0.01, goes), (-0.01, stays)):
            e = 2 * (most + apart) - m
            for part in (1.0, 0.25):  # of those who have such samples, whatever part of all they are
                evidence = torch.tensor([e, e * e, s, 1.0, enough])
                assert torch.equal(choice(evidence, part * told, stays), expected)
    assert torch.equal(choice(torch.zeros(5), told, stays), goes)  # no samples of its own: as the others
    for before in (stays, goes):  # nobody told
        evidence = torch.tensor([9.0, 81.0, 0.0, 1.0, 1.0])
        assert torch.equal(choice(evidence, torch.zeros(5), before), before)
        assert torch.equal(choice(evidence, torch.ones(2), before), before)  # of two numbers


def test_who_is_not_sure_goes_but_few_samples_stay():
    """The margin is in a client's standard errors: below nought where they say enough, else above it."""

    def choices(gain, error, enough):
        evidence = torch.tensor([gain, gain**2, error**2, 1.0, enough])
        return choice(evidence, evidence, torch.zeros(1)).item()

    assert [choices(gain, 0.16, 1.0) for gain in (-0.015, -0.03)] == [1.0, 0.0]
    assert [choices(gain, 0.02, 1.0) for gain in (0.008, 0.004)] == [1.0, 0.0]  # going is worth something, too
    assert [choices(gain, 0.2, 0.0) for gain in (0.03, 0.015)] == [1.0, 0.0]
    assert [choices(gain, 0.02, 0.0) for gain in (0.012, 0.008)] == [1.0, 0.0]
    assert [gain([1.0] * n, [0.5] * n, 1.0)[-1].item() for n in (4, 5)] == [0.0, 1.0]


def test_the_clients_means_come_back_in_the_second_round_that_asks():
    """Rows of the model and of what is asked: the second is no model, and the server's plain mean."""
    phases = [Phase(replace(p.method), 2, FedAvgM(0.9, nesterov=True), held=p.held) for p in hedged(held=0.4)]
    job = make_job(phases)
    with Inline(job) as engine:
        done = run(first(job, 6), engine)
        states = [engine.shard.store.get(i, done.w[0])[1] for i in range(len(job.parts))]
        shares = np.array([job.share(i) for i in range(len(job.parts))])
        evidence = np.array([s.evidence.tolist() for s in states])
        mean = (shares @ evidence / shares.sum())[:4]
        assert done.w[1][:4].tolist() == pytest.approx(mean.tolist(), rel=1e-4)
        assert not done.w[1][4:].any()
        told = torch.tensor(mean, dtype=torch.float32)
        expected = [choice(s.evidence, told, torch.zeros(1)) for s in states]
        assert [s.alone for s in states] == expected
        later = [engine.shard.state(i, 3, (done.w[0],)).alone for i in range(len(job.parts))]
        assert later == expected  # a phase that is over is not heard again
        assert evidence[:, 0].std() > 0


def first(job, rounds):
    """The first rounds of a job."""
    ends, phases = 0, []
    for phase in job.phases:
        phases.append(replace(phase, rounds=min(phase.rounds, rounds - ends)))
        ends += phases[-1].rounds
    return replace(job, phases=phases)


def test_a_server_that_goes_on_keeps_its_memory():
    """Momentum does not begin anew with a phase of the same server; with another it does."""
    server = FedAvgM(0.9, nesterov=True)
    split = [Phase(FedAvg(RATES["eta1"]), rounds, server) for rounds in (2, 3)]
    models, w, _ = ended([Phase(FedAvg(RATES["eta1"]), 5, server)])
    same(ended(split)[0], models)
    other = [split[0], replace(split[1], server=FedAvgM(0.9, nesterov=True, rate=0.999999))]
    assert not torch.allclose(ended(other)[1], w, atol=1e-3)


@pytest.mark.parametrize(
    ("count", "share", "held"),
    [
        (7, 0.2, 0),
        (8, 0.2, 2),
        (20, 0.2, 2),
        (30, 0.2, 4),
        (60, 0.2, 10),
        (60, 0.1, 5),
        (100, 0.2, 18),
        (5000, 0.2, 20),
    ],
)
def test_how_many_samples_are_held_back(count, share, held):
    labels = generator(0, "labels", count).integers(0, 4, count)
    which = held_back(labels, share)
    assert which.sum() == held
    for label in range(4):
        mine = which[labels == label]
        assert (np.diff(mine.astype(int)) >= 0).all()  # the last ones
        assert mine.sum() == pytest.approx(held / count * len(mine), abs=1)


def test_the_share_held_back_is_a_setting_of_the_recipe_and_of_a_phase():
    s, length = Settings(held=0.2), Length(rounds=30, local_steps=10, epoch_steps=5)
    phases = find("qupel").phases(s, length)
    assert [p.held for p in phases] == [0.2, 0.2, 0.0, 0.0, 0.0]
    assert [phase_from(p.table(), "phase") for p in phases] == phases
    with pytest.raises(UserError, match=r"phases\[0\].held: a share from 0 on and below 1 is needed, not 1"):
        phase_from({"method": "hedged", "rounds": 1, "held": 1}, "phases[0]")


@pytest.mark.parametrize("stacked", [False, True])
def test_clients_choose_the_same_one_by_one_and_in_stacks(stacked):
    phases = hedged(held=0.4)
    job = replace(make_job(phases), stacked=stacked)
    with Inline(job) as engine:
        done = run(job, engine)
        found = [engine.shard.state(i, 3, done.w) for i in range(len(job.parts))]
    others = ended(phases)[2]
    assert [s.alone.item() for s in found] == [s.alone.item() for s in others]
    for mine, other in zip(found, others, strict=True):
        torch.testing.assert_close(mine.evidence, other.evidence, rtol=1e-3, atol=1e-5)


def test_the_last_phase_that_holds_back_is_where_clients_choose():
    first, second, _, last = hedged(held=0.4)
    for phases, chosen in (([first, last], True), ([first, second, last], False)):
        job = make_job(phases)
        with Inline(job) as engine:
            state = engine.shard.state(0, 0, (engine.shard.initial,))
            state = replace(state, first=torch.ones(1))
            assert bool(engine.shard._chosen(0, state, 0).evidence.any()) is chosen


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 10, 30, 150])
def test_the_stages_of_a_recipe_fill_the_rounds(rounds):
    for name in ("qupel", "local"):
        recipe = find(name)
        for shares in ({}, {"shared_levels": 0.5, "personal": 0.3, "finetune": 0.2}):
            s = Settings(**recipe.defaults | shares)
            found = stages(s, rounds)
            assert sum(found) == rounds
            assert found[2] >= 1
            assert min(found) >= 0
            assert sum(p.rounds for p in recipe.phases(s, Length(rounds, 10, 5.0))) == rounds


def test_shares_of_more_than_all_rounds_are_refused():
    with pytest.raises(UserError, match="shared_levels, personal and finetune: together at most 1"):
        stages(Settings(shared_levels=0.5, personal=0.4, finetune=0.2), 10)


def test_the_default_is_local_for_those_who_are_alone():
    """The recipes' phases: the steps of a client that is alone are those of the recipe local."""
    length, s = Length(20, 3, 5.0), Settings(**find("qupel").defaults)
    alone = find("local").phases(Settings(**find("local").defaults), length)
    mine = find("qupel").phases(s, length)
    assert [p.rounds for p in mine] == [10, 2, 2, 4, 2]
    assert [p.rounds for p in alone] == [10, 8, 2]
    for phase, k in ((mine[0], 0), (mine[1], 1), (mine[4], 2)):
        match = alone[k]
        assert phase.method.alone_eta1 == match.method.eta1
        assert phase.method.alone_optimizer == match.method.optimizer
        assert phase.method.quantizer == match.method.quantizer
    assert mine[0].method.optimizer == SGD(clip=4.0)


@pytest.mark.parametrize("recipe", ["qupel", "local", "quped"])
def test_a_quantized_step_has_one_pass_or_two(recipe):
    kinds = [StraightThrough, Prox]
    for passes, kind in zip((1, 2), kinds, strict=True):
        s = Settings(**{**find(recipe).defaults, "passes": passes, "mode": "soft"})
        quantizers = [type(p.method.quantizer) for p in find(recipe).phases(s, Length(20, 3, 5.0))]
        assert {k for k in quantizers if k in kinds} == {kind}


def test_networks_that_plain_sgd_hardly_trains_have_adam():
    """Recurrent layers, embeddings, attention: Adam with 0.03 eta1, for all methods that take SGD elsewhere."""
    for recipe in ("qupel", "fedavg", "fedavg-finetune", "quped"):
        s = Settings(**{**find(recipe).defaults, "eta1": 0.2})
        even, uneven = (find(recipe).phases(s, Length(20, 3, 5.0, uneven))[0].method for uneven in (False, True))
        assert (even.optimizer, even.eta1.start) == (SGD(clip=4.0), 0.2)
        assert (uneven.optimizer, uneven.eta1.start) == (Adam(), pytest.approx(0.006))
        named = s.model_copy(update={"optimizer": "sgd"})
        assert find(recipe).phases(named, Length(20, 3, 5.0, True))[0].method == even


@pytest.mark.parametrize(
    ("layers", "uneven"),
    [([nn.Linear(4, 3)], False), ([nn.LSTM(4, 3)], True), ([nn.Linear(4, 3), nn.LayerNorm(3)], True)],
)
def test_which_networks_those_are(layers, uneven):
    job = replace(make_job(hedged()), module=nn.Sequential(*layers))
    assert Length.of(job, 5).uneven == uneven


def test_clients_with_the_same_bits_choose_each_for_itself():
    """What a phase makes of one model is kept for clients of the same plan; a choice is not a model."""
    job = make_job(hedged(), bits=(2,))
    with Inline(job) as engine:
        shard, w = engine.shard, (engine.shard.initial + 0.5,)
        for client, alone in ((0, 1.0), (1, 0.0)):
            state = shard.state(client, 2, (*w, torch.zeros_like(w[0])))
            v = (state.x + client + 1,)
            shard.store.put(client, 2, replace(state, alone=torch.full((1,), alone), v=v))
        first, second = (shard.state(client, 3, w) for client in (0, 1))
        assert (float(first.alone), float(second.alone)) == (1.0, 0.0)
        assert not torch.equal(first.x, w[0])  # its own, learned anew
        torch.testing.assert_close(second.x, w[0])
