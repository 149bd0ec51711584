"""The loop of rounds: w goes out, clients step, uploads come back, the server averages. It knows no concrete method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qupel.core.layout import Layout
from qupel.engine import scores
from qupel.engine.checkpoint import Checkpoints, Saved, Since
from qupel.engine.guard import Guard
from qupel.engine.job import Job
from qupel.engine.ledger import Ledger, noise_of, private_part
from qupel.engine.shard import Judged, Trained
from qupel.parts.base import Deployed, Rows, Upload, vector
from qupel.parts.methods.base import methods, models_of, quantizer_of
from qupel.parts.phase import Phase
from qupel.parts.servers import ServerState, add
from qupel.tasks.judge import value
from qupel.tasks.metrics import ACCURACY, LOSS, Kind, kind_of


class Engine(Protocol):
    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        """tau local steps at each client, in their order; an upload holds until the next result is asked for."""

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]: ...

    def deployed(self, round: int, w: Rows, client: int) -> Deployed: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path | None) -> None:
        """Take the clients' states of a checkpoint in place of those they have; None: those of the start."""


Moved = tuple[list[tuple[float, float]], Tensor, Tensor]  # (share, |upload - w|^2) of each client, w before and after


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
    loss: float  # f(x), NaN where no client evaluated it
    loss_quantized: float  # f(Q(x)), of the clients that are quantized
    line: dict[str, Any] | None  # the metrics, when this round was evaluated
    refused: Sequence[str]
    notes: Sequence[str] = ()  # what else the user should know


class Begin(NamedTuple):
    """Where a run begins: rounds done, the server's model and memory, the metrics so far, a folder with the clients'
    states, the seconds that these rounds took, what the guard knows of them."""

    rounds: int
    w: Rows
    memory: ServerState = ()
    lines: Sequence[dict[str, Any]] = ()
    states: Path | None = None
    seconds: float = 0.0
    guard: dict[str, Any] | None = None


@dataclass(frozen=True)
class Finished:
    """The server's last model, its rows, and the lines of metrics."""

    w: Rows
    lines: list[dict[str, Any]]


