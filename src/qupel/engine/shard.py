"""The clients of one process: their states, their local steps, their evaluation. Engines only say when."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.codebook import mean_bits, model_bytes
from qupel.core.layout import Layout, Slot
from qupel.core.quantize import dead_centers
from qupel.data.batches import batch, chunks
from qupel.data.samples import Samples
from qupel.engine.door import refuse_tokens
from qupel.engine.job import Job
from qupel.engine.ledger import noise_at, private_part
from qupel.engine.rows import Forms
from qupel.engine.sound import screen, sound
from qupel.engine.steps import Steps
from qupel.engine.store import DiskStore, MemoryStore, Store
from qupel.engine.weights import shown_clients
from qupel.engine.weights import told as told_weights
from qupel.parts.base import Deployed, Info, Rows, State, Upload, as_rows
from qupel.parts.methods.base import (
    Method,
    adapted,
    again,
    chosen,
    keeps_state,
    models_of,
    row_per_network,
    state_of,
    w_is_mean,
)
from qupel.parts.prior import NO_PRIOR, Prior, output_bias, shift
from qupel.tasks.judge import EVALUATION_BATCH, Judge, Score
from qupel.tasks.task import Batch, Diverged, ModuleTask, Problem, Task, Value

SUM = -1  # in place of a client's number: of what is known of all together only


@dataclass(frozen=True)
class Trained:
    """A client's round: what it sends (None: nothing), the mean of what its steps told, or why it does not count."""

    client: int
    upload: Upload | None
    info: Mapping[str, float] = field(default_factory=dict)  # `Info` by name: "loss", "loss_quantized", ...
    fault: str | None = None
    wire: int | None = None  # bytes of the upload where it was encoded; None: 4 a number
    share: float | None = None  # what it counts for in the server's mean; None: what the job says


@dataclass(frozen=True)
class Judged:
    """A client's deployed model on its test and validation data; `float_test`: its model before quantization.
    None: a client on another machine keeps that to itself."""

    client: int
    test: Score
    validation: Score
    float_test: Score
    bytes: int | None
    bits: float | None
    dead: int | None  # centers without a weight
    weights: dict[str, Any] | None = None  # its centers, at a few clients only (`weights.told`)
    seen: dict[str, Any] | None = None  # with diagnostics


