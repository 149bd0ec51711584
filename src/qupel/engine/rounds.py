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
from qupel.engine.guard import Guard
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

    def load(self, folder: Path | None) -> None:
        """Take the clients' states of a checkpoint in place of those they have; None: those of the start."""


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of the last finished round is on disk."""


class Failed(RuntimeError):
    """The run cannot go on: a client diverged, or sent what cannot be used."""


class AllRefused(Failed):
    """Nothing that came in a round can be used."""

    def __init__(self, message: str, refused: list[str]) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True)
class Progress:
    """What a watcher is told after every round."""

    round: int  # rounds done
    rounds: int
    loss: float
    line: dict[str, Any] | None  # the metrics, when this round was evaluated
    refused: Sequence[str]
    notes: Sequence[str] = ()  # what else the user should know


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
    since, known = Since(), None
    if checkpoints:
        found = checkpoints.load(layout)
        if found:
            start, w, since, states, known, _ = found
        lines = checkpoints.lines(found, lines)
    guard = Guard(job.upload_bound, len(job.parts), checkpoints.keep if checkpoints else 1, known)
    if states is not None:
        engine.load(states)
    w = w.to(initial.device)
    spent, began = (lines[-1]["seconds"] if lines else 0.0), time.monotonic()
    for round in range(start, job.rounds):
        w, loss, refused, sent, drift, back = guarded_round(job, engine, round, w, guard, checkpoints)
        if back:
            since.rolled_back.append(back)
        else:
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
            if since.rolled_back:
                line["rolled_back"] = since.rolled_back
            line["seconds"] = round_to(spent + time.monotonic() - began)
            since = Since()
            lines.append(line)
        stop = should_stop() and round + 1 < job.rounds
        if checkpoints:
            if line:
                checkpoints.append(line)
            every = job.checkpoint_every or job.evaluate_every
            due = (round + 1) % every == 0
            if stop or due or round + 1 == job.rounds:
                checkpoints.save(round + 1, w, since, engine.save, guard.save(due), every)
        watch(Progress(round + 1, job.rounds, loss, line, refused, [back["note"]] if back else []))
        if stop:
            raise Stopped(f"stopped after round {round + 1} of {job.rounds}")
    return Finished(w, lines)


Round = tuple[Tensor, float, list[str], int, float | None]  # as `one_round` returns it


def guarded_round(
    job: Job, engine: Engine, round: int, w: Tensor, guard: Guard, checkpoints: Checkpoints | None
) -> tuple[*Round, dict[str, Any] | None]:
    """A round and, where it shows that w is ruined and someone may have done it, how far w and the clients' states went
    back. Rounds are counted on: a run ends, whatever is sent to it."""
    try:
        done = one_round(job, engine, round, w, guard)
        why = guard.exploded(done[1])
    except AllRefused as e:
        if not guard.outdated and not guard.suspects():
            raise
        done = w, math.nan, e.refused, 0, None
        why = None if guard.outdated else f"no client's round counts ({e.refused[0]})"
    suspects = guard.suspects() if why else []
    if not suspects:
        return *done, None
    returned, layout = guard.known.returned, Layout.of(job.module)
    every = job.checkpoint_every or job.evaluate_every  # not those of a stop: a run that is resumed goes the same way
    good = checkpoints.load(layout, returned, every) if checkpoints else None
    engine.load(good.folder if good else None)
    w = (good.w if good else layout.flatten(job.module)).to(w.device)
    guard.known.returned = good.rounds if good else 0
    until = guard.send_to_rest(suspects)
    where = f"as after round {good.rounds}" if good else "as at the start"
    note = f"{why}: w and the clients' states are {where} again; {job.list_names(suspects)} moved farthest and "
    note += f"sit out until round {until + 1}"
    back = {"round": round + 1, "to": good.rounds if good else 0, "suspects": suspects, "until": until, "note": note}
    return w, done[1], done[2], done[3], None, back


def one_round(job: Job, engine: Engine, round: int, w: Tensor, guard: Guard | None = None) -> Round:
    """(new w, mean loss, who was refused and why, bytes a client sent, with diagnostics the drift of the uploads).

    Uploads are added in client order as they come, so that no engine needs room for all of them."""
    phase, _ = job.locate(round)
    guard = guard or Guard(job.upload_bound, len(job.parts), 1)
    guard.begin(round, phase, w)
    done: list[Trained] = []
    moved: list[tuple[float, float]] = []  # share and |upload - w|^2
    sent = 0

    def sound() -> Iterator[tuple[Tensor, float]]:
        nonlocal sent
        for d in map(guard.screen, engine.train(round, w, guard.present(job.cohort(round)))):
            done.append(replace(d, upload=None))
            if d.upload is not None:
                sent = max(sent, 4 * len(w) if d.wire is None else d.wire)
                if job.diagnostics != "off":
                    moved.append((job.share(d.client), diagnostics.apart(d.upload, w)))
                yield d.upload, job.share(d.client)

    found, new = sound(), w
    first = next(found, None)
    if first is not None:
        uploads, shares = tee(chain([first], found))
        new = job.phases[phase].method.aggregate(w, (u for u, _ in uploads), (s for _, s in shares))
        for _ in found:  # clients train even where the server looks at no upload
            pass
    refused = [f"{job.name(d.client)}: {d.fault}" for d in done if d.fault]
    hint = "try a smaller eta1 (or eta2 for the centers), a smaller lambda, or clip the center gradient"
    if refused and job.on_bad_upload == "stop":
        raise Failed(f"{refused[0]}. {hint}")
    fault = guard.too_far(new, job.name)
    if refused and len(refused) == len(done):
        raise AllRefused(f"{refused[0]}. {hint}", refused)
    if fault:  # the clients' own states are as good as the old w
        refused.append(f"the new w of round {round + 1}, the old one stays: {fault}")
        new = w
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
        "bits": float(np.mean([j.bits for j in judged])),
        "model_bytes": float(np.mean([j.bytes for j in judged])),
        "upload_bytes": sent,
        "dead_centers": sum(j.dead for j in judged),
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
