"""Federations on Flower's own processes, for tests: SuperLink, SuperNodes and resident workers on loopback."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import flower_bench as bench
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.flower import processes
from qupel.flower.folder import Federation
from qupel.flower.tryout import down, up
from qupel.parts.base import vector
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.run.jobs import build_job, cells
from tiny import rows_of


def qupel(*arguments, check=True, **options):
    done = subprocess.run(
        [sys.executable, "-m", "qupel", "flower", *map(str, arguments)], capture_output=True, text=True, **options
    )
    assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def leftovers(folder):
    """Command lines of living processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and "pytest" not in command:
            found.append(command)
    return found


@contextmanager
def fleets(place):
    """start_it(count, text) -> (a federation that is up, its config), in a folder; ended at last, with nothing left."""
    made = []

    def start_it(count, text="", nodes=None, change=None):
        config = place / "config.toml"
        config.write_text(text or bench.config(count))
        folder = place / "federation"
        qupel("init", folder, "--clients", count, "--config", config)
        federation = Federation.open(folder)
        if change:
            change(federation)
        made.append(federation)
        up(federation, count if nodes is None else nodes)
        return federation, config

    try:
        yield start_it
    finally:
        for federation in made:
            down(federation)
    for federation in made:
        limit = time.monotonic() + 20  # Flower's helpers look for their parent from time to time
        while leftovers(federation.folder) and time.monotonic() < limit:
            time.sleep(0.2)
        assert leftovers(federation.folder) == []
    processes.reap()  # another command may have ended them
    assert processes._CHILDREN == {}


def exported(federation, job):
    return [
        (federation.client(i) / "state" / job / "model.safetensors").read_bytes() for i in range(federation.clients)
    ]


def job_of(federation, name):
    return json.loads((federation.folder / "runs" / name / "request.json").read_text())["job"]


def local(text, folder):
    """(w, model files, states, lines) of the reference engine. text: a config, or one that is read already."""
    config = configs.parse(text, "test") if isinstance(text, str) else text
    (result,) = run_experiment(config, folder)
    files = [p.read_bytes() for p in sorted((folder / "cells").glob("*/models/*"))]
    job = build_job(config, cells(config)[0])
    with Inline(job) as engine:
        w = vector(run(job, engine).w)
        rows = list(rows_of(engine.shard.store).values())
    return w, files, rows, result["lines"]


@contextmanager
def begun(federation, config, *options):
    """`qupel flower run` in the background. Whatever happens, it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qupel", "flower", "run", str(federation.folder), str(config), *map(str, options)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def until(condition, seconds=600.0, process=None):
    limit = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "it never came to pass"
        time.sleep(0.1)


def rounds_done(target):
    path = target / "progress.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
