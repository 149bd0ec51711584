"""What privacy costs: against closed forms, against dp-accounting called by hand, and in a file that is never behind
and never counts twice."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from qupel.core.layout import Layout
from qupel.engine import accounting
from qupel.engine.accounting import Budget, Release, epsilon, noise_for
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.inline import Inline
from qupel.engine.ledger import Ledger, Spent, planned, release_of
from qupel.engine.rounds import Failed, Shared, Stopped, one_round, run
from qupel.engine.workers import Pool, Workers
from qupel.parts.base import Upload, vector
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.scaffold import Scaffold
from qupel.parts.phase import Phase
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.parts.servers.median import Median
from qupel.parts.servers.private import Private
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.run.jobs import build_job, cells
from qupel.util.errors import UserError
from qupel.util.files import Damaged
from tiny import make_job, same, timeless

pytest.importorskip("dp_accounting")
DELTA = 1e-5


def gaussian(noise, delta=DELTA):
    """Epsilon of one Gaussian sum with this noise, in units of what it hides (Balle and Wang, ICML 2018, theorem 8)."""

    def left(e):
        return stats.norm.cdf(0.5 / noise - e * noise) - math.exp(e) * stats.norm.cdf(-0.5 / noise - e * noise) - delta

    return optimize.brentq(left, 0, 500)


# --- epsilon ---


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (5.0, 20), (20.0, 400)])
def test_without_sampling_it_is_the_closed_form(noise, rounds):
    """T sums with noise z are one with noise z / sqrt(T); an upload of one's own hides a change of two clips."""
    expected = gaussian(noise / math.sqrt(rounds))
    assert epsilon({Release(noise): rounds}, DELTA) == pytest.approx(expected, rel=1e-3)
    assert epsilon({Release(2 * noise, "local"): rounds}, DELTA) == pytest.approx(expected, rel=1e-3)
    halves = {Release(noise): rounds // 2, Release(noise * (1 + 1e-12)): rounds - rounds // 2}
    assert epsilon(halves, DELTA) == pytest.approx(expected, rel=1e-3)


def test_with_sampling_it_is_what_dp_accounting_says():
    dp = accounting.package()
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    by_hand = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    by_hand.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.5)), 50)
    found = epsilon({Release(1.5, "poisson", 0.1): 50}, DELTA)
    assert found == pytest.approx(by_hand.get_epsilon(DELTA), rel=1e-9)
    assert found < gaussian(1.5 / math.sqrt(50)) / 3  # it pays not to know who took part
    by_hand = RdpAccountant(range(2, 65), dp.NeighboringRelation.REPLACE_ONE)  # a sum may move by two clips
    by_hand.compose(dp.SampledWithoutReplacementDpEvent(500, 50, dp.GaussianDpEvent(4.0 / 2)), 50)
    found = epsilon({Release(4.0, "fixed", 0.1, 500): 50}, DELTA)
    assert found == pytest.approx(by_hand.get_epsilon(DELTA), rel=0.02)


def test_what_cannot_be_added_up_and_what_costs_everything():
    assert epsilon({}, DELTA) == epsilon({Release(1.0): 0}, DELTA) == 0
    assert epsilon({Release(0.0): 1}, DELTA) == math.inf
    with pytest.raises(UserError, match="cannot be added up"):
        epsilon({Release(1.0): 1, Release(1.0, "fixed", 0.5, 10): 1}, DELTA)


@pytest.mark.parametrize("target", [0.5, 8.0])
def test_the_noise_for_a_target_is_the_least(target):
    noise = noise_for(target, DELTA, lambda z: {Release(z): 30})
    assert epsilon({Release(noise): 30}, DELTA) <= target
    assert epsilon({Release(noise * 0.997): 30}, DELTA) > target


def test_without_the_package_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'qupel\[privacy\]'"):
        accounting.package()


# --- the server ---


def cover(server, uploads, w, rng=None):
    so_far = None
    for u in uploads:
        so_far = server.add(so_far, server.bounded(Upload((u,)), (w,)), 1.0)
    total = server.cover(so_far, (w,), rng or np.random.default_rng(0))
    return server.finish((w,), total, server.start((w,)))[0][0]


