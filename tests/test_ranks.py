"""Ranks of torch.distributed: the bits of the local engine, whoever dies. Real processes, on 127.0.0.1 only."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from qupel.engine import group as groups
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.group import Group
from qupel.engine.inline import Inline
from qupel.engine.rounds import Failed, Stopped, run
from qupel.run import config as configs
from qupel.run import experiment, jobs
from qupel.util.errors import UserError
from test_crash import clean, outcome
from tiny import final_models, run_inline, same, saved_rows, timeless

CONFIG = """
rounds = 5
local_steps = 3
batch = 5
bits = [2, 3, 32]
evaluate_every = 2
checkpoint_every = 1
[model]
name = "mlp"
[split]
clients = 6
train_per_client = 12
test_per_client = 8
[settings]
warmup = 0.4
finetune = 0.2
optimizer = "momentum"
init = "quantile"
[methods.QuPeL]
recipe = "qupel-prox"
[[methods.Written.phases]]
method = "fedavg"
rounds = 1
eta1 = 0.1
[[methods.Written.phases]]
method = "qupel"
rounds = 4
eta1 = {start = 0.1, decay = 0.99}
lambda_p = 0.1
eta3 = 1.25
quantizer = {name = "prox", eta2 = 1e-4, lam = {growth = 1e-6}, center_gradient = "sum", init = "kmeans", mode = "soft"}
"""


@pytest.fixture(scope="module")
def two():
    """This process as rank 0, with one more."""
    with groups.start(2) as group:
        yield group


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """(config file, the config, what its run leaves) of forty rounds, long enough to be disturbed."""
    folder = tmp_path_factory.mktemp("long")
    text = CONFIG.replace("rounds = 5", "rounds = 40", 1).replace("warmup = 0.4", "warmup = 0.1")
    (folder / "c.toml").write_text(text.split("[[methods.Written", 1)[0])
    config = configs.load(folder / "c.toml")
    experiment.run_experiment(config, folder / "r")
    return folder / "c.toml", config, outcome(folder / "r")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the run leaves that nobody disturbs, in one process."""
    folder = tmp_path_factory.mktemp("whole") / "r"
    experiment.run_experiment(configs.parse(CONFIG, "c"), folder)
    return outcome(folder)


def on_ranks(group: Group, config, cell, job, folder):
    with experiment.engine_for(config, cell, job, group, group.size, folder) as engine:
        finished = run(job, engine)
        return finished, final_models(job, engine, finished.w)


# --- equality ---


@pytest.mark.parametrize("label", ["QuPeL", "Written"])
@pytest.mark.parametrize("changes", [[], ["sample=0.5", "weighted=true", "store=disk", "seeds=[3]"]])
def test_ranks_give_the_bits_of_one_process(two, label, changes, tmp_path):
    """Digits, six clients of 2, 3 and 32 bits, five rounds: w, every personal model, every line of metrics."""
    config = configs.parse(CONFIG, "c", changes)
    cell = jobs.Cell(label, config.seeds[0])
    job = jobs.build_job(config, cell)
    reference, models = run_inline(job)
    finished, others = on_ranks(two, config, cell, job, tmp_path)
    assert same(finished.w, reference.w)
    assert len({len(m) for m in models}) == 3  # bits differ
    assert same(models, others)
    assert timeless(finished.lines) == timeless(reference.lines)
    assert [p.name for p in tmp_path.iterdir()] == ["engine.json"]


def test_ranks_train_in_stacks_when_rank_0_says_so(two, tmp_path):
    config = configs.parse(CONFIG, "c", ["vectorize=on", "model.name=mlp"])
    cell = jobs.Cell("QuPeL", config.seeds[0])
    job = jobs.build_job(config, cell)
    reference, models = run_inline(job)
    finished, others = on_ranks(two, config, cell, job, tmp_path)
    torch.testing.assert_close(finished.w[0], reference.w[0], atol=1e-4, rtol=1e-3)
    for one, other in zip(models, others, strict=True):
        assert float((one - other).abs().mean()) < 1e-4  # a weight may take another center
    assert json.loads((tmp_path / "engine.json").read_text())["stacked"]


