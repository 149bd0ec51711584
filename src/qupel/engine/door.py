"""Refuse at the door what would fail in the first step, in words."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from qupel.core.layout import Layout
from qupel.data.batches import batch, chunks, generator
from qupel.engine.job import Job
from qupel.parts.methods.base import any_network, methods
from qupel.tasks.judge import CALIBRATION_SAMPLES, EVALUATION_BATCH, Judge, value
from qupel.tasks.task import Diverged, ModuleTask
from qupel.util.errors import UserError


def check_trainable(job: Job) -> None:
    """Unknown layers, networks that a method cannot tie together, a model or a loss that does not take the data."""
    _check_networks(job)
    names = dict.fromkeys(job.network_of(i) for i in range(len(job.parts)))
    layouts = {name: _check_network(job, job.networks[name] if name else job.module) for name in names}
    for client, plan in enumerate(job.plans):
        for name in plan:
            layouts[job.network_of(client)][name]
    _check_metrics(job)


def _check_networks(job: Job) -> None:
    strangers = [i for i in range(len(job.parts)) if job.network_of(i)]
    for phase in job.phases if strangers else ():
        if not any_network(phase.method):
            why = f"{methods.name_of(phase.method)} ties x to w weight by weight"
            able = [name for name, entry in methods.all().items() if getattr(entry.part, "any_network", False)]
            raise UserError(
                f"{why}, but {job.name(strangers[0])} has another network; methods that take any: {', '.join(able)}"
            )


def _check_metrics(job: Job) -> None:
    """Every metric is tried on some test data of the first client that has any, with the model it begins with."""
    tested = next((i for i, part in enumerate(job.parts) if len(part.test_rows)), None)
    if not job.metrics or tested is None:
        return
    rows = generator(job.seed, "try metrics").permutation(job.parts[tested].test_rows)[:CALIBRATION_SAMPLES]
    some = chunks(replace(job.parts[tested], test_rows=np.sort(rows)).test(job.data), EVALUATION_BATCH, job.transform)
    module = job.networks[name] if (name := job.network_of(tested)) else job.module
    score = Judge(module, job.loss, job.metrics).score(Layout.of(module).flatten(module), [], some, job.name(tested))
    value(score, job.judge_by)


def _check_network(job: Job, module: nn.Module) -> Layout:
    """The smallest batch of all clients is tried, with the largest label, on a copy of the model."""
    layout = Layout.of(module)
    if layout.size == 0:
        raise UserError(f"the model has no parameters to train{': all are frozen' if layout.frozen else ''}")
    least = min(range(len(job.parts)), key=lambda i: len(job.parts[i].train_rows))
    inputs, targets = batch(job.data.train, job.parts[least].train_rows[: job.batch], job.transform)
    if targets.dtype == torch.int64:
        targets[0] = job.data.train.targets.max()
    try:
        with torch.random.fork_rng(devices=[]), suppress(Diverged):  # who diverges is refused in its round
            ModuleTask(module, job.loss).gradient(layout.flatten(module), (inputs, targets))
    except (RuntimeError, IndexError, ValueError, TypeError) as e:
        if "more than 1 value per channel" in str(e):
            why = "batch = 1" if job.batch == 1 else f"{job.name(least)} has 1 training sample"
            ways = "give more samples, or another normalization, such as GroupNorm"
            raise UserError(f"{why}, and this model's BatchNorm needs at least 2 at a time; {ways}") from e
        shape = tuple(inputs.shape[1:])
        raise UserError(f"the model or the loss does not take this data (inputs {shape}): {e}") from e
    return layout
