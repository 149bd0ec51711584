"""A hundred thousand clients with states on disk, 100 of them a round: does a round, a checkpoint or a start notice the
others? Every client has a state of its own before anything is measured (20 GB), in files as a run's checkpoints leave
them; then a run goes on from there, is killed and goes on again.

    python benchmarks/many_clients.py [--clients 100000] [--scratch FOLDER] [--out FILE.json]

Rounds are CPU time, against rounds of the same cohort drawn from 100 clients, in one process, taking turns. Memory is
the peak of a process above its data. Start and resume are wall time from the start of a process to its first round, but
for making the data.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data.batches import Transform
from qupel.data.clients import Client, pool
from qupel.data.partition import Part, by_owner
from qupel.data.sources import from_arrays
from qupel.engine.checkpoint import Checkpoints, Since
from qupel.engine.door import check_trainable
from qupel.engine.fingerprint import of_job
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Progress, Shared, enter, one_round, run
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.tasks import zoo as models
from qupel.util.files import write_json
from qupel.util.machine import machine

COHORT, SAMPLES, STEPS, BATCH = 100, 100, 5, 20
METHODS = {"fedavg": FedAvg(), "qupel": QuPeL()}
SLICE = 2_000  # clients whose states one checkpoint of the beginning adds
ROUNDS = 8  # that are measured
OUT = Path(__file__).parents[1] / "docs" / "results" / "many_clients.json"


def job_of(clients: int, method: str) -> Job:
    """Digit-like images (1, 8, 8), an MLP of 50,826 parameters, its middle layer at 2 bits."""
    rng = np.random.default_rng(0)
    inputs, targets = (
        rng.integers(0, 256, (clients * SAMPLES, 1, 8, 8), np.uint8),
        rng.integers(0, 10, clients * SAMPLES),
    )
    module = models.build("mlp", (1, 8, 8), 10, seed=0)
    plan = plan_bits(Layout.of(module), 2) if method == "qupel" else Plan()
    rows = np.arange(clients * SAMPLES).reshape(clients, SAMPLES)
    return Job(
        module=module,
        loss=nn.functional.cross_entropy,
        data=from_arrays(inputs, targets, inputs[:1], targets[:1]),
        parts=[Part(own, own[:0]) for own in rows],
        plans=[plan] * clients,
        phases=[Phase(METHODS[method], 1000)],
        local_steps=STEPS,
        batch=BATCH,
        sample=COHORT / clients,
        stacked=True,
    )


def beginning(job: Job) -> Shared:
    """What the server has before the first round."""
    return enter(job.phases[0], (Layout.of(job.module).flatten(job.module),))


def round_ratio(method: str, clients: int, rounds: int) -> float:
    """A round among many clients / a round among 100, medians of CPU time."""
    torch.set_num_threads(1)
    jobs = [job_of(clients, method), job_of(COHORT, method)]
    with tempfile.TemporaryDirectory() as scratch:
        engines = [Inline(job, store="disk", scratch=Path(scratch)) for job in jobs]
        took = turns(jobs, engines, [beginning(job) for job in jobs], 0, rounds)
    return statistics.median(took[0]) / statistics.median(took[1])


def turns(
    jobs: list[Job], engines: list[Inline], shared: list[Shared], first: int, rounds: int
) -> tuple[list[float], list[float]]:
    """CPU seconds of rounds of two federations that take turns, the first of each left out."""
    took: tuple[list[float], list[float]] = ([], [])
    for r in range(first, first + rounds + 1):
        for k, (job, engine) in enumerate(zip(jobs, engines, strict=True)):
            start = time.process_time()
            shared[k], *_ = one_round(job, engine, r, shared[k])
            if r > first:
                took[k].append(time.process_time() - start)
    return took


def peak_child(clients: int, scratch: Path, rounds: int) -> int:
    """Some rounds of QuPeL, then the peak of this process above its data, in bytes."""
    torch.set_num_threads(1)
    job = job_of(clients, "qupel")
    with Inline(job, store="disk", scratch=scratch) as engine:
        shared = beginning(job)
        for r in range(rounds):
            shared, *_ = one_round(job, engine, r, shared)
    return above_data(job)


def above_data(job: Job) -> int:
    """The peak of this process's resident memory without its data, in bytes."""
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak - sum(t.nbytes for t in (job.data.train.inputs, job.data.train.targets))


