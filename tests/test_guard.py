"""One client sends poison: what is too far from w is refused, a ruined w goes back, and the run ends in every case."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from qupel.core.schedule import Schedule
from qupel.engine import rounds
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.guard import REST, Guard
from qupel.engine.inline import Inline
from qupel.engine.rounds import Begin, Failed, Stopped, run
from qupel.engine.shard import Trained
from qupel.engine.workers import Pool, Workers
from qupel.parts.base import Upload
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.phase import Phase
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.run import config
from qupel.run.experiment import run_experiment
from tiny import final_models, make_job, recipe, run_inline, same, timeless

SIZES = (12,) * 6
POISONER = 2


class Poisoned:
    """An engine whose third client sends what `poison` (round, upload, w) makes of its upload."""

    def __init__(self, engine, poison):
        self.engine, self.poison = engine, poison

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def train(self, round, w, clients):
        for done in self.engine.train(round, w, clients):
            if done.client == POISONER and done.upload is not None:
                (u,), (sent,) = done.upload.rows, w
                done = replace(done, upload=Upload((self.poison(round, u, sent),)))
            yield done


def noise(round, u, w):
    return w + 10 * torch.randn(len(w), generator=torch.Generator().manual_seed(round))


def ruin(round, u, w):
    """Within the bound and away from what is learned, growing: what only the losses tell."""
    return w - 30 * (u - w)


POISONS = {
    "sign flip": lambda round, u, w: 2 * w - u,
    "x100": lambda round, u, w: 100 * u,
    "x-10": lambda round, u, w: w - 10 * (u - w),
    "ruin": ruin,
    "noise": noise,
    "1e30 once": lambda round, u, w: torch.full_like(u, 1e30) if round == 5 else u,
    "1e30 first": lambda round, u, w: torch.full_like(u, 1e30) if round == 0 else u,
    "20 first": lambda round, u, w: torch.full_like(u, 20.0) if round == 0 else u,
}


def attacked(poison, tmp_path=None, rounds=24, **settings):
    settings = {"checkpoint_every": 2, **settings}
    job = make_job([Phase(FedAvg(eta1=Schedule(0.2)), rounds)], sizes=SIZES, **settings)
    seen = []
    with Inline(job) as engine:
        checkpoints = Checkpoints(tmp_path, "f") if tmp_path else None
        finished = run(job, Poisoned(engine, poison), checkpoints=checkpoints, watch=seen.append)
    return finished, seen


@pytest.mark.parametrize("name", POISONS)
def test_a_run_ends_with_finite_numbers_whatever_one_client_sends(name, tmp_path):
    finished, _ = attacked(POISONS[name], tmp_path)
    assert bool(torch.isfinite(finished.w[0]).all())
    for line in finished.lines:
        assert all(math.isfinite(line[key]) for key in ("train_loss", "test", "test_loss")), line
    assert finished.lines[-1]["round"] == 24
    assert float(finished.w[0].abs().max()) < 1e4


def test_one_upload_of_1e30_costs_its_client_one_round():
    finished, seen = attacked(POISONS["1e30 once"])
    refused = {p.round: p.refused for p in seen if p.refused}
    assert list(refused) == [6]
    (said,) = refused[6]
    assert said.startswith("client 2: round 6: upload is inf from w, over 50 times the usual ")
    honest, _ = attacked(lambda round, u, w: u)
    assert finished.lines[-1]["test"] == pytest.approx(honest.lines[-1]["test"], abs=0.15)


def test_in_the_first_round_the_rounds_own_median_decides():
    """Before it there is nothing to hold an upload against; a mean that one client made is not taken."""
    finished, seen = attacked(POISONS["20 first"], rounds=4)
    assert [len(p.refused) for p in seen] == [1, 0, 0, 0]
    assert "the new w of round 1, the old one stays: client 2 is " in seen[0].refused[0]
    assert float(finished.w[0].abs().max()) < 10


def test_a_ruined_w_goes_back_and_the_suspect_sits_out(tmp_path):
    finished, seen = attacked(ruin, tmp_path)
    backs = [b for line in finished.lines for b in line.get("rolled_back", [])]
    assert backs
    first = backs[0]
    assert first["suspects"] == [POISONER]
    assert first["to"] < first["round"]
    assert first["until"] == first["round"] + REST
    (note,) = next(p.notes for p in seen if p.notes)
    assert f"{'as after round' if first['to'] else 'as at the start'}" in note
    assert "client 2 moved farthest and sit out until round" in note
    assert json.dumps(backs)  # part of the metrics


def test_a_run_that_begins_after_shared_rounds_goes_back_to_where_it_began():
    """Not to the first model; and what the guard learned in those rounds it still knows."""
    job = make_job([Phase(FedAvg(eta1=Schedule(0.2)), 24)], sizes=SIZES)
    first = replace(job, phases=[replace(job.phases[0], rounds=8)])
    known = Guard(50.0, len(SIZES), 1)
    with Inline(first) as engine:
        shared = run(first, engine)
    known.known.losses, known.known.phase = [0.05, 0.04, 0.03], 0
    begin = Begin(8, shared.w, lines=shared.lines, guard=known.save())
    with Inline(job) as engine:
        finished = run(job, Poisoned(engine, ruin), begin=begin)
    backs = [b for line in finished.lines for b in line.get("rolled_back", [])]
    assert backs
    assert {b["to"] for b in backs} == {8}
    assert "over 10 times the 0.05 of the first rounds" in backs[0]["note"]
    assert ": w and the clients' states are as after round 8 again" in backs[0]["note"]


def test_what_the_guard_knows_of_shared_rounds_is_what_a_run_of_its_own_would_know(tmp_path, monkeypatch):
    seen = []

    class Seen(Guard):
        def __init__(self, *how):
            super().__init__(*how)
            seen.append(copy.deepcopy(self.known))

    monkeypatch.setattr(rounds, "Guard", Seen)
    text = "rounds = 10\nlocal_steps = 2\nevaluate_every = 10\n[split]\nclients = 4\ntrain_per_client = 20\n"
    text += '[methods.A]\nrecipe = "qupel"\n[methods.B]\nrecipe = "qupel"\nbits = 3\n'
    run_experiment(config.parse(text, "test"), tmp_path / "run")
    assert [len(known.losses) for known in seen] == [0, 3, 3, 3]  # the shared rounds, A; those are there, B


def test_a_checkpoint_made_just_before_is_the_ruined_one_and_is_not_gone_back_to(tmp_path):
    """A ruin shows in the clients' losses one round late: what was saved between holds it, and goes."""
    finished, _ = attacked(ruin, tmp_path, checkpoint_every=1)
    backs = [b for line in finished.lines for b in line.get("rolled_back", [])]
    assert backs
    assert all(b["to"] <= b["round"] - 2 for b in backs)