def test_moves_are_clipped_and_divided_by_those_expected():
    """One of three moves by more than the clip; of four expected only three came."""
    w = torch.tensor([1.0, 2.0])
    uploads = [w + torch.tensor(d) for d in ([3.0, 4.0], [0.1, 0.0], [0.0, -0.2])]
    found = cover(Private(clip=1.0, clients=4), uploads, w)
    torch.testing.assert_close(found, w + torch.tensor([0.6 + 0.1, 0.8 - 0.2]) / 4)
    momentum = cover(Private(clip=1.0, clients=4, server=FedAvgM(rate=0.5)), uploads, w)
    torch.testing.assert_close(momentum, w + torch.tensor([0.7, 0.6]) / 8)
    assert torch.equal(cover(Private(clip=1.0, clients=4), [], w), w)


@pytest.mark.parametrize("kind", ["central", "shared", "local"])
def test_noise_has_the_deviation_that_is_paid_for(kind):
    """On the sum: central and shared once, of local noise as much as there are clients."""
    n, d, w = 16, 20_000, torch.zeros(20_000)
    server = Private(clip=0.5, noise=2.0, kind=kind, clients=n)
    sent = [server.leave(Upload((w,)), (w,), np.random.default_rng(k)).rows[0] for k in range(n)]
    assert (kind == "central") == bool((sent[0] == 0).all())
    moved = n * cover(server, sent, w)
    expected = 1.0 * (math.sqrt(n) if kind == "local" else 1.0)
    assert float(moved.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * d))
    if kind == "central":  # nobody came: noise all the same
        assert float((n * cover(server, [], w)).std()) == pytest.approx(1.0, rel=5 / math.sqrt(2 * d))


def test_all_rows_are_one_vector_and_shares_are_told_by_the_move():
    w = (torch.zeros(2), torch.zeros(2))
    upload = Upload((torch.tensor([3.0, 0.0]), torch.tensor([0.0, 8.0])), torch.tensor([1.0, 0.5]))
    left = Private(clip=1.0).leave(upload, w, np.random.default_rng(0))
    assert left.shares is None
    torch.testing.assert_close(vector(left.rows), torch.tensor([0.6, 0.0, 0.0, 0.8]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip": 0.0}, "clip"),
        ({"noise": -1.0}, "noise"),
        ({"server": Median()}, "sum"),
        ({"server": Private()}, "sum"),
    ],
)
def test_what_cannot_be_private_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Private(**settings)


# --- runs ---


def private_job(noise=1.0, rounds=4, budget=None, method=None, kind="central", **settings):
    server = Private(clip=0.3, noise=noise, kind=kind, clients=4 * settings.get("sample", 1.0))
    job = make_job([Phase(method or FedAvg(), rounds, server), Phase(Local(), 1, server)], **settings)
    return replace(job, budget=Budget(DELTA, budget))


def run_it(job, path, **options):
    with Inline(job) as engine:
        return run(job, engine, ledger=Ledger(path / "privacy.json", "run", job), **options)


def test_a_run_costs_what_its_rounds_cost(tmp_path):
    """The phase that sends nothing costs nothing."""
    finished = run_it(private_job(noise=10.0), tmp_path)
    spent = {line["round"]: line["privacy"]["epsilon"] for line in finished.lines}
    for rounds in (2, 4):
        assert spent[rounds] == pytest.approx(gaussian(10.0 / math.sqrt(rounds)), rel=1e-3)
    assert spent[5] == spent[4]


@pytest.mark.parametrize("method", [FedAvg(), Scaffold()])
def test_every_engine_adds_the_same_noise(tmp_path, method):
    """Of a method with two rows both have it."""
    job = private_job(method=method, sample=0.5, sampling="poisson")
    finished = run_it(job, tmp_path / "one")
    assert any(not job.cohort(r) for r in range(4)) or len({len(job.cohort(r)) for r in range(4)}) > 1
    with Pool(2) as pool:
        ledger = Ledger(tmp_path / "two" / "privacy.json", "run", job)
        other = run(job, Workers(pool, job), ledger=ledger)
    assert same(finished.w, other.w)
    assert timeless(finished.lines) == timeless(other.lines)
    plain = replace(job, phases=[replace(p, server=replace(p.server, noise=1e-9)) for p in job.phases])
    quiet = run_it(plain, tmp_path / "three")
    assert all(float((a - b).abs().min()) > 0 for a, b in zip(finished.w, quiet.w, strict=True))


@pytest.mark.parametrize("kind", ["shared", "local"])
def test_noise_of_the_clients_own(tmp_path, kind):
    finished = run_it(private_job(noise=10.0, kind=kind), tmp_path)
    expected = gaussian((10.0 if kind == "shared" else 5.0) / 2)
    assert finished.lines[1]["privacy"]["epsilon"] == pytest.approx(expected, rel=1e-3)


