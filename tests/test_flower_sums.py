"""Secure sums, their logs and asynchronous rounds on Flower itself: real processes, TLS, node keys. All else of them is
tested with the post in one process (test_flower_secure.py, test_flower_async.py)."""

import json
import os
import signal

import pytest

import flower_bench as bench
from flower_fleet import begun, fleets, qupel, rounds_done, until
from qupel.flower import chain
from qupel.flower.tryout import SERVER, Running, up

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow
CONFIG = f"""
rounds = 4
local_steps = 1
batch = 4
evaluate_every = 4
bits = 32
[model]
name = "mlp"
args = {{hidden = [8, 8]}}
{bench.SPLIT.format(count=4)}
[methods.QuPeL]
method = "fedavg"
"""


@pytest.fixture
def make(tmp_path):
    with fleets(tmp_path) as start_it:
        yield start_it


def told(target):
    return [json.loads(line) for line in (target / "progress.jsonl").read_text().splitlines()]


def test_a_secure_run_goes_on_without_a_client_that_is_killed(make):
    """The sums are of four, then of three; the server's log is replayed, and every client's own is whole."""
    federation, config = make(4, CONFIG)
    target = federation.folder / "runs" / "r"
    options = ("--name", "r", "--secure", "--minimum", 3, "--deadline", 60, "--audit")
    with begun(federation, config, *options) as process:
        until(lambda: rounds_done(target) >= 1, process=process)
        os.kill(Running.of(federation).processes["client-3"].pid, signal.SIGKILL)
        out, err = process.communicate(timeout=3600)
    assert process.returncode == 0, f"{out}\n{err}"
    assert [line["round"] for line in told(target)] == [1, 2, 3, 4]
    refused = [text for line in told(target) for text in line["refused"]]
    assert refused
    assert all(text.startswith("client 3: ") for text in refused)
    log = [line.entry for line in chain.read(target / "audit.jsonl")]
    sums = [c["share"] for entry in log for c in entry.get("clients", []) if c["client"] == -1]
    assert sums[0] == 4
    assert sums[2:] == [3, 3]
    assert not any("hash" in c for entry in log for c in entry.get("clients", []) if c["client"] >= 0)  # no upload came
    assert "replayed: 4 rounds end with the same bits" in qupel("audit", target, "--replay").stdout
    for client in range(4):
        assert "none changed; the last hash: " in qupel("audit", federation.client(client)).stdout


def test_an_asynchronous_run_is_killed_and_resumed(make):
    """Its server dies; resumed, it comes to its end, and what a client is asked for again is the answer it has kept."""
    federation, config = make(4, CONFIG.replace("rounds = 4", "rounds = 8"))
    target = federation.folder / "runs" / "r"
    options = ("--name", "r", "--mode", "async", "--buffer", 2, "--deadline", 60)
    with begun(federation, config, *options) as process:
        until(lambda: rounds_done(target) >= 2, process=process)
        os.killpg(Running.of(federation).processes[SERVER].pid, signal.SIGKILL)
        _, err = process.communicate(timeout=3600)
    assert process.returncode == 1, err
    assert "--resume" in err
    up(federation, 4)
    done = qupel("run", federation.folder, config, *options, "--resume")
    assert "round 8/8" in done.stdout
    for client in range(4):
        log = [line.entry for line in chain.read(federation.client(client) / "state/_audit.jsonl")]
        answers = {}
        for entry in log:
            if entry["asked"] == "train" and "refused" not in entry:
                answers.setdefault(entry["round"], set()).add(entry["body_hash"])
        assert answers
        assert all(len(hashes) == 1 for hashes in answers.values())
