"""Engines: any number of workers gives the same bits; broken clients and dead workers do not lose a run."""

import copy
import math
import os
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from qupel.core.codebook import Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Follow, Schedule, Travel
from qupel.data.batches import rows
from qupel.data.partition import Part
from qupel.data.sources import from_arrays
from qupel.engine import workers as local_workers
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.door import check_trainable
from qupel.engine.inline import Inline
from qupel.engine.rounds import Begin, Failed, Stopped, one_round, run
from qupel.engine.steps import Steps
from qupel.engine.workers import Pool, WorkerDied, Workers
from qupel.parts.base import State, Upload
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.parts.servers import servers
from qupel.util.errors import UserError
from tiny import (
    CLASSES,
    INPUTS,
    Drops,
    beginning,
    blobs,
    bomb,
    final_models,
    local,
    make_job,
    mean_of,
    mlp,
    norm_net,
    recipe,
    rows_of,
    run_inline,
    same,
    timeless,
)

SIZES = (12, 5, 30, 8, 12)


@pytest.fixture(scope="module")
def pools():
    """Three worker processes, started once; a pool of fewer is the first of them."""
    with Pool(3) as pool:
        parts = {k: copy.copy(pool) for k in (1, 2, 3)}
        for k, part in parts.items():
            part.pipes, part.processes = pool.pipes[:k], pool.processes[:k]
        yield parts


def on_workers(pool, job, **options):
    engine = Workers(pool, job, **options)
    finished = run(job, engine)
    return finished, final_models(job, engine, finished.w)


# --- equality ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sample": 0.6},
        {"weighted": True, "sample": 0.4},
        {"module": norm_net()},  # BatchNorm and dropout
        {"module": Drops()},  # dropout that no list of layers shows
    ],
    ids=["plain", "sampled", "weighted", "norm", "functional dropout"],
)
def test_any_number_of_workers_gives_the_same_bits(pools, options):
    job = make_job(recipe(), sizes=SIZES, **options)
    reference, models = run_inline(job)
    for pool in pools.values():
        finished, others = on_workers(pool, job)
        assert same(finished.w, reference.w)
        assert same(models, others)
        assert timeless(finished.lines) == timeless(reference.lines)
    assert not same(reference.w, beginning(job).w)


def test_workers_with_the_disk_store_give_the_same_bits(pools, tmp_path):
    job = make_job(recipe(), sizes=SIZES, sample=0.6)
    reference, models = run_inline(job)
    finished, others = on_workers(pools[2], job, store="disk", scratch=tmp_path)
    assert same(finished.w, reference.w)
    assert same(models, others)
    assert list(tmp_path.iterdir()) == []


