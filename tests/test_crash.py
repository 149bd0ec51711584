"""A run that is killed, interrupted or stopped at any moment ends, once resumed, with the bits of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from qupel.run import config as configs
from qupel.run.experiment import run_experiment

CONFIG = """
rounds = 10
local_steps = 2
batch = 5
sample = 0.7
evaluate_every = 4
checkpoint_every = 2
[model]
name = "mlp"
[split]
clients = 3
train_per_client = 8
test_per_client = 4
[settings]
warmup = 0.3
finetune = 0.2
optimizer = "momentum"
init = "quantile"
[methods.QuPeL]
recipe = "qupel-prox"
[methods.Twin]
recipe = "qupel-prox"
lambda_p = 0.2
[methods.Local]
recipe = "local-prox"
"""


def outcome(folder):
    """Everything a run leaves that may not depend on how often it was interrupted."""
    found = {}
    for cell in sorted((folder / "cells").iterdir()):
        lines = [json.loads(text) for text in (cell / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((cell / "result.json").read_text())
        assert result["lines"] == lines
        found[cell.name, "lines"] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
        for model in sorted((cell / "models").iterdir()):
            found[cell.name, model.name] = model.read_bytes()
    return found


def clean(folder):
    """Nothing half-written, no checkpoint of a finished cell."""
    leftovers = [p for p in folder.rglob("*") if p.name.startswith(".") or p.name.endswith(".tmp")]
    assert leftovers == []
    assert not list((folder / "cells").glob("*/checkpoints"))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("crash") / "c.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The run that nobody disturbs, in this process."""
    folder = tmp_path_factory.mktemp("whole") / "r"
    run_experiment(configs.parse(CONFIG, "c"), folder)
    clean(folder)
    return outcome(folder)


def command(config_file, out, *more, workers=1):
    return [sys.executable, "-m", "qupel", "run", str(config_file), "--out", str(out), "--workers", str(workers), *more]


def start(config_file, out, *more, workers=1):
    resume = ["--resume"] if (out / "config.json").exists() else []
    return subprocess.Popen(
        command(config_file, out, *resume, *more, workers=workers),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )  # fmt: skip


def until(process, lines):
    """Wait until the run has reported this many evaluations."""
    for _ in range(lines):
        assert process.stdout.readline(), process.stderr.read()


def finish(process):
    _, err = process.communicate()
    return process.returncode, err


# --- SIGKILL ---

# Imports once, then runs the command again and again in forked children, each killed at a random moment.
KILLER = """
import os, random, signal, sys, time, warnings
import torch
from qupel import cli
torch.set_num_threads(1)
seed, kills, config, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
rng = random.Random(seed)
hits = 0
for attempt in range(kills + 1):
    child = os.fork()
    if child == 0:
        resume = ["--resume"] if os.path.exists(os.path.join(out, "config.json")) else []
        sys.argv = ["qupel", "run", config, "--out", out, "--workers", "1", *resume]
        cli.main()
        os._exit(0)
    if attempt < kills:
        time.sleep(rng.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    hits += os.WIFSIGNALED(status)
print("killed", hits, "exit", os.waitstatus_to_exitcode(status))
"""


