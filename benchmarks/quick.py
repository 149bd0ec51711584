"""The own-engine ratios in under two minutes; exits 1 where one is past its limit, which is generous: a later change
that makes things slow is seen, a noisy machine is not.

    python benchmarks/quick.py
"""

import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import engine
import many_clients
import step_cost
from qupel.engine import checkpoint
from qupel.engine.guard import Guard
from qupel.engine.inline import Inline
from qupel.engine.rounds import one_round
from qupel.parts.methods.fedavg import FedAvg
from qupel.util import files
from qupel.util.machine import keep_memory

CLIENTS = 1_000
Line = tuple[str, float, str, bool]  # what, ratio, bar and limit in words, within the limit


def at_most(what: str, ratio: float, bar: float, limit: float) -> Line:
    return what, ratio, f"bar {bar:.2f}, limit {limit:.2f}", ratio <= limit


def steps() -> Iterator[Line]:
    """A QuPeL step at 2 bits against two bare passes: alone for convolutions, in a stack for the digits MLP."""
    for name, repeats in (("cnn5", 9), ("resnet20", 3)):
        ratio = step_cost.step_ratio(name, 2, repeats, time.process_time)["QuPeL"]
        yield at_most(f"QuPeL step / two passes, {name}", ratio, 1.06, 1.3)
    yield at_most("QuPeL step / two passes, digits MLP in a stack", step_cost.stack_ratio(9), 1.5, 2.5)


def stacks() -> Iterator[Line]:
    """Rounds of 1,000 clients with the digits MLP, one by one and in stacks."""
    for method in ("fedavg", "qupel"):
        job = replace(many_clients.job_of(CLIENTS, method), sample=1.0, local_steps=2)
        took = {}
        for stacked in (False, True):
            with Inline(replace(job, stacked=stacked)) as runner:
                shared = many_clients.beginning(job)
                shared, *_ = one_round(job, runner, 0, shared)  # makes states, warms up
                start = time.process_time()
                one_round(job, runner, 1, shared)
                took[stacked] = time.process_time() - start
        ratio = took[True] / took[False]
        yield at_most(f"{method} round of {CLIENTS:,} clients, digits MLP, stacks / one by one", ratio, 0.5, 0.9)


def checks() -> Iterator[Line]:
    """What the guard looks at in a round of 1,000 clients in stacks, and the checksums of a checkpoint every tenth: CPU
    time spent in these functions while a round and a checkpoint are made."""
    job = replace(many_clients.job_of(CLIENTS, "qupel"), sample=1.0)
    guard = Guard(job.upload_bound, CLIENTS, checkpoint.KEEP)
    looks = [(guard, name) for name in ("begin", "present", "screen", "too_far", "exploded")]
    sums = [(zlib, "crc32"), (files, "_seal"), (checkpoint, "checksums")]
    with Inline(job) as runner, tempfile.TemporaryDirectory() as folder:
        shared, *_ = one_round(job, runner, 0, many_clients.beginning(job), guard)  # makes states, warms up
        with watched(looks) as looked:
            start = time.process_time()
            shared, told, *_ = one_round(job, runner, 1, shared, guard)
            guard.exploded(told)
            took = time.process_time() - start
        kept = checkpoint.Checkpoints(Path(folder), "")
        with watched(sums) as summed:
            kept.save(2, shared.w, shared.memory, checkpoint.Since(), runner.save, guard.save())
    assert len(looked) == CLIENTS + 4
    assert len(summed) > CLIENTS, "a row has a checksum"
    ratio = (sum(looked) + sum(summed) / 10) / (took - sum(looked))
    yield at_most(f"guard and checksums / qupel round of {CLIENTS:,} clients, digits MLP", ratio, 0.01, 0.02)


@contextmanager
def watched(functions: list[tuple[Any, str]]) -> Iterator[list[float]]:
    """CPU seconds of every call of these functions, (owner, name) each."""
    took: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            found = function(*given, **named)
            took.append(time.process_time() - start)
            return found

        return call

    with ExitStack() as patches:
        for owner, name in functions:
            patches.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        yield took


def rounds() -> Iterator[Line]:
    ratio = engine.round_ratio(FedAvg(), 1, 1, time.process_time)
    yield at_most("FedAvg round / its bare passes, cnn5", ratio, 1.1, 1.35)


def crowds() -> Iterator[Line]:
    """10,000 clients, 1 % a round, states on disk."""
    for method in ("fedavg", "qupel"):
        ratio = many_clients.round_ratio(method, 10_000, 6)
        yield at_most(f"{method} round of 100 of 10,000 clients / of 100 of 100", ratio, 1.2, 1.5)
    peak = many_clients.peak_above_data(10_000, 4) / 1e9
    yield at_most("10,000 clients: GB of resident memory above the data, at its peak", peak, 2.0, 2.0)


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()  # as a worker does
    began, slow = time.monotonic(), 0
    for part in (steps, stacks, checks, rounds, crowds):
        for what, ratio, said, sound in part():
            slow += not sound
            print(f"{what:72} {ratio:6.3f}   {said}{'' if sound else '   TOO SLOW'}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
