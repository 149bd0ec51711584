"""Machines that are short of something: one line that says what, and nothing left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qupel.engine import workers
from qupel.engine.rounds import run
from qupel.engine.workers import Pool, WorkerDied, Workers
from tiny import make_job, recipe

ENV = {**os.environ, "COLUMNS": "100"}
RUN = [sys.executable, "-m", "qupel", "run", "--set", "rounds=2", "--set", "seeds=[0]", "--set", "split.clients=2",
       "--set", "split.train_per_client=8", "--set", "methods.QuPeL.finetune=0",
       "--set", "evaluate_every=1"]  # fmt: skip


def test_a_stopped_worker_is_not_waited_for_without_end(monkeypatch):
    job = make_job(recipe(), sizes=(12,) * 5, names=("A", "B", "C", "D", "E"))
    with Pool(2) as pool:
        engine = Workers(pool, job)
        pid = pool.processes[1].pid

        def stop(progress):
            if progress.round == 3:
                os.kill(pid, signal.SIGSTOP)
                monkeypatch.setattr(workers, "PATIENCE", 1.0)
                monkeypatch.setattr(workers, "LONGER", 0)

        with pytest.raises(WorkerDied, match=rf"no word for \d+ s from worker 1 \(process {pid}\) with B, D: stopped"):
            run(job, engine, watch=stop)
    assert pool.processes[1].exitcode == -signal.SIGKILL  # gone with the pool


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_too_little_shared_memory_is_said_with_the_remedy(tmp_path):
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77; "$@"; code=$?; ls /dev/shm; exit $code'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *RUN, "--out", str(tmp_path / "r"), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV)
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 1 MB of shared memory are free, the workers need ")
    assert "--workers 1" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("count", [1, 2])
def test_a_limit_on_file_sizes_is_said_in_one_line(tmp_path, count):
    command = ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *RUN, "--out", str(tmp_path / "r"), "--workers", str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert err.startswith("error: ")
    assert "File too large" in err
    assert err.count("\n") == 1
    assert list(tmp_path.rglob(".*")) == []
    assert list(Path("/dev/shm").glob(f"torch_{process.pid}_*")) == []


def test_a_terminal_that_knows_only_ascii(tmp_path):
    plain = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [*RUN, "--out", str(tmp_path / "r"), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, env={**ENV, **plain})
    assert done.returncode == 0, done.stderr
    assert b"mean +- std" in done.stdout.replace(b"\n", b" ")
    done.stdout.decode("ascii")


def test_a_reader_that_has_seen_enough():
    for command in (["methods"], ["inspect", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, "-m", "qupel", *command], stdout=writer, stderr=subprocess.PIPE, env=ENV)
        os.close(writer)
        assert done.stderr == b""
        assert done.returncode in {1, 141}


def test_a_rank_that_waits_for_rank_0_heeds_sigterm():
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # takes the call, and says nothing
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(nobody.getsockname()[1])}
        environment = {**ENV, **place, "RANK": "1", "WORLD_SIZE": "2"}
        process = subprocess.Popen([sys.executable, "-m", "qupel", "run"], env=environment)
        nobody.settimeout(120)
        call, _ = nobody.accept()
        with call:
            process.terminate()
            try:
                assert process.wait(10) == -signal.SIGTERM
            finally:
                process.kill()
                process.wait()