def test_shared_noise_that_stays_away_is_missed():
    job = private_job(noise=2.0, kind="shared")
    assert release_of(job, job.phases[0].server, came=1) == Release(1.0)
    assert release_of(job, job.phases[0].server, came=9) == release_of(job, job.phases[0].server) == Release(2.0)


def test_a_run_that_costs_too_much_does_not_begin(tmp_path):
    job = private_job(noise=1.0, budget=3.0)
    with pytest.raises(UserError, match=r"make epsilon 10, .* target_epsilon is 3: give more noise, or fewer rounds"):
        run_it(job, tmp_path)
    assert not (tmp_path / "privacy.json").exists()


class Absent:
    """An engine where client 0 is not there in one round."""

    def __init__(self, engine, at):
        self.engine, self.at = engine, at

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def train(self, round, w, clients):
        for done in self.engine.train(round, w, clients):
            yield replace(done, upload=None, fault="away") if (round, done.client) == (self.at, 0) else done


def sums_of(path, run="run"):
    return {r: len(sums) for r, sums in json.loads(path.read_text())["runs"][run]["rounds"].items()}


def test_the_run_ends_before_the_budget_is_exceeded(tmp_path):
    """A round that is made again with another sum costs again; what was planned is then too much."""
    job = private_job(noise=10.0, budget=gaussian(10.0 / math.sqrt(4)) * 1.01)
    path = tmp_path / "privacy.json"

    def stop():
        raise KeyboardInterrupt

    with Inline(job) as engine, pytest.raises(KeyboardInterrupt):
        run(job, Absent(engine, 0), ledger=Ledger(path, "run", job), should_stop=stop)
    with Inline(job) as engine, pytest.raises(Spent, match=r"round 4 would make epsilon .* after 3 of 5 rounds"):
        run(job, engine, ledger=Ledger(path, "run", job))
    assert sums_of(path) == {"0": 2, "1": 1, "2": 1}


def test_a_second_sum_of_the_last_round_is_not_released_beyond_the_budget(tmp_path):
    """Killed when the last round was paid for; made again without a client, it is another sum, and one too many."""
    job = private_job(noise=10.0, budget=gaussian(10.0 / math.sqrt(4)) * 1.01)
    rounds = []

    def stop():
        rounds.append(1)
        if len(rounds) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_it(job, tmp_path, should_stop=stop)
    before = (tmp_path / "privacy.json").read_text()
    with Inline(job) as engine, pytest.raises(Spent, match="round 4 would make epsilon"):
        run(job, Absent(engine, 3), ledger=Ledger(tmp_path / "privacy.json", "run", job))
    assert (tmp_path / "privacy.json").read_text() == before
    run_it(job, tmp_path)  # with the same sums it is finished
    assert (tmp_path / "privacy.json").read_text() == before


def test_shared_noise_that_stays_away_ends_the_run_before_the_budget_is_exceeded(tmp_path):
    """The sum of the last round has less noise than was planned: it is not released."""
    job = private_job(noise=10.0, kind="shared", budget=gaussian(10.0 / math.sqrt(4)) * 1.001)
    path = tmp_path / "privacy.json"
    with Inline(job) as engine, pytest.raises(Spent, match="round 4 would make epsilon"):
        run(job, Absent(engine, 3), ledger=Ledger(path, "run", job))
    assert sums_of(path) == {"0": 1, "1": 1, "2": 1}


def test_another_run_meanwhile_is_seen_before_a_sum_is_released(tmp_path):
    """Both have begun when there was room for one."""
    job = private_job(noise=10.0, budget=gaussian(10.0 / math.sqrt(4)) * 1.01)
    path = tmp_path / "all.json"
    first = Ledger(path, "a", job)
    first.begin(0)
    with Inline(job) as engine:
        run(job, engine, ledger=Ledger(path, "b", job))
        with pytest.raises(Spent, match="round 1 would make epsilon"):
            one_round(job, engine, 0, Shared((Layout.of(job.module).flatten(job.module),), ()), ledger=first)
    assert list(json.loads(path.read_text())["runs"]) == ["b"]