def test_without_a_bound_it_ends_as_it_did():
    with pytest.raises(Failed, match="try a smaller eta1"):
        attacked(POISONS["1e30 once"], upload_bound=0)


def test_when_nobody_is_suspect_divergence_ends_the_run():
    """Too large a step is not an attack: all clients move alike."""
    job = make_job([Phase(FedAvg(eta1=Schedule(1e20)), 6)], sizes=SIZES)
    with Inline(job) as engine, pytest.raises(Failed, match="try a smaller eta1"):
        run(job, engine)


def test_a_usual_that_changes_for_everyone_is_learned():
    """Steps that grow a thousandfold refuse some rounds, and no more."""
    job = make_job([Phase(FedAvg(eta1=Schedule(1e-6, drops=(2.0,), factor=1e5)), 12)], sizes=SIZES, epoch_steps=9)
    seen = []
    with Inline(job) as engine:
        run(job, engine, watch=seen.append)
    refused = [len(p.refused) for p in seen]
    assert refused[0] == 0
    assert refused[-1] == 0


def test_a_phase_that_tells_no_loss_at_x_is_not_taken_for_a_ruin():
    """BinaryRelax looks between x and Q(x) only; a client that moves farther than the others is none of it."""
    phases = [Phase(FedAvg(eta1=Schedule(0.2)), 4), Phase(FedAvg(eta1=Schedule(0.2), quantizer=BinaryRelax()), 4)]
    job = make_job(phases, sizes=SIZES, bits=(2,), evaluate_every=1)
    with Inline(job) as engine:
        finished = run(job, Poisoned(engine, lambda round, u, w: w + 4 * (u - w)))
    assert all("rolled_back" not in line for line in finished.lines)
    assert "train_loss" not in finished.lines[-1]


def test_every_engine_refuses_the_same():
    job = make_job(recipe(3, 4, 2), sizes=SIZES)
    ends = []
    for workers in (1, 2):
        if workers == 1:
            with Inline(job) as engine:
                finished = run(job, Poisoned(engine, POISONS["x100"]))
                ends.append((finished, final_models(job, engine, finished.w)))
        else:
            with Pool(2) as pool:
                engine = Workers(pool, job)
                finished = run(job, Poisoned(engine, POISONS["x100"]))
                ends.append((finished, final_models(job, engine, finished.w)))
    (one, models), (two, others) = ends
    assert any(line["refused"] for line in one.lines)
    assert same(one.w, two.w)
    assert same(models, others)
    assert timeless(one.lines) == timeless(two.lines)


