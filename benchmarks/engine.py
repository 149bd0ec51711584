"""What the engine costs, as ratios in one run.

1. A federated round of the 5-layer CNN against its bare forward+backward passes on the same core (FedAvg: one pass a
   step; QuPeL at 2 bits: two).
2. Two workers against one single-threaded worker, and against one process with two threads.
3. Two ranks of torch.distributed against two workers, on a model that computes much and on one that sends much.
4. Memory a client: resident memory at 10, 100 and 1,000 clients, with states in memory and on disk, against the size
   of a state.

    python benchmarks/engine.py [--repeats 5] [--only rounds|workers|ranks|memory]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from many_clients import beginning
from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data import partition, sources
from qupel.engine import group
from qupel.engine.inline import Inline
from qupel.engine.job import Job
from qupel.engine.rounds import one_round
from qupel.engine.workers import Pool, Workers
from qupel.parts.methods import methods
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.run import config, experiment, jobs
from qupel.tasks import zoo as models

CLIENTS, STEPS, BATCH = 4, 10, 50


def job_of(module: nn.Module, shape: tuple[int, ...], clients: int, method: FedAvg | QuPeL, steps: int) -> Job:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((clients * BATCH, *shape), dtype=np.float32)
    targets = rng.integers(0, 10, clients * BATCH)
    data = sources.from_arrays(inputs, targets, inputs[:clients], targets[:clients])
    plan = Plan() if isinstance(method, FedAvg) else plan_bits(Layout.of(module), 2)
    return Job(
        module=module,
        loss=nn.functional.cross_entropy,
        data=data,
        parts=partition.iid(len(data.train), len(data.test), clients, seed=0),
        plans=[plan] * clients,
        phases=[Phase(method, 1000)],
        local_steps=steps,
        batch=BATCH,
    )


def round_ratio(
    method: FedAvg | QuPeL, passes: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """A round of the 5-layer CNN / as many bare passes as its steps need."""
    torch.set_num_threads(1)
    module = models.build("cnn5", (3, 32, 32), 10, seed=0).to(memory_format=torch.channels_last)
    inputs = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    targets = torch.randint(0, 10, (BATCH,))
    job = job_of(module, (3, 32, 32), CLIENTS, method, STEPS)
    shared = beginning(job)
    took: dict[str, list[float]] = {"round": [], "passes": []}
    with Inline(job) as engine:
        for k in range(repeats + 1):
            start = clock()
            shared, *_ = one_round(job, engine, k, shared)
            middle = clock()
            for _ in range(CLIENTS * STEPS * passes):
                module.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(module(inputs), targets).backward()
            end = clock()
            if k:
                took["round"].append(middle - start)
                took["passes"].append(end - middle)
    return statistics.median(took["round"]) / statistics.median(took["passes"])


def rounds_against_passes(repeats: int) -> None:
    for method, passes in ((FedAvg(), 1), (QuPeL(), 2)):
        ratio = round_ratio(method, passes, repeats)
        print(
            f"{methods.name_of(method):8} round / its {passes * CLIENTS * STEPS} bare passes, cnn5: {ratio:.3f}",
            flush=True,
        )


def workers_against_threads(repeats: int) -> None:
    module = models.build("cnn5", (3, 32, 32), 10, seed=0)
    job = job_of(module, (3, 32, 32), CLIENTS, FedAvg(), STEPS)
    shared = beginning(job)
    took: dict[str, list[float]] = {"one worker": [], "two workers": [], "two threads": []}
    with Pool(1) as one, Pool(2) as two:
        engines = {"one worker": Workers(one, job), "two workers": Workers(two, job)}
        for k in range(repeats + 1):
            for name in took:
                start = time.perf_counter()
                if name == "two threads":
                    with Inline(job, threads=2) as engine:
                        one_round(job, engine, k, shared)
                else:
                    one_round(job, engines[name], k, shared)
                if k:
                    took[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in took.items()}
    print(f"two workers: {median['one worker'] / median['two workers']:.2f} x one single-threaded worker")
    print(
        f"two workers: {median['two threads'] / median['two workers']:.2f} x one process with two threads", flush=True
    )


def ranks_against_workers(repeats: int) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.random((CLIENTS * BATCH, 3, 32, 32), np.float32), rng.integers(0, 10, CLIENTS * BATCH)
    arrays = {"train_inputs": inputs, "train_targets": targets, "test_inputs": inputs, "test_targets": targets}
    with tempfile.TemporaryDirectory() as folder, Pool(2) as pool, group.start(2) as ranks:
        np.savez(f"{folder}/data.npz", **arrays)
        for model in ("cnn5", "mlp"):
            settings = {"data": {"name": f"{folder}/data.npz"}, "split": {"kind": "iid", "clients": CLIENTS}}
            settings |= {"model": {"name": model}, "rounds": 1000, "local_steps": STEPS, "batch": BATCH}
            settings |= {"methods": {"FedAvg": {"recipe": "fedavg"}}}
            cfg, cell = config.validate(settings, "benchmark"), jobs.Cell("FedAvg", 0)
            job = jobs.build_job(cfg, cell)
            shared = beginning(job)
            took: dict[str, list[float]] = {"workers": [], "ranks": []}
            with experiment.engine_for(cfg, cell, job, ranks, 2, Path(folder)) as engine:
                engines = {"workers": Workers(pool, job), "ranks": engine}
                for k in range(repeats + 1):
                    for name in took:
                        start = time.perf_counter()
                        one_round(job, engines[name], k, shared)
                        if k:
                            took[name].append(time.perf_counter() - start)
            a, b = (statistics.median(took[name]) for name in ("ranks", "workers"))
            print(
                f"{model} ({len(shared.w[0])} parameters): a round on two ranks {a / b:.2f} x one on two workers",
                flush=True,
            )


def memory_child(store: str, clients: int) -> None:
    """One round over all clients, then what this process holds, in bytes."""
    torch.set_num_threads(1)
    module = models.mlp(64, (512, 256), 10)
    job = job_of(module, (64,), clients, QuPeL(), 1)
    shared = beginning(job)
    with Inline(job, store=store) as engine:
        for k in range(2):
            shared, *_ = one_round(job, engine, k, shared)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = pages * 4096 - job.data.train.inputs.nbytes
    print(json.dumps({"held": held, "state": 4 * len(shared.w[0]) + 4 * sum(job.plans[0].values())}))


def memory() -> None:
    for store in ("memory", "disk"):
        held = {}
        for clients in (10, 100, 1000):
            command = [sys.executable, __file__, "--child", store, str(clients)]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            held[clients] = answer["held"]
        per = (held[1000] - held[100]) / 900
        state = answer["state"]
        sizes = ", ".join(f"{n}: {b / 1e6:.0f} MB" for n, b in held.items())
        print(f"{store:6} store, clients: {sizes}; {per / state:.3f} states a further client", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("rounds", "workers", "ranks", "memory"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        memory_child(options.child[0], int(options.child[1]))
        return
    if options.only in (None, "rounds"):
        rounds_against_passes(options.repeats)
    if options.only in (None, "workers"):
        workers_against_threads(options.repeats)
    if options.only in (None, "ranks"):
        ranks_against_workers(options.repeats)
    if options.only in (None, "memory"):
        memory()


if __name__ == "__main__":
    main()