def test_local_noise_costs_what_the_client_that_took_part_most_has_given(tmp_path):
    """Client 3 has its last round before the others; the run is stopped in between."""
    job = private_job(noise=20.0, kind="local", sample=0.5)
    assert [list(job.cohort(r)) for r in range(4)] == [[0, 3], [2, 3], [1, 3], [0, 1]]
    most = gaussian(10.0 / math.sqrt(3))
    job = replace(job, budget=Budget(DELTA, most * 1.001))
    rounds = []

    def stop():
        rounds.append(1)
        return len(rounds) == 2

    (tmp_path / "run").mkdir()
    with pytest.raises(Stopped):
        run_it(job, tmp_path, checkpoints=Checkpoints(tmp_path / "run", "x"), should_stop=stop)
    finished = run_it(job, tmp_path, checkpoints=Checkpoints(tmp_path / "run", "x"))
    assert finished.lines[-1]["privacy"]["epsilon"] == pytest.approx(most, rel=1e-3)


def test_other_runs_on_the_same_clients_count(tmp_path):
    path, job = tmp_path / "all.json", private_job(noise=10.0)
    for name in ("a", "b"):
        with Inline(job) as engine:
            last = run(job, engine, ledger=Ledger(path, name, job)).lines[-1]
    assert last["privacy"]["epsilon"] == pytest.approx(gaussian(10.0 / math.sqrt(8)), rel=1e-3)
    limited = replace(job, budget=Budget(DELTA, 1.2))
    with Inline(job) as engine, pytest.raises(UserError, match="of it by other runs"):
        run(limited, engine, ledger=Ledger(path, "c", limited))
    fixed = private_job(sample=0.5)
    with pytest.raises(
        UserError, match="counts for one client more or less; this run's sampling is for one client repl"
    ):
        Ledger(path, "d", fixed)


def test_what_one_client_gave_to_those_who_saw_it(tmp_path):
    job = private_job(noise=10.0, sample=0.5, sampling="poisson")
    run_it(job, tmp_path)
    ledger = Ledger(tmp_path / "privacy.json", "run", job)
    for client in range(4):
        took_part = sum(client in job.cohort(r) for r in range(4))
        expected = gaussian(10.0 / math.sqrt(took_part)) if took_part else 0.0
        assert ledger.of_client(client) == pytest.approx(expected, rel=1e-3)


def test_a_ledger_that_is_damaged_or_lost_ends_the_run(tmp_path):
    job = private_job()
    run_it(job, tmp_path)
    path = tmp_path / "privacy.json"
    with pytest.raises(UserError, match="does not have round 1 of this run, which is done"):
        Ledger(path, "other", job).begin(2)
    path.write_text(path.read_text().replace('"noise": 1.0', '"noise": 9.0'))
    with pytest.raises(Damaged):
        Ledger(path, "run", job)


def test_no_client_is_refused_for_being_far(tmp_path):
    """Who is refused would depend on the others; a clip bounds everybody."""
    job = private_job(noise=1e-6)
    assert job.upload_bound == 50

    class Far:
        def __init__(self, engine):
            self.engine = engine

        def __getattr__(self, name):
            return getattr(self.engine, name)

        def train(self, round, w, clients):
            for done in self.engine.train(round, w, clients):
                rows = tuple(1e6 + row for row in done.upload.rows) if done.upload and done.client == 1 else None
                yield replace(done, upload=replace(done.upload, rows=rows)) if rows else done

    with Inline(job) as engine:
        finished = run(job, Far(engine), ledger=Ledger(tmp_path / "p.json", "run", job))
    assert all(line["refused"] == [] for line in finished.lines)
    start = Layout.of(job.module).flatten(job.module)
    assert float((finished.w[0] - start).norm()) <= 4 * 0.3 + 1e-3


def test_all_clients_refused_is_no_release(tmp_path):
    job = private_job()

    class Broken:
        def __getattr__(self, name):
            return lambda *_: None

        def train(self, round, w, clients):
            return (replace(d, upload=None, fault="ill") for d in self.engine.train(round, w, clients))

    broken, ledger = Broken(), Ledger(tmp_path / "p.json", "run", job)
    with Inline(job) as engine:
        broken.engine = engine
        with pytest.raises(Failed):
            run(job, broken, ledger=ledger)
    assert not (tmp_path / "p.json").exists()


# --- configs ---

CONFIG = """
rounds = 6
local_steps = 2
batch = 5
sample = 0.7
sampling = "poisson"
evaluate_every = 4
checkpoint_every = 2
bits = 2
[model]
name = "mlp"
[split]
clients = 3
train_per_client = 8
test_per_client = 4
[privacy]
clip = 0.5
noise = 3
[methods.QuPeL]
recipe = "qupel-prox"
warmup = 0.5
init = "quantile"
"""