class Shard:
    """Clients `mine` of a job. State stays here; only w comes in and uploads go out."""

    def __init__(self, job: Job, mine: Sequence[int], store: str = "memory", scratch: Path | None = None) -> None:
        self.job = job
        self.steps = Steps(job)
        self.mine = tuple(mine)
        self.noise: np.random.Generator | None = None  # of a client on a machine of its own, which tells no seed of it
        self.shown = shown_clients(job.plans)
        self.tasks: dict[tuple[str, str], Task] = {}  # by role and network, made when a client needs it
        self.judges: dict[str, Judge] = {}
        self.initials: dict[str, Tensor] = {}
        self.initial = self.start_of("")
        self.layout = Layout.of(job.module)
        self.starts: dict[Any, tuple[Tensor, State]] = {}  # phase and plan -> a model, what `_start` made of it
        self.priors: dict[tuple[int, float], Prior] = {}
        self.biases: dict[str, Slot | None] = {}
        layouts = {name: Layout.of(module) for name, module in job.modules.items()}
        self.forms = Forms(
            layout=lambda client: layouts[job.network_of(client)],
            state=lambda phase: state_of(job.phases[phase].method),
        )
        self.store: Store = DiskStore(self.forms, scratch) if store == "disk" else MemoryStore(self.forms)

    def _network(self, name: str) -> nn.Module:
        return self.job.modules[name]

    def task(self, role: str, name: str) -> Task:
        if (role, name) not in self.tasks:
            self.tasks[role, name] = ModuleTask(self._network(name), self.job.loss)
        return self.tasks[role, name]

    def start_of(self, name: str) -> Tensor:
        if name not in self.initials:
            module = self._network(name)
            self.initials[name] = Layout.of(module).flatten(module)
        return self.initials[name]

    def problem(self, client: int) -> Problem:
        """What a client optimizes: its own network and the shared one."""
        return Problem(self.task("own", self.job.network_of(client)), self.task("shared", ""))

    def judge_of(self, client: int) -> Judge:
        name = self.job.network_of(client)
        if name not in self.judges:
            self.judges[name] = Judge(self._network(name), self.job.loss, self.job.metrics)
        return self.judges[name]

    def state(self, client: int, phase: int, w: Rows) -> State:
        """A client's state in a phase, having received w; converted from the phase it last took part in."""
        job = self.job
        found = self.store.get(client, w[0])
        name = job.network_of(client)
        newcomer = State(self.start_of(name) if name else w[0], w[0])  # the server's newest model is where it starts
        at, state = found if found else (-1, newcomer)
        shared = len(job.phases[phase].method.broadcast(w[0]))
        for k in range(max(at, 0), phase + 1):
            method, prior = job.phases[k].method, self.prior(client, k)
            if k != at:
                before = self.prior(client, k - 1) if k else NO_PRIOR
                state = self._chosen(k - 1, state, client) if k else state
                with own_randomness(), suppress(Diverged):  # who diverges goes on as it is, and is refused in its round
                    x, past = self.start_of(name), self.steps.past(client, k)
                    state = again(method, state, x, past, job.plans[client], self.problem(client))
                state = self._start(k, prior.entered(before, state), client)
            rows = w[:shared] if k == phase else method.broadcast(w[0])
            models, apart = models_of(method, len(rows)), row_per_network(method)
            rows = (*rows, *self._mean(client, method, w[0], w[shared:])) if apart else rows
            state = method.receive(state, prior.seen(rows, models, apart))
        return state

    def _mean(self, client: int, method: Method, w: Tensor, means: Rows) -> Rows:
        """The mean of a client's network (d_i,): w, of the shared one's, if it is one; none, where there is none."""
        name = self.job.network_of(client)
        if not name:
            return (w,) if w_is_mean(method) else ()
        return (torch.cat(means[self.job.places[name]])[: self.forms.layout(client).size],) if means else ()

    def sent(self, client: int, phase: int, upload: Upload | None, w: Rows) -> Upload | None:
        """What leaves a client, as rows of the server's: without what its prior added, and with x, where it goes with
        its network's mean, in the place of that. Rows that are not its own have a share of 0."""
        method, name = self.job.phases[phase].method, self.job.network_of(client)
        apart = row_per_network(method)
        upload = self.prior(client, phase).sent(upload, models_of(method, len(w)), apart)
        if upload is None:
            return None
        count = len(upload.rows) - apart
        rows, shares, means = upload.rows[:count], upload.shares, list(w[count:])
        if not means:
            return Upload(rows, shares)
        counts = torch.cat(
            (rows[0].new_ones(count) if shares is None else shares[:count], rows[0].new_zeros(len(means)))
        )
        if apart and name:
            place = self.job.places[name]
            means[place] = as_rows(upload.rows[-1], len(w[0]))
            counts[count + place.start : count + place.stop] = 1
        return Upload((*rows, *means), counts)

    def prior(self, client: int, phase: int) -> Prior:
        """How a client sees shared models in a phase."""
        job, pseudo = self.job, self.job.phases[phase].prior
        if not pseudo or job.data.classes is None:
            return NO_PRIOR
        if (client, pseudo) not in self.priors:
            x, w = (self._output_bias(name, client) for name in (job.network_of(client), ""))
            labels = job.data.train.read(job.parts[client].train_rows).targets if x and w else None
            lowered = shift(labels, job.data.classes, pseudo) if isinstance(labels, Tensor) else None
            self.priors[client, pseudo] = NO_PRIOR if lowered is None else Prior(lowered, x, w)
        return self.priors[client, pseudo]

    def _output_bias(self, name: str, client: int) -> Slot | None:
        """The bias of a network's outputs, found with a look at two samples of a client."""
        if name not in self.biases:
            job, module = self.job, copy.deepcopy(self._network(name))
            some = batch(job.data.train, job.parts[client].train_rows[:2], job.transform_of(client))
            self.biases[name] = output_bias(module, Layout.of(module), some.inputs, job.data.classes or 0)
        return self.biases[name]

    def _start(self, phase: int, before: State, client: int) -> State:
        """The method's `start`. Many clients come with one and the same model, from FedAvg or from nowhere: what it
        becomes (k-means takes longer than many steps) is made once a plan."""
        method, plan, problem = self.job.phases[phase].method, self.job.plans[client], self.problem(client)
        name = self.job.network_of(client)
        fresh = before.x is before.w or before.x is self.initials.get(name)
        if type(before) is not State or not fresh or before.codebook:  # has something of its own
            return method.start(before, plan, problem)
        key = (phase, name, plan.key)
        source, _ = self.starts.get(key, (None, None))
        if source is not before.x:
            self.starts[key] = before.x, method.start(before, plan, problem)
        return self.starts[key][1]

    def _chosen(self, phase: int, state: State, client: int) -> State:
        """The state at the end of a phase, after the method's look at what it has held back; in the last phase that
        does, where several do."""
        job, unseen = self.job, self.steps.unseen(client, phase)
        following = next((p.held for p in job.phases[phase + 1 :] if p.rounds), 0.0)
        if unseen is None or following:
            return state
        end = sum(p.rounds for p in job.phases[: phase + 1])
        with own_randomness():
            clock, ahead = job.clock(end - 1, job.local_steps - 1), self.steps.ahead(client, end - 1, phase)
            w = self.prior(client, len(job.phases) - 1).seen((state.w,), 1)[0]  # as its last model will see w
            with suppress(Diverged):  # nothing is told of samples that no model can be tried with
                return chosen(job.phases[phase].method, replace(state, w=w), self.problem(client), ahead, unseen, clock)
        return state

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        """tau local steps at each of these clients. A client that fails keeps the state it had before the round."""
        job = self.job
        phase, _ = job.locate(round)
        method = job.phases[phase].method
        for client in clients:
            state, told, problem = self.state(client, phase, w), Told(), self.problem(client)
            picked = self.steps.rows(client, round)  # (tau, b)
            upload, fault, batch = None, None, None
            try:
                # a client that diverges is refused
                with own_randomness(), np.errstate(invalid="ignore", over="ignore"):
                    for local in range(job.local_steps):
                        batch = self.steps.batch(client, round * job.local_steps + local, picked[local])
                        state, info = method.step(state, problem, batch, job.clock(round, local))
                        told.add(info)
                    upload = self.sent(client, phase, method.upload(state), w)
                fault = screen(upload, w) or sound(state)
                fault = f"round {round + 1}: {fault}" if fault else None
            except Exception as e:
                where = e.where if isinstance(e, Diverged) else sound(state)
                if isinstance(e, IndexError) and batch is not None:
                    refuse_tokens(job, client, self._network(job.network_of(client)), batch.inputs)
                if where is None:
                    raise  # not for want of finite numbers
                fault = f"round {round + 1}, step {told.steps + 1}: {where}"
            if fault is None and keeps_state(method):
                self.store.put(client, phase, state)
            yield Trained(
                client, self.leaving(client, round, upload, w) if fault is None else None, told.means(), fault
            )

    def leaving(self, client: int, round: int, upload: Upload | None, w: Rows) -> Upload | None:
        """An upload as it leaves the client: clipped, maybe with noise, where the server is a private one."""
        cover = private_part(self.job.phases[self.job.locate(round)[0]])
        if cover is None or upload is None:
            return upload
        return cover.leave(upload, w, self.noise or noise_at(self.job, client, round))

    def deployed(self, client: int, round: int, w: Rows) -> Deployed:
        """The model the client would ship after `round`, w being the server's newest model."""
        phase, _ = self.job.locate(round)
        return self.job.phases[phase].method.deployed(self.final(client, round, w))

    def final(self, client: int, round: int, w: Rows) -> State:
        """The state whose model would be shipped after `round`; a method that adapts it sees the batches to come."""
        phase, _ = self.job.locate(round)
        method, clock = self.job.phases[phase].method, self.job.clock(round, self.job.local_steps - 1)
        with own_randomness():
            return adapted(
                method,
                self.state(client, phase, w),
                self.problem(client),
                self.steps.ahead(client, round, phase),
                clock,
            )

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]:
        """Judge deployed(state) of each client after `round`, w being the server's newest model."""
        phase, within = self.job.locate(round)
        method = self.job.phases[phase].method
        ends = within == self.job.phases[phase].rounds - 1
        clock = self.job.clock(round, self.job.local_steps - 1)
        watch = self.job.diagnostics
        made = self.job.steps_made(round) if watch is not None else {}
        for client in clients:
            state = self.final(client, round, w)
            model = method.deployed(state)
            part, data = self.job.parts[client], self.job.data
            test = self._score(client, model.x, part.test(data))
            validation = self._score(client, model.x, part.validation(data))
            float_test = self._score(client, state.x, part.test(data)) if model.codebook else test
            codes = model.codebook.assign(model.x)
            dead = sum(len(dead_centers(k, len(c))) for (_, c), k in zip(model.codebook, codes, strict=True))
            size = model_bytes(len(model.x) + self.forms.layout(client).frozen, model.codebook)
            weights = told_weights(client, state.x, model, with_weights=ends) if client in self.shown else None
            seen = None
            if watch is not None:
                with own_randomness():
                    batches = self._probed(client, round, watch.mode)
                    own = self.problem(client).own
                    seen = watch.look(method, state, w[0], clock, own, batches, made.get(client))
            yield Judged(client, test, validation, float_test, size, mean_bits(model.codebook), dead, weights, seen)

    def _probed(self, client: int, round: int, mode: str) -> list[Batch]:
        """What diagnostics look at: all of the client's training data, or the batch of its next step."""
        if mode == "full":
            return list(self.job.calibration(client, None))
        return [next(self.steps.ahead(client, round, self.job.locate(round)[0]))]

    def _score(self, client: int, x: Tensor, samples: Samples) -> Score:
        test = partial(chunks, samples, EVALUATION_BATCH, self.job.transform_of(client))
        try:
            return self.judge_of(client).score(x, self.job.calibration(client), test(), self.job.name(client))
        except IndexError:
            for batch in test():
                refuse_tokens(self.job, client, self._network(self.job.network_of(client)), batch.inputs)
            raise

    def save(self, folder: Path, name: str, alone: bool = False) -> None:
        self.store.save(folder, name, alone)

    def load(self, folder: Path | None) -> None:
        """Take the states of a folder in place of those that are here; None: those of the start."""
        self.store.load(folder, self.mine)


class Told:
    """The mean over a client's steps of what they told."""

    def __init__(self) -> None:
        self.steps = 0
        self.values: dict[str, list[float]] = {}

    def add(self, info: Info) -> None:
        self.steps += 1
        for name, value in named(info):
            self.values.setdefault(name, []).append(float(value))

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.values.items()}


def named(info: Info) -> Iterator[tuple[str, Value]]:
    """What a step told, by name."""
    losses = (("loss", info.loss), ("loss_quantized", info.quantized_loss), *info.more.items())
    return ((name, value) for name, value in losses if value is not None)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Dropout draws from torch's one generator, which steps address anew; afterwards it is as the user had it."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