def run(
    job: Job,
    engine: Engine,
    *,
    checkpoints: Checkpoints | None = None,
    begin: Begin | None = None,
    ledger: Ledger | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run a job to its end, from its newest checkpoint if there is one, else from `begin`, else from the
    start."""
    layout = Layout.of(job.module)
    initial = layout.flatten(job.module)
    begin = begin or Begin(0, (initial,))
    start, w, memory, before, states, spent, known = begin
    lines, since = list(before), Since()
    if checkpoints:
        found = checkpoints.load(layout)
        if found:
            start, w, memory, since, states, known, _ = found
        lines = checkpoints.lines(found, lines)
        scores.attach(checkpoints.log.parent, lines, len(job.parts))
    guard = Guard(bound_of(job), len(job.parts), checkpoints.keep if checkpoints else 1, known)
    if ledger:
        ledger.begin(start)
    if states is not None:
        engine.load(states)
    model = Shared(w, memory).to(initial.device)
    spent, began = max([spent, *(line["seconds"] for line in lines[-1:])]), time.monotonic()
    drawn = {client for round in range(start) for client in job.cohort(round)} if job.sample < 1 else set()
    for round in range(start, job.rounds):
        phase, within = job.locate(round)
        if within == 0:
            past = (job.phases[phase - 1], model.memory) if phase else None
            model = enter(job.phases[phase], model.w, job.first_means, past)
        model, info, refused, sent, moved, back = guarded_round(
            job, engine, round, model, guard, checkpoints, begin, ledger
        )
        drawn.update(job.cohort(round))
        if back:
            since.rolled_back.append(back)
        else:
            since.add(info)
        since.refused.extend(refused)
        last = within == job.phases[phase].rounds - 1
        line = None
        if last or (round + 1) % job.evaluate_every == 0:
            judged = sorted(engine.evaluate(round, model.w, job.judged(round)), key=lambda j: j.client)
            line = metrics(job, round, judged, since, sent, len(job.parts) - len(drawn))
            if job.diagnostics is not None:
                line["diagnostics"] = job.diagnostics.summary(
                    job.phases[phase].method,
                    job.clock(round, job.local_steps - 1),
                    job.local_steps,
                    [j.seen for j in judged if j.seen],
                    moved,
                    [before["diagnostics"] for before in lines if before["phase"] == phase],
                )
            if since.rolled_back:
                line["rolled_back"] = since.rolled_back
            if ledger:
                line["privacy"] = ledger.told(round)
            line["seconds"] = round_to(spent + time.monotonic() - began)
            since = Since()
            lines = [*map(scores.short, lines), line]
        stop = should_stop() and round + 1 < job.rounds
        if checkpoints:
            if line:
                checkpoints.append(scores.keep(checkpoints.log.parent, line))
            every = job.checkpoint_every or job.evaluate_every
            due = (round + 1) % every == 0
            if stop or due or round + 1 == job.rounds:
                checkpoints.save(round + 1, model.w, model.memory, since, engine.save, guard.save(due), every)
        losses = info.get("loss", math.nan), info.get("loss_quantized", math.nan)
        watch(Progress(round + 1, job.rounds, *losses, line, refused, [back["note"]] if back else []))
        if stop:
            raise Stopped(f"stopped after round {round + 1} of {job.rounds}")
    return Finished(model.w, lines)


@dataclass(frozen=True)
class Shared:
    """What the server has: its model, a number of rows, and its own memory."""

    w: Rows
    memory: ServerState

    def to(self, device: torch.device) -> Shared:
        return Shared(tuple(row.to(device) for row in self.w), tuple(t.to(device) for t in self.memory))


def enter(phase: Phase, w: Rows, first_means: Rows = (), before: tuple[Phase, ServerState] | None = None) -> Shared:
    """The server at the first round of a phase, with the model of the one before it. first_means: what means of
    networks begin with; they are the last of w's rows once there are any. before: the phase before, and what its server
    remembers: one that goes on keeps it."""
    count = len(first_means)
    means = w[len(w) - count :] if len(w) > count else first_means
    rows = (*phase.method.broadcast(w[0]), *(row.to(w[0].device) for row in means))
    memory = phase.server.start(rows[: models_of(phase.method, len(rows))])
    if before is not None and before[0].server == phase.server and len(before[1]) == len(memory):
        memory = before[1]
    return Shared(rows, memory)


Round = tuple[Shared, dict[str, float], list[str], int, Moved]  # as `one_round` returns it


def guarded_round(
    job: Job,
    engine: Engine,
    round: int,
    model: Shared,
    guard: Guard,
    checkpoints: Checkpoints | None,
    begin: Begin,
    ledger: Ledger | None = None,
) -> tuple[*Round, dict[str, Any] | None]:
    """A round and, where it shows that w is ruined and someone may have done it, how far w and the clients' states went
    back: to a checkpoint, at last to where the run began. Rounds are counted on: a run ends, whatever is sent to it."""
    try:
        done = one_round(job, engine, round, model, guard, ledger)
        why = guard.exploded(done[1])
    except AllRefused as e:
        if not guard.outdated and not guard.suspects():
            raise
        done = model, {}, e.refused, 0, ([], vector(model.w), vector(model.w))
        why = None if guard.outdated else f"no client's round counts ({e.refused[0]})"
    suspects = guard.suspects() if why else []
    if not suspects:
        return *done, None
    returned, layout = guard.known.returned, Layout.of(job.module)
    every = job.checkpoint_every or job.evaluate_every  # not those of a stop: a run that is resumed goes the same way
    before = round if returned is None else min(returned, round)  # one made just now holds the ruined w
    saved = checkpoints.load(layout, before, every) if checkpoints else None
    if checkpoints:
        checkpoints.forget(saved.rounds if saved else 0)
    good: Saved | Begin = saved or begin
    engine.load(good.states)
    phase, _ = job.locate(round)
    then = job.locate(good.rounds - 1)[0] if good.rounds else None
    if then == phase:
        back_to = Shared(good.w, good.memory).to(model.w[0].device)
    else:  # of another phase, or none: the server begins this one again
        past = (job.phases[then], good.memory) if then is not None else None
        back_to = enter(job.phases[phase], good.w, job.first_means, past).to(model.w[0].device)
    guard.known.returned = good.rounds
    until = guard.send_to_rest(suspects)
    where = f"as after round {good.rounds}" if good.rounds else "as at the start"
    note = f"{why}: w and the clients' states are {where} again; {job.list_names(suspects)} moved farthest and "
    note += f"sit out until round {until + 1}"
    back = {"round": round + 1, "to": good.rounds, "suspects": suspects, "until": until, "note": note}
    return back_to, done[1], done[2], done[3], ([], vector(back_to.w), vector(back_to.w)), back


def bound_of(job: Job) -> float:
    """No bound where noise is to hide a client: who is refused would depend on the others' data."""
    return 0.0 if any(map(private_part, job.phases)) else job.upload_bound


def one_round(
    job: Job, engine: Engine, round: int, model: Shared, guard: Guard | None = None, ledger: Ledger | None = None
) -> Round:
    """(new model, means of what clients told, who was refused and why, bytes a client sent, with diagnostics how far
    uploads moved).

    Uploads are added in client order as they come, so that no engine needs room for all of them."""
    phase = job.phases[job.locate(round)[0]]
    models = models_of(phase.method, len(model.w))
    kept, others = model.w[:models], model.w[models:]
    sent = (*phase.server.send(kept, model.memory), *others)
    start = vector(sent)
    guard = guard or Guard(bound_of(job), len(job.parts), 1)
    cover = private_part(phase)
    if ledger:
        ledger.afford(round)
    guard.begin(round, job.locate(round)[0], start)
    done: list[Trained] = []
    moved: list[tuple[float, float]] = []  # share and |upload - w|^2
    size, so_far, beside = 0, None, None
    apart = bool(job.first_means)  # means of networks: a client sends its own network's rows
    for d in map(guard.screen, engine.train(round, sent, guard.present(job.cohort(round)))):
        done.append(replace(d, upload=None))
        if d.upload is None:
            continue
        size = max(size, 4 * own_numbers(d.upload, apart) if d.wire is None else d.wire)
        share = job.share(d.client) if d.share is None else d.share
        if job.diagnostics is not None:
            moved.append((share, job.diagnostics.apart(vector(d.upload.rows), start)))
        upload = cover.bounded(d.upload, sent) if cover else d.upload
        share = 1.0 if cover and d.client >= 0 else share  # but for a sum of several, nobody counts for more
        so_far = phase.server.add(so_far, upload.part(slice(models)), share)
        beside = add(beside, upload.part(slice(models, None)), share) if others else None
    refused = [f"{job.name(d.client)}: {d.fault}" for d in done if d.fault]
    hint = "try a smaller eta1 (or eta2 for the centers), a smaller lambda, or clip the center gradient"
    if refused and job.on_bad_upload == "stop":
        raise Failed(f"{refused[0]}. {hint}")
    if cover and (so_far or not done):  # before anyone sees anything of the sum; of nobody asked there is noise, too
        came = [d.client for d in done if not d.fault and d.client >= 0]
        rng = ledger.pay(round, cover, came, (so_far, beside)) if ledger else noise_of(job, round)
        so_far, beside = cover.cover(so_far, sent[:models], rng), cover.cover(beside, others, rng)
    new = model
    if so_far is not None:
        rows, memory = phase.server.finish(kept, so_far, model.memory)
        new = Shared((*rows, *(beside.mean(others) if beside else ())), memory)
    fault = guard.too_far(vector(new.w), job.name)
    if refused and len(refused) == len(done):
        raise AllRefused(f"{refused[0]}. {hint}", refused)
    if fault:  # the clients' own states are as good as the old w
        refused.append(f"the new w of round {round + 1}, the old one stays: {fault}")
        new = model
    return new, means(d.info for d in done if not d.fault), refused, size, (moved, start, vector(new.w))


def own_numbers(upload: Upload, apart: bool) -> int:
    """How many numbers a client sends. apart: rows without a share are not its own, and do not travel."""
    own = upload.shares.tolist() if apart and upload.shares is not None else [1.0] * len(upload.rows)
    return sum(len(row) for row, share in zip(upload.rows, own, strict=True) if share)


def means(told: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every number that clients told; a client over machines may keep its own to itself."""
    values: dict[str, list[float]] = {}
    for info in told:
        for name, number in info.items():
            if not math.isnan(number):
                values.setdefault(name, []).append(number)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def metrics(job: Job, round: int, judged: Sequence[Judged], since: Since, sent: int, never: int) -> dict[str, Any]:
    """One line of metrics.jsonl. Accuracies are fractions; without class labels the mean test loss stands for them.
    never: how many clients have taken part in no round so far."""
    phase, _ = job.locate(round)
    line: dict[str, Any] = {
        "round": round + 1,
        "phase": phase,
        "method": methods.name_of(job.phases[phase].method),
        "quantizer": quantizer_of(job.phases[phase].method),
        "step": (round + 1) * job.local_steps,
        "epoch": (round + 1) * job.local_steps / job.steps_per_epoch,
        **{f"train_{name}": sum(v) / len(v) for name, v in since.told.items()},
        "bits": mean_told([j.bits for j in judged]),
        "model_bytes": mean_told([j.bytes for j in judged]),
        "upload_bytes": sent,
        "dead_centers": sum(j.dead or 0 for j in judged),
        "refused": list(since.refused),
    }
    if never:
        line["never_took_part"] = never
    more = list(dict.fromkeys(metric for j in judged for metric in j.test.more))  # a vector's entries one by one
    for name in ("test", "validation", "float_test"):
        told = [getattr(j, name) for j in judged if getattr(j, name).count]
        if told:
            line[name] = scores.mean([value(s, job.judge_by) for s in told], unknown=bool(job.judge_by))
            line[f"{name}_loss"] = scores.mean([s.loss for s in told])
            for metric in more:
                line[f"{name}_{metric}"] = scores.mean([s.more.get(metric, math.nan) for s in told], unknown=True)
    if weights := [j.weights for j in judged if j.weights]:
        line["weights"] = weights
    line["clients"] = {
        "test": [value(j.test, job.judge_by) if j.test.count else None for j in judged],
        "bits": [j.bits for j in judged],
        "bytes": [j.bytes for j in judged],
    }
    if len(judged) < len(job.parts):  # some were not there to be judged
        line["clients"]["number"] = [j.client for j in judged]
    if job.metrics or job.judge_by:
        line["clients"] |= {"count": [j.test.count for j in judged]}
        line["clients"] |= {metric: [known(j.test.more.get(metric)) for j in judged] for metric in more}
        line["clients"]["test"] = [known(v) for v in line["clients"]["test"]]
        line["over_clients"] = scores.over_clients(line["clients"], kinds(job, judged, more))
    return line


def kinds(job: Job, judged: Sequence[Judged], more: Sequence[str]) -> dict[str, Kind]:
    """How to read the clients' scores, and every other metric; the entries of a vector as the metric they are of."""
    labelled = any(j.test.accuracy is not None for j in judged)
    main = job.judge_by or ("accuracy" if labelled else "loss")
    all_known = {"accuracy": ACCURACY, "loss": LOSS} | {n: kind_of(n, metric) for n, metric in job.metrics.items()}
    of = {name: max((n for n in job.metrics if f"{name}.".startswith(f"{n}.")), key=len) for name in more}
    entries = {name: replace(all_known[of[name]], name=name, vector=of[name]) for name in more if of[name] != name}
    return {"test": all_known[main]} | {name: entries.get(name) or all_known[name] for name in more}


def known(number: float | None) -> float | None:
    """JSON has a word for what is not known, none for NaN."""
    return None if number is None or math.isnan(number) else number


def mean_told(values: Sequence[float | None]) -> float:
    """The mean over those that tell, NaN if nobody does."""
    told = [v for v in values if v is not None]
    return float(np.mean(told)) if told else math.nan


def round_to(seconds: float) -> float:
    return float(f"{seconds:.3f}")