def test_the_noise_is_found_for_all_rounds_of_all_phases():
    config = configs.parse(CONFIG.replace("noise = 3", "target_epsilon = 5"), "test", ["sample=1.0"])
    job = build(config)
    assert [type(p.server) for p in job.phases] == [Private] * 3
    noises = {p.server.noise for p in job.phases}
    assert len(noises) == 1
    assert job.phases[0].server.clients == 3
    (release,) = planned(job)
    assert planned(job)[release] == 6
    assert 4.98 < epsilon(planned(job), DELTA) <= 5


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["weighted=true"], "weighted"),
        (["privacy.kind=shared"], "fixed"),
        (["methods.QuPeL.server=median"], "sum of the uploads"),
        (["privacy.noise=0"], "noise"),
    ],
)
def test_settings_that_are_not_private_are_refused(more, said):
    with pytest.raises(UserError, match=said):
        build(configs.parse(CONFIG, "test", more))


def build(config):
    return build_job(config, cells(config)[0])


def test_noise_or_a_target_is_needed():
    with pytest.raises(UserError, match="give noise, or target_epsilon"):
        configs.parse(CONFIG.replace("noise = 3", ""), "test")


# Imports once, then runs the command again and again in forked children, each killed at a random moment after the
# ledger has grown by some rounds; then once to its end.
KILLER = """
import json, os, random, signal, sys, time
import torch
from qupel import cli
torch.set_num_threads(1)
config, out = sys.argv[1:]
rng, ledger = random.Random(0), out + "/cells/QuPeL-s0/privacy.json"

def rounds():
    if not os.path.exists(ledger):
        return 0
    with open(ledger) as file:
        return len(json.load(file)["runs"]["QuPeL-s0"]["rounds"])

for attempt in range(21):
    goal, child = rounds() + rng.randint(0, 3), os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 1)
        sys.argv = ["qupel", "run", config, "--out", out, "--workers", "1"]
        sys.argv += ["--resume"] if os.path.exists(out + "/config.json") else []
        cli.main()
        os._exit(0)
    if attempt < 20:
        while rounds() < goal:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
print("exit", os.waitstatus_to_exitcode(status))
"""


def paid(folder):
    return json.loads((folder / "cells" / "QuPeL-s0" / "privacy.json").read_text())["runs"]["QuPeL-s0"]


@pytest.mark.slow
def test_twenty_kills_neither_lower_it_nor_count_twice(tmp_path):
    text = CONFIG.replace("rounds = 6", "rounds = 70").replace("checkpoint_every = 2", "checkpoint_every = 7")
    text = text.replace("clip = 0.5", "clip = 0.01")
    (tmp_path / "c.toml").write_text(text)
    (whole,) = run_experiment(configs.parse(text, "c"), tmp_path / "whole")
    arguments = [str(tmp_path / "c.toml"), str(tmp_path / "killed")]
    done = subprocess.run([sys.executable, "-c", KILLER, *arguments], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["exit", "0"], done.stderr
    result = json.loads((tmp_path / "killed" / "cells" / "QuPeL-s0" / "result.json").read_text())
    assert paid(tmp_path / "killed") == paid(tmp_path / "whole")  # every sum once, with the same clients
    assert timeless(result["lines"]) == timeless(whole["lines"])


def test_killed_between_paying_and_the_checkpoint(tmp_path):
    """The file is ahead of the run; resumed, the same sums are found and nothing is added."""
    job = replace(private_job(rounds=6), checkpoint_every=4)
    whole = run_it(job, tmp_path / "whole")

    class Killed(BaseException):
        pass

    rounds = []

    def stop():
        rounds.append(1)
        if len(rounds) in {3, 6}:
            raise Killed
        return False

    (tmp_path / "run").mkdir()
    for _ in range(2):
        with pytest.raises(Killed):
            run_it(job, tmp_path, checkpoints=Checkpoints(tmp_path / "run", "x"), should_stop=stop)
    finished = run_it(job, tmp_path, checkpoints=Checkpoints(tmp_path / "run", "x"))
    assert same(finished.w, whole.w)
    assert timeless(finished.lines) == timeless(whole.lines)
    assert (tmp_path / "privacy.json").read_text() == (tmp_path / "whole" / "privacy.json").read_text()
