"""The loop of rounds: w goes out, clients step, uploads come back, the server averages. It knows no concrete method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, tee
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qupel import diagnostics
from qupel.algorithms.base import Deployed
from qupel.engine.checkpoint import Checkpoints, Since
from qupel.engine.job import Job
from qupel.engine.shard import Judged, Trained, mean_or_nan
from qupel.errors import UserError
from qupel.evaluate import Score
from qupel.flat import Layout

MANY_CLIENTS = 200  # above this a line of metrics has no per-client lists


class Engine(Protocol):
    def train(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Trained]:
        """tau local steps at each client, in their order; an upload holds until the next result is asked for."""

    def evaluate(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Judged]: ...

    def deployed(self, round: int, w: Tensor, client: int) -> Deployed: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of the last finished round is on disk."""


class Failed(RuntimeError):
    """The run cannot go on: a client diverged, or sent what cannot be used."""


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round."""

    round: int  # rounds done
    rounds: int
    loss: float
    line: dict[str, Any] | None  # the metrics, when this round was evaluated
    refused: Sequence[str]


@dataclass(frozen=True)
class Finished:
    """The server's last model and the lines of metrics."""

    w: Tensor
    lines: list[dict[str, Any]]


def run(
    job: Job,
    engine: Engine,
    *,
    checkpoints: Checkpoints | None = None,
    begin: tuple[int, Tensor, list[dict[str, Any]], Path | None] | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run a job to its end, from its newest checkpoint if there is one, else from `begin`: (rounds done, w, metrics,
    folder with the clients' states) of a first phase, else from the start."""
    layout = Layout.of(job.module)
    initial = layout.flatten(job.module)
    start, w, lines, states = begin or (0, initial, [], None)
    since = Since()
    if checkpoints:
        found = checkpoints.load(layout.size)
        if found:
            start, w, since, states = found
        lines = checkpoints.lines(start, lines)
    if states is not None:
        engine.load(states)
    w = w.to(initial.device)
    spent, began = (lines[-1]["seconds"] if lines else 0.0), time.monotonic()
    for round in range(start, job.rounds):
        w, loss, refused, sent, drift = one_round(job, engine, round, w)
        since.losses.append(loss)
        since.refused.extend(refused)
        phase, within = job.locate(round)
        last = within == job.phases[phase].rounds - 1
        line = None
        if last or (round + 1) % job.evaluate_every == 0:
            judged = sorted(engine.evaluate(round, w, job.judged(round)), key=lambda j: j.client)
            line = metrics(job, round, judged, mean_or_nan(since.losses), since.refused, sent)
            if job.diagnostics != "off":
                line["diagnostics"] = diagnostics.summary(
                    job.phases[phase].method,
                    job.clock(round, job.local_steps - 1),
                    job.diagnostics,
                    job.local_steps,
                    [j.seen for j in judged if j.seen],
                    drift,
                    [before["diagnostics"] for before in lines if before["phase"] == phase],
                )
            line["seconds"] = round_to(spent + time.monotonic() - began)
            since = Since()
            lines.append(line)
        stop = should_stop() and round + 1 < job.rounds
        if checkpoints:
            if line:
                checkpoints.append(line)
            every = job.checkpoint_every or job.evaluate_every
            if stop or (round + 1) % every == 0 or round + 1 == job.rounds:
                checkpoints.save(round + 1, w, since, engine.save)
        watch(Progress(round + 1, job.rounds, loss, line, refused))
        if stop:
            raise Stopped(f"stopped after round {round + 1} of {job.rounds}")
    return Finished(w, lines)


def one_round(job: Job, engine: Engine, round: int, w: Tensor) -> tuple[Tensor, float, list[str], int, float | None]:
    """(new w, mean loss, who was refused and why, bytes a client sent, with diagnostics the drift of the uploads).

    Uploads are added in client order as they come, so that no engine needs room for all of them."""
    done: list[Trained] = []
    moved: list[tuple[float, float]] = []  # share and |upload - w|^2
    sent = 0

    def sound() -> Iterator[tuple[Tensor, float]]:
        nonlocal sent
        for d in engine.train(round, w, job.cohort(round)):
            done.append(replace(d, upload=None))
            if d.upload is not None:
                sent = max(sent, 4 * len(w) if d.wire is None else d.wire)
                if job.diagnostics != "off":
                    moved.append((job.share(d.client), diagnostics.apart(d.upload, w)))
                yield d.upload, job.share(d.client)

    found, new = sound(), w
    first = next(found, None)
    if first is not None:
        phase, _ = job.locate(round)
        uploads, shares = tee(chain([first], found))
        new = job.phases[phase].method.aggregate(w, (u for u, _ in uploads), (s for _, s in shares))
        for _ in found:  # clients train even where the server looks at no upload
            pass
    refused = [f"{job.name(d.client)}: {d.fault}" for d in done if d.fault]
    hint = "try a smaller eta1 (or eta2 for the centers), a smaller lambda, or clip the center gradient"
    if refused and (job.on_bad_upload == "stop" or len(refused) == len(done)):
        raise Failed(f"{refused[0]}. {hint}")
    # a client of a federation over machines may keep its loss to itself
    loss = mean_or_nan([d.loss for d in done if not d.fault and not math.isnan(d.loss)])
    return new, loss, refused, sent, diagnostics.drift(moved, w, new) if moved else None


def metrics(
    job: Job, round: int, judged: Sequence[Judged], loss: float, refused: Sequence[str], sent: int
) -> dict[str, Any]:
    """One line of metrics.jsonl. Accuracies are fractions; without class labels the mean test loss stands for them."""
    phase, _ = job.locate(round)
    line: dict[str, Any] = {
        "round": round + 1,
        "phase": phase,
        "method": job.phases[phase].method.method,
        "step": (round + 1) * job.local_steps,
        "epoch": (round + 1) * job.local_steps / job.steps_per_epoch,
        "loss": loss,
        "bits": mean_told([j.bits for j in judged]),
        "model_bytes": mean_told([j.bytes for j in judged]),
        "upload_bytes": sent,
        "dead_centers": sum(j.dead or 0 for j in judged),
        "refused": list(refused),
    }
    for name in ("test", "validation", "float_test"):
        scores = [getattr(j, name) for j in judged if getattr(j, name).count]
        if scores:
            line[name] = float(np.mean([value(s) for s in scores]))
            line[f"{name}_loss"] = float(np.mean([s.loss for s in scores]))
    if weights := [j.weights for j in judged if j.weights]:
        line["weights"] = weights
    if len(judged) <= MANY_CLIENTS:
        line["clients"] = {
            "test": [value(j.test) if j.test.count else None for j in judged],
            "bits": [j.bits for j in judged],
            "bytes": [j.bytes for j in judged],
        }
        if len(judged) < len(job.parts):  # some were not there to be judged
            line["clients"]["number"] = [j.client for j in judged]
    return line


def mean_told(values: Sequence[float | None]) -> float:
    """The mean over those that tell, NaN if nobody does."""
    told = [v for v in values if v is not None]
    return float(np.mean(told)) if told else math.nan


def value(score: Score) -> float:
    return score.loss if score.accuracy is None else score.accuracy


def round_to(seconds: float) -> float:
    return float(f"{seconds:.3f}")


def check_trainable(job: Job) -> None:
    """Refuse at the door what would fail in the first step: unknown layers, a model or loss that does not fit."""
    layout = Layout.of(job.module)
    if layout.size == 0:
        raise UserError("the model has no parameters to train")
    for plan in job.plans:
        for name in plan:
            layout[name]
    inputs = job.transform.apply(job.data.train.inputs[:2])
    try:
        with torch.no_grad():
            job.loss(job.module(inputs), job.data.train.targets[:2])
    except (RuntimeError, IndexError, ValueError, TypeError) as e:
        shape = tuple(inputs.shape[1:])
        raise UserError(f"the model or the loss does not take this data (inputs {shape}): {e}") from e