def test_rank_0_gives_generator_and_threads_back(two, tmp_path):
    config = configs.parse(CONFIG, "c")
    cell = jobs.Cell("QuPeL", 0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    on_ranks(two, config, cell, jobs.build_job(config, cell), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def poisoned(path: Path, bad=(3,)) -> None:
    """Six owners of samples; the inputs of the bad ones are beyond any number a model can square."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), 8)
    inputs = rng.standard_normal((48, 6)).astype(np.float32)
    inputs[np.isin(owner, bad)] *= 1e30
    targets = rng.integers(0, 3, 48)
    np.savez(path, train_inputs=inputs, train_targets=targets, train_groups=owner,
             test_inputs=inputs, test_targets=targets, test_groups=owner)  # fmt: skip


def test_a_diverged_client_is_refused_in_the_words_of_the_local_engine(two, tmp_path):
    """Client 3 is rank 1's; what it does is told by rank 0."""
    poisoned(tmp_path / "d.npz")
    config = configs.parse(CONFIG, "c", [f"data.name={tmp_path / 'd.npz'}", "split.kind=groups"])
    cell = jobs.Cell("QuPeL", 0)
    job = jobs.build_job(config, cell)
    reference, models = run_inline(job)
    finished, others = on_ranks(two, config, cell, job, tmp_path)
    assert json.dumps(timeless(finished.lines)) == json.dumps(timeless(reference.lines))  # text: NaN is not NaN
    assert all(r.startswith("client 3: round ") for line in finished.lines for r in line["refused"])
    assert sum(len(line["refused"]) for line in finished.lines) == 5
    assert same(finished.w, reference.w)
    assert same(models, others)


def test_if_all_diverge_the_run_fails_in_the_words_of_the_local_engine(two, tmp_path):
    poisoned(tmp_path / "d.npz", bad=range(6))
    changes = [f"data.name={tmp_path / 'd.npz'}", "split.kind=groups", "data.standardize=off"]
    config = configs.parse(CONFIG, "c", changes)
    cell = jobs.Cell("QuPeL", 0)
    job = jobs.build_job(config, cell)
    with Inline(job) as engine, pytest.raises(Failed) as local:
        run(job, engine)
    with pytest.raises(Failed, match=f"^{re.escape(str(local.value))}$"):
        on_ranks(two, config, cell, job, tmp_path)


# --- what a rank may find ---


def test_a_rank_with_other_data_is_refused_and_named(two, tmp_path):
    """As on a machine whose copy of the data is another: rank 1 builds the job of another seed."""
    config = configs.parse(CONFIG, "c")
    job = jobs.build_job(config, jobs.Cell("QuPeL", 0))
    with pytest.raises(UserError, match=r"^rank 1: its data, its split or its first model is not that of rank 0$"):
        on_ranks(two, config, jobs.Cell("QuPeL", 1), job, tmp_path)


def test_a_rank_that_lacks_the_data_says_so(two, tmp_path):
    poisoned(tmp_path / "d.npz", bad=())
    config = configs.parse(CONFIG, "c", [f"data.name={tmp_path / 'd.npz'}", "split.kind=groups"])
    cell = jobs.Cell("QuPeL", 0)
    job = jobs.build_job(config, cell)
    (tmp_path / "d.npz").unlink()
    with pytest.raises(UserError, match=r"^rank 1: .*d\.npz"):
        on_ranks(two, config, cell, job, tmp_path)


def test_a_bug_in_a_rank_keeps_its_traceback_and_the_rank_goes_on(two, tmp_path):
    config = configs.parse(CONFIG, "c")
    cell = jobs.Cell("QuPeL", 0)
    job = jobs.build_job(config, cell)
    with experiment.engine_for(config, cell, job, two, 2, tmp_path) as engine:
        w = (torch.zeros(7),)  # no model of this job
        with pytest.raises(RuntimeError, match=r"(?s)^rank 1 failed:\nTraceback.*in train"):
            list(engine.train(0, w, [1]))
        assert engine.deployed(0, run_inline(job)[0].w, 1).x.shape == (len(engine.shard.initial),)


# --- resuming with another engine ---


def test_a_run_of_one_process_is_finished_by_ranks(two, expected, tmp_path):
    config, out, seen = configs.parse(CONFIG, "c"), tmp_path / "r", []
    with pytest.raises(Stopped):
        experiment.run_experiment(
            config, out, watch=lambda cell, p: seen.append(p), should_stop=lambda: len(seen) >= 3
        )  # in the second phase, where clients have states
    experiment.run_experiment(config, out, workers=2, start=lambda _: nullcontext(two), resume=True)
    assert outcome(out) == expected
    clean(out)


def test_a_checkpoint_of_ranks_is_that_of_one_process(two, tmp_path):
    """The same records of the same clients; only rank 0 writes."""
    config = configs.parse(CONFIG, "c", ["sample=0.5"])
    cell = jobs.Cell("QuPeL", 0)
    job = jobs.build_job(config, cell)
    for name, crew in (("one", None), ("two", two)):
        (tmp_path / name).mkdir()
        with experiment.engine_for(config, cell, job, crew, 1, tmp_path / name) as engine:
            run(job, engine, checkpoints=Checkpoints(tmp_path / name, "f"))
    one, other = (tmp_path / name / "checkpoints" / "round-000005" for name in ("one", "two"))
    assert len(saved_rows(one)) == 5
    assert saved_rows(one) == saved_rows(other)
    for name in ("w.bin", "server.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


# --- real commands ---


@contextmanager
def started(command, **environment):
    """A command in a session of its own. Whatever happens, its processes are ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment}, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in (process.pid, *children(process)):
                os.kill(pid, signal.SIGKILL)
            process.communicate()


def qupel_run(config_file, out, *more):
    return [sys.executable, "-m", "qupel", "run", str(config_file), "--out", str(out), *more]


def until(process, lines):
    for _ in range(lines):
        assert process.stdout.readline(), process.stderr.read()


def children(process) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended, a zombie included."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_gone(pids) -> bool:
    """Whether these end within a minute by themselves; else they are ended here."""
    for _ in range(600):
        if all(gone(p) for p in pids):
            return True
        time.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return False


def test_a_dead_rank_ends_the_run_which_resumes_with_any_number(long, two, tmp_path):
    """Three ranks, one killed; one process goes on, and stops; two ranks finish it."""
    file, config, expected = long
    out = tmp_path / "r"
    with started(qupel_run(file, out, "--engine", "ranks", "--workers", "3")) as process:
        until(process, 4)  # behind the warm-up: clients have states
        ranks = children(process)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate()
    assert err == "error: rank 2 died (exit code -9) with client 2, client 5\n"
    assert process.returncode == 1
    assert all_gone(ranks)
    assert list(out.glob("cells/*/checkpoints/round-*/meta.json"))
    rounds = iter(range(3))
    with pytest.raises(Stopped):
        experiment.run_experiment(config, out, resume=True, should_stop=lambda: next(rounds, None) is None)
    experiment.run_experiment(config, out, workers=2, start=lambda _: nullcontext(two), resume=True)
    assert outcome(out) == expected
    clean(out)


def test_ranks_go_when_rank_0_is_killed_and_one_process_goes_on(long, tmp_path):
    file, config, expected = long
    out = tmp_path / "r"
    with started(qupel_run(file, out, "--engine", "ranks", "--workers", "2")) as process:
        until(process, 4)
        ranks = children(process)
        process.kill()
        _, err = process.communicate()  # ends when the last process that holds its stderr does
    assert err == ""
    assert all_gone(ranks)
    experiment.run_experiment(config, out, resume=True)
    assert outcome(out) == expected
    clean(out)


@pytest.mark.slow
def test_all_ranks_killed_at_once(long, two, tmp_path):
    file, config, expected = long
    out = tmp_path / "r"
    for _ in range(3):
        resume = ["--resume"] if out.exists() else []
        with started(qupel_run(file, out, "--engine", "ranks", "--workers", "3", *resume)) as process:
            until(process, 3)
            ranks = children(process)
            for pid in (*ranks, process.pid):
                os.kill(pid, signal.SIGKILL)
            process.communicate()
        assert all_gone(ranks)
    experiment.run_experiment(config, out, workers=2, start=lambda _: nullcontext(two), resume=True)
    assert outcome(out) == expected


def test_sigterm_ends_the_round_and_saves(long, tmp_path):
    file, config, expected = long
    out = tmp_path / "r"
    with started(qupel_run(file, out, "--engine", "ranks", "--workers", "2")) as process:
        until(process, 4)
        ranks = children(process)
        os.kill(ranks[0], signal.SIGTERM)  # as a scheduler sends it to every process: it is rank 0's business
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 130, err
    first, second = err.splitlines()
    assert first.startswith("stopping after this round")
    assert re.match(r"stopped after round \d+ of 40; go on with --resume", second)
    assert all_gone(ranks)
    experiment.run_experiment(config, out, resume=True)
    assert outcome(out) == expected


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(folder, *options):
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "qupel", "run"]
    return [*command, str(folder / "c.toml"), "--out", str(folder / "r")]


def test_torchrun_on_two_machines_that_share_no_folder(expected, tmp_path):
    """Two agents with a rank each. The second finds neither the config nor the run's folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "c.toml").write_text(CONFIG)
    meeting = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    with (
        started(torchrun(here, *meeting, "--node-rank", "0")) as first,
        started(torchrun(there, *meeting, "--node-rank", "1")) as second,
    ):
        out, err = first.communicate()
        other_out, other_err = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0), err + other_err
    assert "QuPeL, seed 0: round 5/5" in out
    assert other_out == ""
    assert outcome(here / "r") == expected
    assert not there.exists()


@pytest.mark.slow
def test_torchrun_starts_ranks_anew_and_the_run_goes_on(long, tmp_path):
    """--max-restarts with --resume: a dead rank costs the rounds since the last checkpoint, nothing else."""
    file, _, expected = long
    (tmp_path / "c.toml").write_text(file.read_text())
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with started([*torchrun(tmp_path, *options), "--resume"]) as process:
        until(process, 4)
        os.kill(children(process)[1], signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "error: rank 1 died with client 1, client 3, client 5" in err
    assert outcome(tmp_path / "r") == expected
    clean(tmp_path / "r")


def test_a_mistake_is_told_once(tmp_path):
    """By rank 0; the other is sent home. Any launcher that sets these variables will do."""
    (tmp_path / "c.toml").write_text(CONFIG.replace("clients = 6", "clints = 6"))
    command = [sys.executable, "-m", "qupel", "run", str(tmp_path / "c.toml")]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with started(command, RANK="0", **place) as first, started(command, RANK="1", **place) as second:
        out, err = first.communicate()
        rest = second.communicate()
    assert (first.returncode, second.returncode) == (2, 0)
    assert (out, *rest) == ("", "", "")
    assert err.count("\n") == 1
    assert "c.toml: split.clints: unknown key 'clints'; did you mean 'clients'" in err