def peak_above_data(clients: int, rounds: int) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        return int(child("peak", clients, Path(scratch), "--rounds", str(rounds)))


def child(part: str, clients: int, scratch: Path, *more: str) -> Any:
    """What a part of the benchmark tells."""
    return told_by([__file__, "--part", part, "--clients", str(clients), "--scratch", str(scratch), *more])


def told_by(arguments: list[str]) -> Any:
    """What a process of its own prints as its last line."""
    environment = {**os.environ, "BEGAN": str(time.time())}
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
    assert done.returncode in (0, -signal.SIGKILL), f"{arguments}: exit code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


# --- parts of the whole, each in a process of its own ---


def made(clients: int) -> tuple[Job, np.ndarray]:
    """The federation as `qupel.fit` makes and checks it, of arrays of each client; and what making these arrays took,
    in wall and CPU seconds."""
    began = clocks()
    rng, small = np.random.default_rng(0), job_of(COHORT, "qupel")
    inputs, targets = (
        rng.integers(0, 256, (clients, SAMPLES, 1, 8, 8), np.uint8),
        rng.integers(0, 10, (clients, SAMPLES)),
    )
    took = clocks() - began
    data = pool([Client(x, y, x[:1], y[:1]) for x, y in zip(inputs, targets, strict=True)])
    job = replace(
        small,
        data=data,
        parts=by_owner(data),
        plans=[small.plans[0]] * clients,
        names=data.owners,
        transform=Transform.of(data),
        sample=COHORT / clients,
        evaluate_every=10**6,
        checkpoint_every=1,
    )
    check_trainable(job)
    return job, took


def clocks() -> np.ndarray:
    """Wall and CPU seconds (2,)."""
    return np.array([time.time(), time.process_time()])


def fill(clients: int, scratch: Path) -> dict[str, float]:
    """Give every client a state of its own, some thousand with each checkpoint."""
    job, _ = made(clients)
    checkpoints, shared = Checkpoints(scratch, of_job(job)), beginning(job)
    start = time.monotonic()
    with Inline(job, store="disk", scratch=scratch) as engine:
        state = engine.shard.state(0, 0, shared.w)
        for first in range(0, clients, SLICE):
            for client in range(first, min(first + SLICE, clients)):
                engine.shard.store.put(client, 0, replace(state, x=state.x + 1e-6 * client))
            checkpoints.save(1 + first // SLICE, shared.w, shared.memory, Since(), engine.save)
    return {"seconds": time.monotonic() - start, "gigabytes": size_of(scratch) / 1e9}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Watched(Checkpoints):
    """Bytes and seconds of every checkpoint."""

    def save(self, *given: Any) -> None:
        before, start, cpu = written(), time.monotonic(), time.process_time()
        super().save(*given)
        took = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu}
        self.saves = [*getattr(self, "saves", []), {"bytes": written() - before, **took}]


