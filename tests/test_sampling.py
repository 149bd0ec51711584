"""Some of the clients in a round (`sample` < 1): travel, schedules, late clients, and those that are never drawn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qupel.core.codebook import plan_bits, start_codebook
from qupel.core.layout import Layout
from qupel.core.schedule import Clock, Schedule, Travel, half_gap, weight_pull
from qupel.engine.inline import Inline
from qupel.engine.rounds import one_round, run
from qupel.paper.diagnostics import Diagnostics
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from qupel.run.recipes import find
from qupel.run.settings import Length, Settings
from tiny import beginning, make_job, run_inline, same

QUPEL = QuPeL(eta1=Schedule(0.1, cosine=12), quantizer=Prox(eta2=Schedule(0.0), lam=Travel(1.0)))
CENTERS = torch.tensor([-0.5, 0.1, 0.5])


def travel_of(job, client, rounds) -> float:
    """What weight_pull adds up to over a client's own rounds, in half-gaps."""
    clocks = [job.clock(r, k) for r in rounds if client in job.cohort(r) for k in range(job.local_steps)]
    return sum(weight_pull(Travel(1.0), QUPEL.eta1, c, CENTERS) / 2 for c in clocks) / half_gap(CENTERS)


@pytest.mark.parametrize("sample", [1.0, 0.5, 0.2])
def test_the_travel_of_a_phase_is_that_of_the_steps_a_client_makes(sample):
    job = make_job([Phase(QUPEL, 60)], sizes=(8,) * 10, sample=sample)
    each = [travel_of(job, client, range(60)) for client in range(10)]
    assert np.mean(each) == pytest.approx(1.0, abs=0.05)
    if sample == 1:
        assert each == pytest.approx([1.0] * 10)


def test_a_phase_so_short_that_few_take_part_is_travelled_once_by_those_who_do():
    job = make_job([Phase(QUPEL, 3)], sizes=(8,) * 20, sample=0.05)
    (client,) = job.cohort(1)
    assert travel_of(job, client, [1]) == pytest.approx(1.0, abs=0.05)


def test_epochs_are_those_that_a_client_is_expected_to_have_done():
    job = make_job([Phase(QUPEL, 40)], sizes=(12,) * 10, sample=0.3, batch=4, local_steps=3)  # an epoch: 3 steps
    clock = job.clock(20, 0)
    assert clock.time == pytest.approx(1 + 20 * 0.3)
    assert clock.epoch == 7
    whole = replace(job, sample=1.0)
    assert whole.clock(20, 2) == Clock(62, 120, 3, 1.0)
    assert whole.clock(20, 0).epoch == 21
    assert run_inline(replace(job, evaluate_every=40))[0].lines[-1]["epoch"] == pytest.approx(12)


def test_step_sizes_end_with_the_run_whatever_the_share():
    """The half cosine of a recipe is over all rounds, in epochs of a client."""
    for sample in (1.0, 0.25):
        job = make_job([Phase(FedAvg(), 1)], sizes=(12,) * 8, sample=sample)
        length = Length(40, job.local_steps, job.steps_per_epoch)
        job = job.with_phases(find("qupel").phases(Settings(warmup=0.5, finetune=0.25), length))
        sizes = [p.method.eta1(job.clock(r, 0).time) for r in range(40) for p in [job.phases[job.locate(r)[0]]]]
        assert sizes == pytest.approx([0.05 * (1 + np.cos(np.pi * r / 40)) for r in range(40)])


def test_diagnostics_tell_the_travel_that_was_made():
    job = make_job(
        [Phase(QUPEL, 12)], sizes=(8,) * 6, bits=(2,), sample=0.5, diagnostics=Diagnostics("cheap"), evaluate_every=5
    )
    finished, _ = run_inline(job)
    for line in finished.lines:
        made = [travel_of(job, client, range(line["round"])) for client in range(6)]
        assert line["diagnostics"]["travel"] == pytest.approx(np.mean(made), rel=1e-6)
    assert len(set(np.round(made, 3))) > 1  # they differ, as their rounds do


def test_a_late_client_starts_from_the_newest_w():
    job = make_job([Phase(QUPEL, 30)], sizes=(8,) * 8, bits=(2, 32), sample=0.25)
    with Inline(job) as engine:
        shared, drawn = beginning(job), set()
        for r in range(30):
            late = [i for i in job.cohort(r) if i not in drawn]
            for i in late:
                assert torch.equal(engine.shard.state(i, 0, shared.w).x, shared.w[0])
            drawn.update(job.cohort(r))
            before = shared.w[0]
            shared, *_ = one_round(job, engine, r, shared)
            if late and r:
                assert not torch.equal(before, engine.shard.initial)
            if len(drawn) == 8:
                break
        assert r > 1


def test_a_late_client_that_trains_alone_starts_from_its_first_model():
    job = make_job([Phase(Local(), 20)], sizes=(8,) * 8, sample=0.25)
    late = next(i for i in range(8) if i not in job.cohort(0))
    with Inline(job) as engine:
        finished = run(replace(job, phases=[Phase(Local(), 1)]), engine)
        assert torch.equal(engine.shard.state(late, 0, finished.w).x, engine.shard.initial)


def test_clients_that_are_never_drawn_ship_the_shared_model_and_are_counted():
    phases = [Phase(QUPEL, 4), Phase(QuPeL(lambda_p=Schedule(0.1), enters="free", quantizer=Frozen()), 2)]
    job = make_job(phases, sizes=(8,) * 20, bits=(2,), sample=0.1, evaluate_every=1)
    never = [set(range(20)) - {i for r in range(k) for i in job.cohort(r)} for k in range(1, 7)]
    assert never[-1]
    layout = Layout.of(job.module)
    with Inline(job) as engine:
        finished = run(job, engine)
        codebook = start_codebook(layout, finished.w[0], plan_bits(layout, 2), "paper")
        for i in never[-1]:
            model = engine.deployed(5, finished.w, i)
            assert torch.equal(model.x, codebook.hard(finished.w[0]))
    assert [line.get("never_took_part", 0) for line in finished.lines] == [len(n) for n in never]
    assert "never_took_part" not in run_inline(replace(job, sample=1.0))[0].lines[-1]


def test_a_resumed_run_counts_the_same(tmp_path):
    from qupel.engine.checkpoint import Checkpoints
    from qupel.engine.rounds import Stopped

    job = make_job([Phase(QUPEL, 6)], sizes=(8,) * 20, bits=(2,), sample=0.1, evaluate_every=1)
    whole, _ = run_inline(job)
    checkpoints, seen = Checkpoints(tmp_path, "x"), []
    with Inline(job) as engine, pytest.raises(Stopped):
        run(job, engine, checkpoints=checkpoints, watch=seen.append, should_stop=lambda: len(seen) == 2)
    with Inline(job) as engine:
        rest = run(job, engine, checkpoints=checkpoints)
    assert same(rest.w, whole.w)
    assert [x["never_took_part"] for x in rest.lines] == [x["never_took_part"] for x in whole.lines]
