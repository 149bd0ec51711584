"""Ten thousand clients of 100 samples, one percent of them a round, states on disk: does a round notice the others?

Time of a round against a round of the same cohort size drawn from 100 clients, in one process, taking turns; and the
peak of resident memory above the data, in a process of its own.

    python benchmarks/many_clients.py [--clients 10000] [--rounds 8]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data.partition import Part
from qupel.data.sources import from_arrays
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import Shared, enter, one_round
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.tasks import zoo as models

COHORT, SAMPLES, STEPS, BATCH = 100, 100, 5, 20
METHODS = {"fedavg": FedAvg(), "qupel": QuPeL()}


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
        shared = [beginning(job) for job in jobs]
        took: list[list[float]] = [[], []]
        for r in range(rounds + 1):
            for k, (job, engine) in enumerate(zip(jobs, engines, strict=True)):
                start = time.process_time()
                shared[k], *_ = one_round(job, engine, r, shared[k])
                if r:
                    took[k].append(time.process_time() - start)
    return statistics.median(took[0]) / statistics.median(took[1])


def peak_child(clients: int, rounds: int) -> None:
    """Some rounds of QuPeL, then the peak of this process above its data, in bytes."""
    torch.set_num_threads(1)
    job = job_of(clients, "qupel")
    with tempfile.TemporaryDirectory() as scratch, Inline(job, store="disk", scratch=Path(scratch)) as engine:
        shared = beginning(job)
        for r in range(rounds):
            shared, *_ = one_round(job, engine, r, shared)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(peak - job.data.train.inputs.nbytes - job.data.train.targets.nbytes))


def peak_above_data(clients: int, rounds: int) -> int:
    command = [sys.executable, __file__, "--child", "--clients", str(clients), "--rounds", str(rounds)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        peak_child(options.clients, options.rounds)
        return
    for method in METHODS:
        ratio = round_ratio(method, options.clients, options.rounds)
        print(
            f"{method:8} a round of {COHORT} of {options.clients:,} clients: {ratio:.2f} x one of {COHORT} of {COHORT}"
        )
    for clients in (COHORT, options.clients):
        peak = peak_above_data(clients, options.rounds)
        print(f"{clients:,} clients: peak of resident memory {peak / 1e6:.0f} MB above the data", flush=True)


if __name__ == "__main__":
    main()
