"""Refuse at the door what would fail in the first step, in words."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.layout import Layout
from qupel.data.batches import batch, chunks, generator
from qupel.data.partition import Part
from qupel.data.samples import Arrays, Samples
from qupel.data.sources import kind_in_words
from qupel.engine.job import Job
from qupel.parts.methods.base import any_network, labels_only, methods
from qupel.tasks.judge import CALIBRATION_SAMPLES, EVALUATION_BATCH, Judge, value
from qupel.tasks.task import Diverged, ModuleTask, Tree, call
from qupel.tasks.trees import leaves
from qupel.util.errors import UserError


def check_trainable(job: Job) -> None:
    """Unknown layers, networks that a method cannot tie together, a model or a loss that does not take the data."""
    _check_networks(job)
    names = dict.fromkeys(job.network_of(i) for i in range(len(job.parts)))
    layouts = {name: _check_network(job, job.modules[name]) for name in ("", *names)}
    for client, plan in enumerate(job.plans):
        for name in plan:
            layouts[job.network_of(client)][name]
    _check_metrics(job)


def _check_networks(job: Job) -> None:
    strangers = [i for i in range(len(job.parts)) if job.network_of(i)]
    for phase in job.phases:
        if labels_only(phase.method) and job.data.classes is None:
            part = phase.method if getattr(phase.method, "labels_only", False) else phase.method.quantizer  # type: ignore[attr-defined]
            what = f"{type(part).__name__} learns from class probabilities"
            raise UserError(f"{what}, and this data ({job.data.name}) has no class labels")
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
    part = replace(job.parts[tested], test_rows=np.sort(rows))
    some = chunks(part.test(job.data), EVALUATION_BATCH, job.transform_of(tested))
    module = job.modules[job.network_of(tested)]
    score = Judge(module, job.loss, job.metrics).score(Layout.of(module).flatten(module), [], some, job.name(tested))
    value(score, job.judge_by)


def _check_network(job: Job, module: nn.Module) -> Layout:
    """The smallest batch of all clients is tried, with the largest label, on a copy of the model."""
    layout = Layout.of(module)
    if layout.size == 0:
        raise UserError(f"the model has no parameters to train{': all are frozen' if layout.frozen else ''}")
    least = min(range(len(job.parts)), key=lambda i: len(job.parts[i].train_rows))
    tried = batch(job.data.train, job.parts[least].train_rows[: job.batch], job.transform_of(least))
    if job.data.train.labels is not None:
        tried.targets[0] = job.data.train.labels.max()
    _check_tokens(job, module)
    try:
        with torch.random.fork_rng(devices=[]), suppress(Diverged):  # who diverges is refused in its round
            ModuleTask(module, job.loss).gradient(layout.flatten(module), tried)
    except (RuntimeError, IndexError, ValueError, TypeError) as e:
        if "more than 1 value per channel" in str(e):
            why = "batch = 1" if job.batch == 1 else f"{job.name(least)} has 1 training sample"
            ways = "give more samples, or another normalization, such as GroupNorm"
            raise UserError(f"{why}, and this model's BatchNorm needs at least 2 at a time; {ways}") from e
        kind = kind_in_words(job.data.train.kinds[0]).removeprefix("float32 ")
        hint = "; whole numbers are taken for tokens: for numbers give floats" if "int64" in kind else ""
        raise UserError(f"the model or the loss does not take this data (inputs {kind}): {e}{hint}") from e
    return layout


# --- tokens beyond the vocabulary ---


def _check_tokens(job: Job, module: nn.Module) -> None:
    """The samples with the largest tokens, of training and of test data, go through the network once. What is not in
    memory is looked at when it is read."""
    if not any(isinstance(layer, nn.Embedding) for layer in module.modules()):
        return
    for samples, held in ((job.data.train, _trained_on), (job.data.test, _tested_on)):
        for row in _largest(samples):
            owner = next((i for i, part in enumerate(job.parts) if row in held(part)), None)
            if owner is None:
                continue
            with torch.random.fork_rng(devices=[]):
                refuse_tokens(job, owner, module, batch(samples, np.array([row, row]), job.transform_of(owner)).inputs)


def _trained_on(part: Part) -> np.ndarray:
    rows = (part.train_rows, part.validation_rows, *([part.test_rows] if part.test_from_train else []))
    return np.concatenate(rows)


def _tested_on(part: Part) -> np.ndarray:
    return part.test_rows[:0] if part.test_from_train else part.test_rows


def _largest(samples: Samples) -> Iterator[int]:
    """The row with the largest number of every input of whole numbers."""
    if not isinstance(samples, Arrays):
        return
    for leaf in leaves(samples.inputs):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.numel():
            yield int(leaf.flatten(1).amax(1).argmax()) if leaf.ndim > 1 else int(leaf.argmax())


def refuse_tokens(job: Job, client: int, module: nn.Module, inputs: Tree) -> None:
    """Say whose token is beyond which vocabulary, in place of torch's "index out of range". Where none is, nothing."""
    said: list[str] = []
    module = copy.deepcopy(module).eval()

    def look(name: str, layer: nn.Embedding, given: tuple[Any, ...]) -> None:
        least, most = int(given[0].min()), int(given[0].max())
        if (most >= layer.num_embeddings or least < 0) and not said:
            found = f"token {most}, its largest," if most >= layer.num_embeddings else f"token {least}"
            allowed = f"a vocabulary of {layer.num_embeddings}, 0 to {layer.num_embeddings - 1}"
            said.append(f"{found} is not in layer {name!r}, which has {allowed}")

    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding):
            layer.register_forward_pre_hook(lambda layer, given, name=name: look(name, layer, given))
    with torch.no_grad(), suppress(Exception):
        call(module, inputs)
    if said:
        raise UserError(f"{job.name(client)}: {said[0]}")