def test_killed_at_random_moments(config_file, expected, tmp_path):
    out = tmp_path / "r"
    done = subprocess.run(
        [sys.executable, "-c", KILLER, "0", "8", str(config_file), str(out)], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr
    words = done.stdout.splitlines()[-1].split()
    assert words[0] == "killed"
    assert int(words[1]) >= 1
    assert words[3] == "0", done.stderr
    assert outcome(out) == expected
    clean(out)


def test_a_real_command_killed_between_its_rounds(config_file, expected, tmp_path):
    """`python -m qupel run` killed after its third evaluation, and resumed."""
    out = tmp_path / "r"
    process = start(config_file, out)
    until(process, 3)
    process.kill()
    code, _ = finish(process)
    assert code == -signal.SIGKILL
    for meta in out.rglob("round-*/meta.json"):  # a checkpoint folder that has its name is whole
        assert {p.name for p in meta.parent.iterdir()} >= {"w.bin", "shard-0.json"}
    run_experiment(configs.parse(CONFIG, "c"), out, resume=True)
    assert outcome(out) == expected
    clean(out)


# --- workers, and being asked to stop ---


def test_the_main_process_killed_under_its_workers(config_file, expected, tmp_path):
    """They see their pipes close and go, without a word; the run resumes with another number of them."""
    out = tmp_path / "r"
    process = start(config_file, out, workers=2)
    until(process, 1)
    process.kill()
    _, err = process.communicate(timeout=60)  # ends when the last process that holds its stderr does
    assert err == ""
    run_experiment(configs.parse(CONFIG, "c"), out, resume=True)
    assert outcome(out) == expected
    clean(out)


def test_sigterm_to_the_whole_group_ends_the_round_and_saves(config_file, expected, tmp_path):
    """As `timeout` sends it; Ctrl-C comes the same way. Workers leave it to the main process."""
    out = tmp_path / "r"
    process = start(config_file, out, workers=2)
    until(process, 2)
    os.killpg(process.pid, signal.SIGTERM)
    code, err = finish(process)
    assert code == 130, err
    assert err.startswith("stopping after this round")
    assert "stopped after round" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert len(list(out.rglob("checkpoints/round-*"))) >= 1
    assert len(run_experiment(configs.parse(CONFIG, "c"), out, resume=True)) == 3
    assert outcome(out) == expected
    clean(out)


@pytest.mark.slow
def test_ctrl_c_while_the_workers_are_still_starting(config_file, tmp_path):
    """Nobody dies of it: the first round is made, and saved."""
    out = tmp_path / "r"
    process = start(config_file, out, workers=2)
    while not (out / "config.json").exists():  # written right before the workers start
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    code, err = finish(process)
    assert code == 130, err
    assert "stopped after round 1 of" in err
    assert "Traceback" not in err
    assert list(out.glob("shared/*/checkpoints/round-000001"))


# --- what a crash may leave ---


def test_a_log_cut_short_in_the_middle_of_a_line_is_mended(expected, tmp_path):
    out = tmp_path / "r"
    stop_after(out, 5)
    (log,) = out.rglob("cells/*/metrics.jsonl")
    with log.open("a") as file:
        file.write('{"round": 6, "tes')
    run_experiment(configs.parse(CONFIG, "c"), out, resume=True)
    assert outcome(out) == expected


def test_what_a_power_cut_left_of_a_checkpoint_is_ignored(expected, tmp_path):
    out = tmp_path / "r"
    stop_after(out, 5)
    *_, done = sorted(out.glob("cells/*/checkpoints/round-*"))
    half = done.with_name(".round-000006.4242")
    half.mkdir()
    (half / "w.bin").write_bytes(b"\0" * 7)
    run_experiment(configs.parse(CONFIG, "c"), out, resume=True)
    assert outcome(out) == expected
    clean(out)


def test_a_stop_in_the_shared_warm_up_is_resumed(expected, tmp_path):
    out = tmp_path / "r"
    stop_after(out, 2)
    assert list(out.glob("shared/*/checkpoints/round-000002"))
    run_experiment(configs.parse(CONFIG, "c"), out, resume=True)
    assert outcome(out) == expected
    assert len(list(out.glob("shared/*"))) == 2  # one for both QuPeL cells, trained once, and one for Local


@pytest.mark.parametrize("rounds", [3, 4, 10, 11, 19])
def test_stopped_at_the_seams(expected, tmp_path, rounds):
    """After the warm-up, the first round behind it, the end of a cell, the start of the next."""
    out = tmp_path / "r"
    stop_after(out, rounds)
    run_experiment(configs.parse(CONFIG, "c"), out, resume=True)
    assert outcome(out) == expected


def stop_after(out, rounds):
    """Run until this many rounds (of all cells) are done."""
    from qupel.engine.rounds import Stopped

    seen = []
    try:
        run_experiment(
            configs.parse(CONFIG, "c"), out, watch=lambda cell, progress: seen.append(progress),
            should_stop=lambda: len(seen) >= rounds - 1,
        )  # fmt: skip
    except Stopped:
        return
    raise AssertionError("was never stopped")
