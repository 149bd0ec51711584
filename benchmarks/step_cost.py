"""What a step costs: one Algorithm-1 or QuPeL step (hard mode) against two bare forward+backward passes of the same
model and batch, and a straight-through step (`ste`), which makes one pass, against one; in one process, interleaved,
medians of many. A ratio near 1 means that quantization is free.

    python benchmarks/step_cost.py [--steps 40] [--threads 1] [--only cnn5]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from qupel.core.codebook import plan_bits
from qupel.core.layout import Layout
from qupel.core.prox import prox_centers
from qupel.core.quantize import init_centers
from qupel.core.schedule import Clock
from qupel.engine.stack import most_clients, together
from qupel.parts.base import State
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.quantizers.ste import StraightThrough
from qupel.tasks import zoo as models
from qupel.tasks.stack import StackTask
from qupel.tasks.task import ModuleTask, Problem
from qupel.util.machine import keep_memory

LIMIT = {"resnet20": 1.06, "cnn5": 1.06, "digits_cnn": 2.5}  # of two passes
WORK = {"resnet20": ((3, 32, 32), 128), "cnn5": ((3, 32, 32), 50), "digits_cnn": ((1, 8, 8), 20)}


def bare_pass(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """A plain training pass of an untouched module: zero gradients, forward, backward."""

    def once() -> None:
        module.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(module(inputs), targets).backward()

    return once


def interleaved(
    jobs: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median milliseconds of each job, taking turns so that a noisy moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 3):
        for name, job in jobs.items():
            start = clock()
            job()
            if turn >= 3:
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def step_ratio(name: str, bits: int, repeats: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    shape, size = WORK[name]
    module = models.build(name, shape, 10, seed=0).to(memory_format=torch.channels_last)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((size, *shape), dtype=np.float32))
    inputs = inputs.to(memory_format=torch.channels_last)
    targets = torch.from_numpy(rng.integers(0, 10, size))
    layout, task = Layout.of(module), ModuleTask(module, nn.functional.cross_entropy)
    x, problem = layout.flatten(module), Problem(task, task)
    states = {"Algorithm 1": Local(), "QuPeL": QuPeL(), "one pass": Local(quantizer=StraightThrough())}
    held = {k: m.start(State(x, x), plan_bits(layout, bits), problem) for k, m in states.items()}
    count = dict.fromkeys(states, 0)

    def stepper(kind: str) -> Callable[[], None]:
        def once() -> None:
            clock = Clock(count[kind], 1000, 10)
            held[kind], _ = states[kind].step(held[kind], problem, (inputs, targets), clock)
            count[kind] += 1

        return once

    once = bare_pass(module, inputs, targets)

    def twice() -> None:
        once()
        once()

    medians = interleaved({"pass": once, "two passes": twice, **{k: stepper(k) for k in states}}, repeats, clock)
    ratios = {k: medians[k] / medians["pass" if k == "one pass" else "two passes"] for k in states}
    return {"two passes": medians["two passes"], **ratios}


def stack_ratio(repeats: int, bits: int = 2) -> float:
    """A QuPeL step of a stack of clients with the digits MLP against two bare passes for each of them, in CPU time."""
    module = models.build("mlp", (1, 8, 8), 10, seed=0)
    layout, method = Layout.of(module), QuPeL()
    clients, size = most_clients(layout.size), 20
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((clients, size, 1, 8, 8), dtype=np.float32))
    targets = torch.from_numpy(rng.integers(0, 10, (clients, size)))
    x, task = layout.flatten(module), StackTask(module, nn.functional.cross_entropy)
    problem = Problem(task, task)
    one = method.start(State(x, x), plan_bits(layout, bits), problem)
    held, count = together([one] * clients), 0

    def step() -> None:
        nonlocal held, count
        held, _ = method.step(held, problem, (inputs, targets), Clock(count, 1000, 10))
        count += 1

    def passes() -> None:
        for own in zip(inputs, targets, strict=True):
            once = bare_pass(module, *own)
            once()
            once()

    medians = interleaved({"passes": passes, "step": step}, repeats, time.process_time)
    return medians["step"] / medians["passes"]


def center_prox(n: int = 1_000_000) -> dict[int, float]:
    """Milliseconds of the exact center prox of n weights, by number of centers."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(n, dtype=np.float32))
    jobs = {}
    for bits in (1, 2, 3):
        c = init_centers(x, bits, "kmeans")
        jobs[str(2**bits)] = lambda c=c: prox_centers(c, c, x, 1e-6, "exact")
    return {int(k): v for k, v in interleaved(jobs, 15).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=list(WORK), help="one model, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()  # as a worker does; the bare passes have it, too
    print(f"{options.threads} thread(s), median of {options.steps}; ratio to two bare passes")
    print(
        f"{'model':12} {'bits':>4} {'two passes':>12} {'Algorithm 1':>12} {'QuPeL':>8} {'limit':>6} {'ste / one':>10}"
    )
    for name in [options.only] if options.only else WORK:
        for bits in (1, 2, 3):
            r = step_ratio(name, bits, options.steps)
            print(
                f"{name:12} {bits:4} {r['two passes']:9.1f} ms {r['Algorithm 1']:12.3f} {r['QuPeL']:8.3f}"
                f" {LIMIT[name]:6.2f} {r['one pass']:9.3f}"
            )
    if options.only:
        return
    print(f"digits MLP, 2 bits, in a stack: QuPeL {stack_ratio(options.steps):.3f}")
    for m, ms in center_prox().items():
        print(f"exact center prox, 1,000,000 weights, {m} centers: {ms:.1f} ms")


if __name__ == "__main__":
    main()
