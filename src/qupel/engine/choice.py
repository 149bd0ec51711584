"""Clients one by one or in stacks: a quick look at the job decides, once, and the run keeps to it."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from qupel.core.layout import Layout
from qupel.engine.job import Job
from qupel.engine.shard import Shard
from qupel.engine.stack import StackedShard, most_clients
from qupel.tasks.task import Batch
from qupel.tasks.trees import over
from qupel.util.errors import UserError
from qupel.util.files import Damaged, read_json, write_sealed

Vectorize = Literal["auto", "on", "off"]
RECORD = "engine.json"

LEAST = 32  # clients in a round from which `auto` looks at all: with fewer the bits stay those of the loop
FEWEST = 4  # clients in a stack: of larger models one step is work enough
GAIN = 1.5  # how much faster stacks must be
LOOK = 2  # local steps that are timed
PATIENCE = 0.5  # seconds; where the loop alone takes longer, one look is enough


@dataclass(frozen=True)
class Choice:
    """How clients are trained, and why. ratio: time of the loop / time of stacks, where it was measured."""

    stacked: bool
    why: str
    ratio: float | None = None


def choose(job: Job, setting: Vectorize) -> Choice:
    """`off`: one by one. `on`: in stacks, or an error that says why not. `auto`: in stacks where they are measured to
    be at least 1.5 times as fast, on the first clients' own batches."""
    if setting == "off":
        return Choice(False, 'vectorize = "off"')
    why = _unfit(job, setting)
    if why is None:
        why = _disagreement(job)
    if why is not None:
        if setting == "on":
            raise UserError(f'vectorize = "on": {why}; allowed here: "off", or "auto", which says so and goes on')
        return Choice(False, why)
    if setting == "on":
        return Choice(True, 'vectorize = "on"')
    ratio = _ratio(job)
    stacked = ratio >= GAIN
    return Choice(stacked, f"stacks are {ratio:.2f} times as fast as one by one, from {GAIN} on they are used", ratio)


def settled(job: Job, setting: Vectorize, folder: Path | None) -> tuple[Job, Choice]:
    """The job as it will run. The choice is kept in <folder>/engine.json: a resumed run gets the same bits."""
    record = folder / RECORD if folder else None
    if record and record.exists():
        choice = Choice(**read_json(record))
    else:
        choice = choose(job, setting)
        if record and choice.ratio is not None and (record.parent / "checkpoints").exists():
            raise Damaged(
                f"{record} is missing: whether this run's clients are stacked was measured, and cannot be again"
            )
        if record:
            write_sealed(record, asdict(choice))
    return replace(job, stacked=choice.stacked), choice


def _unfit(job: Job, setting: Vectorize) -> str | None:
    """Why there is nothing to measure."""
    size, cohort = Layout.of(job.module).size, len(job.cohort(0))
    device = next(job.module.parameters()).device
    if device.type != "cpu":
        return f"stacks compute on CPUs, not on {device}"
    if setting == "auto" and cohort < LEAST:
        return f"{cohort} clients a round, fewer than {LEAST}"
    if setting == "auto" and most_clients(size) < FEWEST:
        return f"a model of {size:,} parameters has work enough for one client at a time"
    return None


def _disagreement(job: Job) -> str | None:
    """Why this model or loss cannot be stacked: it fails there, or gives other gradients than one by one."""
    one, many = Shard(job, ()), StackedShard(job, ())
    clients = job.cohort(0)[:2]
    size = min(job.batch, *(len(job.parts[i].train_rows) for i in clients))
    rows = [one.steps.rows(i, 0)[0, :size] for i in clients]  # (b,) each
    batches = many.batches(clients, 0, np.stack(rows))
    names = dict.fromkeys(["", *(job.network_of(i) for i in range(len(job.parts)))])
    return next((why for name in names if (why := _network_disagreement(one, many, name, batches))), None)


def _network_disagreement(one: Shard, many: StackedShard, name: str, batches: Batch) -> str | None:
    """batches: of some clients, (k, b, ...)."""
    x = one.start_of(name)  # (d,)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # vmap would loop over the clients itself
            found = many.stack_task(name).gradient(x, batches).gradient  # (2, d)
    except Exception as e:  # whatever a user's module raises under vmap
        said = str(e)
        if "random operation" in said:
            return "the model or the loss draws random numbers, as dropout does"
        return f"the model or the loss does not work in a stack: {said.split('. ')[0] or repr(e)}"
    for i in range(len(found)):
        own = Batch(*over(lambda leaf, i=i: leaf[i], tuple(batches)))
        expected = one.task("own", name).gradient(x, own).gradient
        if not float((found[i] - expected).abs().max()) <= 1e-3 * float(expected.abs().max()):
            return "the model or the loss gives other gradients in a stack than one by one"
    return None


def _ratio(job: Job) -> float:
    """Time of the loop / time of stacks for a few steps of the longest phase at the clients of one stack."""
    first = np.cumsum([0, *(p.rounds for p in job.phases)])
    longest = int(np.argmax([p.rounds for p in job.phases]))
    job = replace(job, local_steps=min(LOOK, job.local_steps))
    round = int(first[longest])
    clients = job.cohort(round)[: most_clients(Layout.of(job.module).size)]
    shards = [Shard(job, ()), StackedShard(job, ())]
    took: list[list[float]] = [[], []]
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # as clients are trained
    try:
        for turn in range(4):  # the first makes states and warms up
            for shard, times in zip(shards, took, strict=True):
                start = time.thread_time()
                for _ in shard.train(round, job.phases[longest].method.broadcast(shard.initial), clients):
                    pass
                if turn:
                    times.append(time.thread_time() - start)
            if turn and took[0][-1] > PATIENCE:
                break
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
    return min(took[0]) / min(took[1])