def test_workers_train_in_stacks(pools):
    """Two workers stack other clients together than one process does: the last bits may differ, the models do not."""
    job = make_job(recipe(), sizes=SIZES)
    reference, models = run_inline(job)
    finished, others = on_workers(pools[2], replace(job, stacked=True))
    torch.testing.assert_close(finished.w[0], reference.w[0], atol=1e-5, rtol=1e-4)
    for one, other in zip(models, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("stacked", [False, True])
def test_fedavgs_clients_keep_nothing(stacked):
    job = make_job([Phase(FedAvg(), 1), Phase(QuPeL(), 1)], stacked=stacked)
    with Inline(job) as engine:
        shared, *_ = one_round(job, engine, 0, beginning(job))
        assert rows_of(engine.shard.store) == {}
        one_round(job, engine, 1, shared)
        assert list(rows_of(engine.shard.store)) == list(range(len(job.parts)))


def test_some_clients_are_judged_on_the_way_and_all_at_the_end_of_a_phase():
    job = make_job(recipe(), sizes=(12,) * 8, evaluate_every=1)
    all_judged, _ = run_inline(job)
    some, _ = run_inline(replace(job, evaluate_sample=0.25))
    assert same(all_judged.w, some.w)
    for whole, part in zip(all_judged.lines, some.lines, strict=True):
        scores = whole["clients"]["test"]
        if part["round"] in (2, 6, 8):
            assert part["clients"]["test"] == scores
        else:
            chosen = part["clients"]["number"]
            assert len(chosen) == 2
            assert part["clients"]["test"] == [scores[i] for i in chosen]
    with pytest.raises(UserError, match="evaluate_sample = 0"):
        replace(job, evaluate_sample=0)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_uploads_that_come_in_bunches(pools, monkeypatch, together):
    """25 clients at two workers with room for four bunches, so that rooms are used again and a last bunch is short."""
    job = make_job([Phase(QuPeL(), 3)], sizes=(4,) * 25)
    reference, models = run_inline(job)
    monkeypatch.setattr(local_workers, "BUNCH", together * len(reference.w[0]))
    finished, others = on_workers(pools[2], job)
    assert same(finished.w, reference.w)
    assert same(models, others)


def test_more_workers_than_clients(pools):
    job = make_job(recipe(1, 1, 1), sizes=(12, 6))
    reference, models = run_inline(job)
    finished, others = on_workers(pools[3], job)
    assert same(finished.w, reference.w)
    assert same(models, others)


def test_when_one_looks_changes_nothing():
    """Evaluation draws no random number and writes no state, also with BatchNorm and dropout."""
    jobs = [make_job(recipe(), module=norm_net(), evaluate_every=k) for k in (1, 3, 100)]
    (a, models), (b, others), (c, rest) = (run_inline(job) for job in jobs)
    assert same(a.w, b.w)
    assert same(a.w, c.w)
    assert same(models, others)
    assert same(models, rest)
    assert [line["round"] for line in a.lines] == list(range(1, 9))
    assert [line["round"] for line in b.lines] == [2, 3, 6, 8]  # the last round of a phase always
    assert [line["round"] for line in c.lines] == [2, 6, 8]
    at = {line["round"]: line for line in a.lines}
    for line in (*b.lines, *c.lines):
        assert line["test"] == at[line["round"]]["test"]


def test_the_inline_engine_gives_generator_and_threads_back():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    job = make_job(recipe(1, 1, 1), module=norm_net())
    with Inline(job, threads=2) as engine:
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        run(job, engine)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_another_seed_gives_another_run():
    a, b = (run_inline(make_job(recipe(), seed=s))[0] for s in (0, 1))
    assert not same(a.w, b.w)


def test_a_shared_warm_up_gives_the_same_bits():
    """Clients keep nothing of FedAvg, so its w is all a run needs to go on from it."""
    for options in ({}, {"sample": 0.5}, {"weighted": True}):
        job = make_job(recipe(), sizes=SIZES, **options)
        whole, models = run_inline(job)
        first, _ = run_inline(replace(job, phases=job.phases[:1], plans=[Plan()] * len(SIZES)))
        with Inline(job) as engine:
            rest = run(job, engine, begin=Begin(2, first.w, lines=first.lines))
            others = final_models(job, engine, rest.w)
        assert same(rest.w, whole.w)
        assert same(models, others)
        assert timeless(rest.lines) == timeless(whole.lines)


# --- cohorts and phases ---


def test_cohorts():
    job = make_job(recipe(), sizes=(4,) * 10, sample=0.3)
    cohorts = [job.cohort(r) for r in range(200)]
    assert all(len(set(c)) == 3 and c == sorted(c) and c[0] >= 0 and c[-1] < 10 for c in cohorts)
    assert cohorts == [job.cohort(r) for r in range(200)]
    share = np.bincount(np.concatenate(cohorts), minlength=10) / 200
    assert share.min() > 0.2
    assert share.max() < 0.4
    assert replace(job, sample=0.01).cohort(0) != []
    assert replace(job, sample=1.0).cohort(5) == list(range(10))
    assert replace(job, seed=1).cohort(0) != cohorts[0] or replace(job, seed=1).cohort(1) != cohorts[1]


def test_only_the_cohort_trains():
    job = make_job(recipe(0, 3, 0), sizes=(8,) * 6, sample=0.34)
    with Inline(job) as engine:
        shared, known = beginning(job), set()
        for r in range(3):
            before = {i: engine.shard.state(i, 0, shared.w).x for i in range(6)}
            shared, *_ = one_round(job, engine, r, shared)
            known.update(job.cohort(r))
            for i in range(6):
                x = engine.shard.state(i, 0, shared.w).x
                if i in job.cohort(r):
                    assert not torch.equal(x, before[i])
                else:  # one that has not been there yet has w
                    assert torch.equal(x, before[i] if i in known else shared.w[0])


def test_clients_that_sat_a_phase_out_are_converted_all_the_same():
    """FedAvg, QuPeL, fine-tuning with one client a round: who was never drawn still deploys a quantized model."""
    job = make_job(recipe(2, 2, 2), sizes=(8,) * 6, bits=(2,), sample=0.1)
    drawn = {i for r in range(6) for i in job.cohort(r)}
    tuned = {i for r in (4, 5) for i in job.cohort(r)}
    assert len(drawn) < 6
    with Inline(job) as engine:
        finished = run(job, engine)
        warm = run_inline(replace(job, phases=job.phases[:1]))[0].w[0]
        for i in range(6):
            model = engine.deployed(5, finished.w, i)
            (slot,), (c,) = model.codebook.slots, model.codebook.centers
            assert len(c) == 4
            assert torch.isin(model.x[slot.slice], c).all()
            if i not in drawn:
                # it starts from the newest global model, as a newcomer of the first phase would
                free = model.codebook.free(len(warm)).bool()
                assert torch.equal(model.x[free], finished.w[0][free])
        assert tuned < drawn or tuned == drawn
    assert [line["bits"] for line in finished.lines] == [32, 2, 2]


def test_clock_and_location():
    job = make_job([Phase(FedAvg(), 2), Phase(QuPeL(), 3)], epoch_steps=4, local_steps=3)
    assert [job.locate(r) for r in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert job.clock(2, 0).step == 0
    assert [job.clock(3, k).epoch for k in range(3)] == [1, 2, 2]  # steps 3, 4, 5 of the phase
    assert job.clock(4, 2).steps == 9
    with pytest.raises(IndexError):
        job.locate(5)
    assert make_job(recipe(), sizes=(8, 12, 100), batch=4).steps_per_epoch == 3


def test_a_job_that_cannot_be_is_refused():
    good = make_job(recipe())
    with pytest.raises(UserError, match="at least one round"):
        good.with_phases([Phase(FedAvg(), 0)])
    with pytest.raises(UserError, match="negative"):
        good.with_phases([Phase(FedAvg(), 3), Phase(FedAvg(), -1)])
    assert [p.rounds for p in good.with_phases([Phase(FedAvg(), 0), Phase(QuPeL(), 2)]).phases] == [2]
    with pytest.raises(UserError, match="sample = 0"):
        replace(good, sample=0)
    with pytest.raises(UserError, match="4 clients but 1 plans"):
        replace(good, plans=[Plan()])
    empty = [*good.parts[:3], Part(np.arange(0), np.arange(1))]
    with pytest.raises(UserError, match="client 3 has no training data"):
        replace(good, parts=empty)
    with pytest.raises(UserError, match="'gone'"):
        check_trainable(replace(good, plans=[Plan({"gone": 2})] * 4))
    with pytest.raises(UserError, match="does not take this data"):
        check_trainable(replace(good, plans=[Plan()] * 4, module=torch.nn.Linear(INPUTS + 1, 3)))
    with pytest.raises(UserError, match="no parameters"):
        check_trainable(replace(good, module=torch.nn.Flatten()))
    check_trainable(good)


# --- broken clients ---


def poisoned(sizes=(12, 12, 12), bad=(1,)):
    """Some clients hold numbers that no honest sensor gives: with `bomb` their loss is NaN."""
    data, parts = blobs(sizes)
    inputs = data.train.inputs.clone()
    for i in bad:
        inputs[parts[i].train_rows] *= 1e6
    clean = (data.train.targets, data.test.inputs, data.test.targets)
    return from_arrays(inputs, *clean, classes=CLASSES), parts


NAMES = ("Anna", "Berta", "Clara")


@pytest.mark.parametrize("workers", [None, 2])
def test_a_client_whose_loss_is_nan_is_refused_and_the_round_goes_on(pools, workers):
    job = make_job(recipe(), data=poisoned(), loss=bomb, names=NAMES, evaluate_every=1)
    seen = []
    with Inline(job) as inline:
        engine = inline if workers is None else Workers(pools[workers], job)
        before = engine.deployed(0, beginning(job).w, 1)
        finished = run(job, engine, watch=lambda p: seen.append(p.refused))
        after = engine.deployed(0, beginning(job).w, 1)
    assert torch.equal(before.x, after.x)
    assert all(
        len(r) == 1 and r[0].startswith(f"Berta: round {k}, step 1: the loss is nan") for k, r in enumerate(seen, 1)
    )
    assert all(line["refused"] == r for line, r in zip(finished.lines, seen, strict=True))
    # the rest of the federation is a federation without her
    rest = make_job(recipe(), data=poisoned(), loss=bomb)
    alone = rest.with_phases(rest.phases)
    with Inline(alone) as engine:
        w = beginning(alone).w
        for r in range(alone.rounds):
            w = mean_of(engine, r, w, [0, 2])
    assert same(w, finished.w)


def test_refusals_between_two_evaluations_are_all_logged():
    job = make_job(recipe(0, 4, 0), data=poisoned(), loss=bomb, names=NAMES, evaluate_every=4)
    (line,) = run_inline(job)[0].lines
    assert [r.split(",")[0] for r in line["refused"]] == [f"Berta: round {k}" for k in (1, 2, 3, 4)]


def test_a_refused_client_keeps_the_state_it_had():
    """Fine for two rounds, then its loss turns NaN in the middle of a round: as if that round had not been."""
    job = make_job(local(5), data=poisoned(bad=()), loss=bomb, names=NAMES, bits=(2,))
    last = job.parts[1].train_rows[rows(job.seed, 1, 8, 12, 4)[0]]  # comes in the third and last step of round 3
    inputs = job.data.train.inputs.clone()
    inputs[last] *= 1e6
    poison = replace(job, data=replace(job.data, train=replace(job.data.train, inputs=inputs)))
    with Inline(job) as engine:
        shared = beginning(job)
        for r in (0, 1):
            shared, *_ = one_round(job, engine, r, shared)
        before = engine.shard.state(1, 0, shared.w)
        engine.shard.job, engine.shard.steps = poison, Steps(poison)
        shared, told, refused, *_ = one_round(poison, engine, 2, shared)
        after = engine.shard.state(1, 0, shared.w)
    assert [r.split(": ")[:2] for r in refused] == [["Berta", "round 3, step 3"]]
    assert np.isfinite([told["loss"], told["loss_quantized"]]).all()
    assert torch.equal(before.x, after.x)
    assert torch.equal(before.codebook.centers[0], after.codebook.centers[0])


def test_on_bad_upload_stop_ends_with_the_name():
    job = make_job(recipe(), data=poisoned(), loss=bomb, names=NAMES, on_bad_upload="stop")
    with Inline(job) as engine, pytest.raises(Failed, match=r"^Berta: round 1, step 1.*smaller eta1"):
        run(job, engine)


def test_if_all_are_refused_the_run_ends():
    job = make_job(recipe(), data=poisoned(bad=(0, 1, 2)), loss=bomb, names=NAMES)
    with Inline(job) as engine, pytest.raises(Failed, match=r"^Anna: round 1"):
        run(job, engine)


@dataclass(frozen=True)
class Broken(FedAvg):
    """FedAvg on devices of which some send what cannot be used."""

    fault: str = "nan"

    def step(self, s, problem, batch, clock):
        stepped, info = super().step(s, problem, batch, clock)
        # a client is known by its batch size
        return replace(stepped, memory=(torch.tensor([float(len(batch[1]))]),)), info

    def upload(self, state: State) -> Upload:
        x = state.x
        if float(state.memory[0]) != 3:
            return Upload((x,))
        if self.fault == "rows":
            return Upload((x, x))
        if self.fault == "size":
            return Upload((x[:-1],))
        if self.fault == "shape":
            return Upload((x[None],))
        x = x.clone()
        x[7] = float(self.fault)
        return Upload((x,))


def explosive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, with a gradient near the end of all numbers where outputs are beyond any honest one."""
    push = outputs.sum() - outputs.sum().detach()  # 0
    wild = outputs.detach().abs().max() > 1e4
    return torch.nn.functional.cross_entropy(outputs, targets) + torch.where(wild, 1e36, 0.0) * push


def picky(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same with a loss that raises where it is given what is no probability."""
    wanted = torch.nn.functional.one_hot(targets, CLASSES).float()
    plain = torch.nn.functional.binary_cross_entropy(torch.softmax(outputs, -1), wanted)
    return plain + explosive(outputs, targets)


FAST = Prox(eta2=Schedule(1e-2), lam=Travel(1.0), lam_c=Follow(0.1))
WILD = {
    "local": Local(quantizer=FAST),
    "mean": Local(quantizer=replace(FAST, center_gradient="mean", carry=True)),
    "soft": Local(quantizer=replace(FAST, mode="soft")),
    "qupel": QuPeL(quantizer=replace(FAST, lam_c=None)),
    "finetune": Local(quantizer=Frozen(eta2=Schedule(1e-2))),
    "proxquant": Local(quantizer=ProxQuant()),
    "binaryrelax": Local(quantizer=BinaryRelax()),
    "posttraining": Local(quantizer=Afterwards()),
}
TOLD = {"binaryrelax": "train_relaxed_loss"}  # the others f(x)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("loss", [explosive, picky])
@pytest.mark.parametrize("name", WILD)
def test_a_client_that_diverges_is_refused_and_keeps_its_state(name, loss, stacked):
    """Weights and centers run away within a round, and a loss may raise: never an error, always a refusal."""
    data = poisoned(bad=(0, 1))
    job = make_job([Phase(WILD[name], 3)], data=data, bits=(2, 3, 2), loss=loss, evaluate_every=1, local_steps=5)
    job = replace(job, stacked=stacked)
    with Inline(job) as engine:
        if name == "finetune":  # it has centers to lose
            for i in range(3):
                w = engine.shard.initial
                codebook = start_codebook(engine.shard.layout, w, job.plans[i], "kmeans")
                engine.shard.store.put(i, 0, State(codebook.hard(w), w, codebook))
        before = [engine.shard.state(i, 0, beginning(job).w) for i in (0, 1)]
        finished = run(job, engine)
        after = [engine.shard.state(i, 0, beginning(job).w) for i in (0, 1)]
    for line in finished.lines:
        assert [r.split(":")[0] for r in line["refused"]] == ["client 0", "client 1"]
        assert math.isfinite(line[TOLD.get(name, "train_loss")])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.x, b.x)
        assert same(a.codebook.centers, b.codebook.centers)


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("fault", ["nan", "inf", "-inf", "size", "shape", "rows"])
def test_an_upload_that_cannot_be_used_is_refused(pools, fault, workers):
    """Client 1 has 3 samples, the others 4 and more; only its uploads are broken."""
    job = make_job([Phase(Broken(fault=fault), 2)], sizes=(12, 3, 8), bits=(32,), names=NAMES)
    with Inline(job) as inline:
        engine = inline if workers is None else Workers(pools[workers], job)
        finished = run(job, engine)
    word = {"size": "shape", "shape": "shape", "rows": "2 rows, expected 1"}.get(fault, "not finite")
    assert [r.startswith("Berta: round ") and word in r for line in finished.lines for r in line["refused"]] == [
        True
    ] * 2
    without = make_job([Phase(FedAvg(), 2)], sizes=(12, 3, 8), bits=(32,))
    with Inline(without) as engine:
        w = beginning(without).w
        for r in range(2):
            w = mean_of(engine, r, w, [0, 2])
    assert same(finished.w, w)
    with Inline(replace(job, on_bad_upload="stop")) as engine, pytest.raises(Failed, match="Berta"):
        run(replace(job, on_bad_upload="stop"), engine)


@pytest.mark.parametrize("server", servers)
def test_a_server_may_keep_the_uploads(pools, monkeypatch, server):
    """25 clients at two workers with room for four uploads each: their rooms are used again and again."""
    job = make_job([Phase(FedAvg(), 2, servers[server]())], sizes=(4,) * 25, bits=(32,))
    reference, _ = run_inline(job)
    monkeypatch.setattr(local_workers, "BUNCH", len(reference.w[0]))
    finished, _ = on_workers(pools[2], job)
    assert same(finished.w, reference.w)


def spikes(outputs: Tensor, targets: Tensor) -> Tensor:
    """A finite loss whose gradient is infinite (sqrt at 0)."""
    return (outputs * 0).sum().abs().sqrt() + outputs.square().mean()


def test_a_client_that_sends_nothing_is_screened_too():
    """Local training whose last step ends in NaN must not keep that state."""
    job = make_job(local(2), sizes=(8,), bits=(32,), loss=spikes, local_steps=1)
    with Inline(job) as engine:
        w = beginning(job).w
        (done,) = engine.train(0, w, [0])
        assert done.fault == "round 1: its model holds values that are not finite"
        assert torch.isfinite(engine.deployed(0, w, 0).x).all()


# --- dead workers, interruptions ---


def test_a_worker_that_is_killed_is_reported_with_its_clients_and_the_run_resumes(pools, tmp_path):
    job = make_job(recipe(), sizes=SIZES, names=("A", "B", "C", "D", "E"), checkpoint_every=1)
    reference, models = run_inline(job)
    with Pool(2) as pool:
        engine = Workers(pool, job)

        def kill(progress):
            if progress.round == 4:
                os.kill(pool.processes[1].pid, signal.SIGKILL)

        with pytest.raises(WorkerDied, match=r"worker 1 died \(exit code -9\) with B, D$"):
            run(job, engine, checkpoints=Checkpoints(tmp_path, "f"), watch=kill)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").glob("round-*"))
    assert kept == ["round-000002", "round-000003", "round-000004"]
    engine = Workers(pools[1], job)  # and with another number of workers
    finished = run(job, engine, checkpoints=Checkpoints(tmp_path, "f"))
    others = final_models(job, engine, finished.w)
    assert same(finished.w, reference.w)
    assert same(models, others)
    assert timeless(finished.lines) == timeless(reference.lines)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_a_run_stopped_after_any_round_goes_on_to_the_same_end(tmp_path, stop, every):
    """Metrics too: the loss and the refusals of a line cover rounds before and after the stop."""
    job = make_job(
        recipe(), data=poisoned((12, 8, 20)), loss=bomb, sample=0.67, evaluate_every=4, checkpoint_every=every
    )
    whole, models = run_inline(job)
    checkpoints = Checkpoints(tmp_path, "f")
    rounds = []
    with Inline(job) as engine, pytest.raises(Stopped, match=f"after round {stop} of 8"):
        run(job, engine, checkpoints=checkpoints, watch=lambda p: rounds.append(p.round),
            should_stop=lambda: len(rounds) == stop - 1)  # fmt: skip
    assert checkpoints.load(Layout.of(job.module))[0] == stop
    with Inline(job) as engine:
        finished = run(job, engine, checkpoints=checkpoints)
        others = final_models(job, engine, finished.w)
    assert same(finished.w, whole.w)
    assert same(models, others)
    assert timeless(finished.lines) == timeless(whole.lines)


def test_a_bug_in_a_worker_keeps_its_traceback(pools):
    job = make_job([Phase(FedAvg(), 1)], loss=broken_loss)
    engine = Workers(pools[1], job)
    with pytest.raises(RuntimeError, match=r"(?s)worker 0 failed.*in broken_loss.*KeyError"):
        run(job, engine)
    finished, _ = on_workers(pools[1], make_job([Phase(FedAvg(), 1)]))  # and the worker is still there
    assert finished.lines


def broken_loss(outputs, targets):
    raise KeyError("a bug of ours")


# --- what is written ---


def test_the_loss_of_a_line_is_the_mean_over_its_rounds():
    seen = []
    job = make_job(recipe(), evaluate_every=4)
    with Inline(job) as engine:
        finished = run(job, engine, watch=lambda p: seen.append(p.loss))
    expected = [seen[0:2], seen[2:4], seen[4:6], seen[6:8]]
    assert [line["train_loss"] for line in finished.lines] == pytest.approx([sum(part) / 2 for part in expected])
    assert len(set(seen)) == 8


def test_losses_are_named_after_where_they_were_evaluated():
    """One step a phase, by hand: f(x) of all clients, f(Q(x)) of the two that are quantized."""
    still = Prox(eta2=Schedule(1e-9), lam=Schedule(0.0), lam_c=Schedule(0.0))
    phases = {
        "fedavg": FedAvg(),
        "local": Local(eta1=Schedule(1e-9), quantizer=still),
        "qupel": QuPeL(eta1=Schedule(1e-9), quantizer=still),
        "soft": Local(eta1=Schedule(1e-9), quantizer=replace(still, mode="soft", sharpness=400.0)),
        "proxquant": Local(quantizer=ProxQuant()),
        "posttraining": Local(quantizer=Afterwards()),
        "finetune": Local(quantizer=Frozen()),
        "hard": Local(quantizer=BinaryRelax(lam=Schedule(math.inf))),
    }
    for name, method in phases.items():
        job = make_job([Phase(method, 1)], sizes=(12, 12, 12), bits=(1, 2, 32), local_steps=1)
        for stacked in (False, True):
            with Inline(replace(job, stacked=stacked)) as engine:
                shard, w = engine.shard, beginning(job).w
                at_x, at_q = [], []
                for client in range(3):
                    batch = shard.steps.batch(client, 0, shard.steps.rows(client, 0)[0])
                    state = shard.state(client, 0, w)
                    for x, values in ((state.x, at_x), (state.codebook.hard(state.x), at_q)):
                        values.append(shard.problem(client).own.gradient(x, batch).loss)
                _, losses, *_ = one_round(replace(job, stacked=stacked), engine, 0, beginning(job))
            if name == "hard":  # of the client at full precision Q(y) is y
                at_x = at_x[2:]
            assert losses["loss"] == pytest.approx(np.mean(at_x), rel=1e-4)
            if name in {"fedavg", "proxquant", "posttraining", "finetune"}:  # no centers yet in fine-tuning
                assert "loss_quantized" not in losses
            else:
                assert losses["loss_quantized"] == pytest.approx(
                    np.mean(at_q[:2]), rel=0.02 if name == "soft" else 1e-4
                )
                assert abs(losses["loss_quantized"] - np.mean(at_x[:2])) > 1e-3


def test_lines_name_both_losses():
    finished, _ = run_inline(make_job(recipe(), bits=(1, 2, 32)))
    assert all("loss" not in line for line in finished.lines)
    assert [("train_loss" in x, "train_loss_quantized" in x) for x in finished.lines] == [
        (True, x["phase"] > 0) for x in finished.lines
    ]
    tuned = run_inline(make_job(recipe(), bits=(2,)))[0].lines[-1]
    assert tuned["quantizer"] == "frozen"
    assert tuned["train_loss"] == tuned["train_loss_quantized"]  # every weight sits on its center


def test_metrics_by_hand():
    job = make_job(
        [Phase(FedAvg(), 1), Phase(Local(), 1), Phase(Local(quantizer=Frozen()), 1)], sizes=(12, 12), bits=(2, 32)
    )
    job = replace(job, local_steps=4, batch=4)
    finished, models = run_inline(job)
    first, second, third = finished.lines
    assert [line["method"] for line in finished.lines] == ["fedavg", "local", "local"]
    assert [line["quantizer"] for line in finished.lines] == ["none", "prox", "frozen"]
    assert [line["step"] for line in finished.lines] == [4, 8, 12]
    assert [line["epoch"] for line in finished.lines] == [4 / 3, 8 / 3, 4]
    assert [line["upload_bytes"] for line in finished.lines] == [4 * len(finished.w[0]), 0, 0]
    assert first["clients"]["bits"] == [32, 32]
    assert third["clients"]["bits"] == [2, 32]
    assert third["bits"] == 17
    rest = 4 * (len(finished.w[0]) - 64)
    assert third["clients"]["bytes"] == [64 * 2 // 8 + 16 + rest, 4 * len(finished.w[0])]
    module = mlp().eval()
    layout = Layout.of(module)
    accuracies = []
    for i in range(2):
        layout.load(module, models[i][: layout.size])
        test = job.parts[i].test(job.data)
        accuracies.append(int((module(test.inputs).argmax(1) == test.targets).sum()) / len(test))
    assert third["clients"]["test"] == accuracies
    assert third["test"] == pytest.approx(sum(accuracies) / 2)
    assert second["phase"] == 1


def test_what_a_killed_run_left_half_written_is_taken_away(tmp_path):
    (tmp_path / ".engine.json.31317.tmp").write_text("{")
    job = make_job(recipe(1, 1, 1))
    with Inline(job) as engine:
        run(job, engine, checkpoints=Checkpoints(tmp_path, "f"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl"]