def test_where_nothing_is_refused_no_bit_changes():
    job = make_job(recipe(), sizes=SIZES)
    (a, models), (b, others) = run_inline(job), run_inline(replace(job, upload_bound=0.0))
    assert same(a.w, b.w)
    assert same(models, others)
    assert timeless(a.lines) == timeless(b.lines)


@pytest.mark.parametrize("stop", [3, 7, 11, 15])
def test_an_attacked_run_is_resumed_to_the_same_end(tmp_path, stop):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, _ = attacked(ruin, tmp_path / "whole")
    job = make_job([Phase(FedAvg(eta1=Schedule(0.2)), 24)], sizes=SIZES, checkpoint_every=2)
    checkpoints = Checkpoints(tmp_path / "parts", "f")
    done = []
    with Inline(job) as engine, pytest.raises(Stopped):
        run(job, Poisoned(engine, ruin), checkpoints=checkpoints, watch=done.append,
            should_stop=lambda: len(done) >= stop - 1)  # fmt: skip
    with Inline(job) as engine:
        finished = run(job, Poisoned(engine, ruin), checkpoints=Checkpoints(tmp_path / "parts", "f"))
    assert same(whole.w, finished.w)
    assert timeless(whole.lines) == timeless(finished.lines)


# --- by hand ---

W = torch.zeros(4)


def upload(client, size):
    return Trained(client, Upload((torch.tensor([size, 0.0, 0.0, 0.0]),)), {"loss": 1.0})


def test_bound_and_suspects_by_hand():
    guard = Guard(10.0, clients=5, keep=2)
    for round, sizes in enumerate([(1.0, 2.0, 3.0, 1.0, 2.0), (2.0, 2.0, 7.0, 21.0, 2.0)]):
        guard.begin(round, 0, W)
        assert guard.present(range(5)) == [0, 1, 2, 3, 4]
        faults = [guard.screen(upload(i, s)).fault for i, s in enumerate(sizes)]
        assert guard.too_far(W, str) is None
    assert faults == [None, None, None, "round 2: upload is 21 from w, over 10 times the usual 2", None]
    assert guard.known.medians == [2.0, 2.0]
    assert guard.known.far == [{"2": 3.5}]
    assert guard.suspects() == [2]
    assert guard.send_to_rest([2]) == 12
    guard.begin(11, 0, W)
    assert guard.present(range(5)) == [0, 1, 3, 4]
    guard.begin(12, 0, W)
    assert guard.present(range(5)) == [0, 1, 2, 3, 4]
    assert guard.send_to_rest([2]) == 13 + 2 * REST
    again = Guard(10.0, 5, 2, json.loads(json.dumps(guard.save())))
    assert again.known == guard.known


def test_those_who_send_no_share_do_not_say_what_is_usual():
    """Where most clients go alone, the moves of the others are not far from anything."""
    guard, none = Guard(10.0, clients=5, keep=2), torch.zeros(1)
    for round in range(3):
        guard.begin(round, 0, W)
        for i in range(5):
            sent = upload(i, 2.0) if i == 4 else Trained(i, Upload((W,), none), {"loss": 1.0})
            assert guard.screen(sent).fault is None
        assert guard.too_far(torch.tensor([2.0, 0.0, 0.0, 0.0]), str) is None
    assert guard.known.medians == [2.0] * 3
    far = Trained(0, Upload((torch.full((4,), 1e3),), none), {"loss": 1.0})
    assert guard.screen(far).fault  # servers may not look at shares


def test_losses_by_hand():
    guard = Guard(10.0, clients=3, keep=1)

    def said(*losses, phase=0):
        told = []
        for loss in losses:
            guard.begin(0, phase, W)
            guard.present(range(3))
            told.append(guard.exploded({"loss": loss}))
        return told

    guard.begin(0, 0, W)
    guard.present(range(3))
    assert guard.exploded({}) is None  # clients that keep their losses to themselves
    assert said(1.0, 2.0, 1.5, 20.0) == [None] * 4
    assert guard.exploded({"loss": 20.1}) == "the clients' mean loss is 20.1, over 10 times the 2 of the first rounds"
    assert guard.exploded({"loss_quantized": 20.1}) == guard.exploded({"loss": 20.1})
    assert guard.exploded({}) is None  # those of this round are private
    assert guard.exploded({"relaxed_loss": 0.5}) is None  # they have one, of another kind
    guard.present([])
    assert guard.exploded({}) is None  # nobody took part
    assert said(25.0, 250.0, phase=1) == [None] * 2  # a phase may begin anywhere, and says what is high in it
    assert said(250.1, phase=1) != [None]