def written() -> int:
    """Bytes that this process has given to the system to write."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


class Begins(Inline):
    """When its first round begins."""

    first: np.ndarray | None = None

    def train(self, *given: Any) -> Any:
        self.first = clocks() if self.first is None else self.first
        return super().train(*given)


def go_on(clients: int, scratch: Path, rounds: int) -> None:
    """A run that begins, or goes on from the newest checkpoint; killed after some rounds, each with a checkpoint.
    Seconds are those from the start of this process to its first round, without those in which the data were made."""
    job, making = made(clients)
    checkpoints, done = Watched(scratch, of_job(job)), []

    def watch(p: Progress) -> None:
        done.append(p.round)
        if len(done) == rounds:
            assert engine.first is not None
            wall, cpu = (engine.first - making - [float(os.environ["BEGAN"]), 0]).tolist()
            found = {"start": wall, "start_cpu": cpu, "saves": checkpoints.saves, "memory": above_data(job)}
            found["round"] = p.round
            print(json.dumps(found), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    with Begins(job, store="disk", scratch=scratch) as engine:
        run(job, engine, checkpoints=checkpoints, watch=watch)


def compare(clients: int, scratch: Path, rounds: int) -> dict[str, Any]:
    """Rounds of the federation whose clients all have states, and of 100 clients that all take part."""
    jobs = [made(clients)[0], made(COHORT)[0]]
    saved = Checkpoints(scratch, of_job(jobs[0])).load(Layout.of(jobs[0].module))
    assert saved is not None
    with tempfile.TemporaryDirectory() as other:
        engines = [Inline(job, store="disk", scratch=Path(other)) for job in jobs]
        engines[0].load(saved.folder)
        took = turns(jobs, engines, [beginning(job) for job in jobs], saved.rounds, rounds)
    return {"many": took[0], "few": took[1], "memory": above_data(jobs[0])}


# --- all of it ---


def bars(clients: int, scratch: Path) -> dict[str, Any]:
    """Every bar, what was measured, and whether it holds."""
    empty, full = scratch / "empty", scratch / "full"
    for folder in (empty, full):
        folder.mkdir(parents=True)
    fresh = child("go_on", clients, empty, "--rounds", "3")
    filled = child("fill", clients, full)
    one = child("go_on", clients, full, "--rounds", str(ROUNDS))
    again = child("go_on", clients, full, "--rounds", "2")
    turn = child("compare", clients, full, "--rounds", str(ROUNDS))
    few = child("go_on", COHORT, scratch / "empty" / "few", "--rounds", "3")
    changed = COHORT * 4 * (Layout.of(job_of(COHORT, "qupel").module).size + 4)
    ratio = statistics.median(turn["many"]) / statistics.median(turn["few"])
    most = max(save["bytes"] for save in one["saves"])
    memory = max(part["memory"] for part in (fresh, one, again, turn)) / 1e9
    found = {
        f"round of {COHORT} of {clients:,} / of {COHORT} of {COHORT}, CPU time": (ratio, 1.2),
        "memory above the data at its peak, GB": (memory, 4.0),
        "start to the first round, s": (fresh["start"], 20.0),
        "resume after SIGKILL to the first round, s": (again["start"], 20.0),
        "bytes of a checkpoint / of the states that changed, at most": (most / changed, 2.1),
    }
    assert again["round"] == one["round"] + 2
    return {
        "clients": clients,
        "bars": {what: {"measured": value, "bar": bar, "holds": value <= bar} for what, (value, bar) in found.items()},
        "cpu_seconds": {"start": fresh["start_cpu"], "resume": again["start_cpu"], "load": os.getloadavg()},
        "states": filled,
        "checkpoint": {"many": one["saves"], "few": few["saves"]},
        "rounds": turn,
        "memory_gb": {name: part["memory"] / 1e9 for name, part in (("start", fresh), ("full", one), ("few", few))},
        "machine": machine(),
    }


PARTS: dict[str, Callable[..., Any]] = {"fill": fill, "go_on": go_on, "compare": compare, "peak": peak_child}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--scratch", type=Path, help="a folder with room for all states; by default a temporary one")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        options.scratch.mkdir(parents=True, exist_ok=True)
        told = {"rounds": options.rounds} if options.rounds else {}
        print(json.dumps(PARTS[options.part](options.clients, options.scratch, **told)))
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        found = bars(options.clients, Path(scratch))
    for what, bar in found["bars"].items():
        print(f"{what:66} {bar['measured']:8.3f}   bar {bar['bar']:g}{'' if bar['holds'] else '   MISSED'}")
    cpu = found["cpu_seconds"]
    print(f"CPU seconds of the start {cpu['start']:.1f}, of the resume {cpu['resume']:.1f}; load {cpu['load'][1]:.1f}")
    write_json(options.out, found)
    sys.exit(0 if all(bar["holds"] for bar in found["bars"].values()) else 1)


if __name__ == "__main__":
    main()
