"""The clients of one process: their states, their local steps, their evaluation. Engines only say when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.algorithms.base import Deployed, State, keeps_state
from qupel.codebook import Plan, mean_bits, model_bytes
from qupel.data.batches import batch, chunks, generator, rows_of_steps
from qupel.data.sources import Arrays
from qupel.diagnostics import ClientLoss, Probe, Seen
from qupel.engine.job import Job
from qupel.engine.store import DiskStore, MemoryStore, Store, restore, snapshot
from qupel.engine.weights import shown_clients, told
from qupel.evaluate import EVALUATION_BATCH, Judge, Score
from qupel.oracle import Diverged, Oracle
from qupel.quantize import dead_centers


@dataclass(frozen=True)
class Trained:
    """A client's round: what it sends (None: nothing), its mean loss, or why its round does not count."""

    client: int
    upload: Tensor | None
    loss: float
    fault: str | None = None
    wire: int | None = None  # bytes of the upload where it was encoded; None: 4 a number


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
    seen: Seen | None = None  # with diagnostics


class Shard:
    """Clients `mine` of a job. State stays here; only w comes in and uploads go out."""

    def __init__(self, job: Job, mine: Sequence[int], store: str = "memory", scratch: Path | None = None) -> None:
        self.job = job
        self.mine = tuple(mine)
        self.shown = shown_clients(job.plans)
        self.oracle = Oracle(job.module, job.loss)
        self.layout = self.oracle.layout
        self.judge = Judge(job.module, job.loss)
        self.initial = self.layout.flatten(job.module)
        self.starts: dict[Any, tuple[Tensor, State]] = {}  # phase and plan -> a model, what `_start` made of it
        self.store: Store = DiskStore(self.layout, scratch) if store == "disk" else MemoryStore(self.layout)

    def state(self, client: int, phase: int, w: Tensor) -> State:
        """A client's state in a phase, having received w; converted from the phase it last took part in."""
        job = self.job
        found = self.store.get(client, w)
        at, state = found if found else (-1, State(self.initial, self.initial))
        if at >= 0:
            state = job.phases[at].method.receive(state, w)
        for k in range(at + 1, phase + 1):
            method = job.phases[k].method
            # A state that comes from no phase starts from the initial model, as every client does.
            state = method.receive(self._start(k, state, job.plans[client]), w)
        return state

    def _start(self, phase: int, before: State, plan: Plan) -> State:
        """The method's `start`. Many clients come with one and the same model, from FedAvg or from nowhere: what it
        becomes (k-means takes longer than many steps) is made once a plan."""
        method = self.job.phases[phase].method
        if before.x is not before.w or before.codebook:
            return method.start(before, plan, self.layout)
        key = (phase, *plan.items())
        source, _ = self.starts.get(key, (None, None))
        if source is not before.x:
            self.starts[key] = before.x, method.start(before, plan, self.layout)
        return self.starts[key][1]

    def train(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Trained]:
        """tau local steps at each of these clients. A client that fails keeps the state it had before the round."""
        job = self.job
        phase, _ = job.locate(round)
        method = job.phases[phase].method
        for client in clients:
            state, losses = self.state(client, phase, w), []
            picked = self._rows(client, round)  # (tau, b)
            try:
                for local in range(job.local_steps):
                    batch = self._batch(client, round * job.local_steps + local, picked[local])
                    state = method.step(state, self.oracle, batch, job.clock(round, local))
                    losses.append(self.oracle.loss_value)
                upload = method.upload(state)
                fault = screen(upload, len(w)) or sound(state)
                fault = f"round {round + 1}: {fault}" if fault else None
            except Diverged as e:
                upload, fault = None, f"round {round + 1}, step {len(losses) + 1}: {e.where}"
            if fault is None and keeps_state(method):
                self.store.put(client, phase, state)
            yield Trained(client, upload if fault is None else None, mean_or_nan(losses), fault)

    def _rows(self, client: int, round: int) -> np.ndarray:
        """Rows of the data set that a client sees in a round, a batch each step (tau, b)."""
        job, owned = self.job, self.job.parts[client].train_rows
        return owned[rows_of_steps(job.seed, client, round * job.local_steps, job.local_steps, len(owned), job.batch)]

    def _batch(self, client: int, step: int, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        job = self.job
        # dropout draws from torch's generator: address it, too
        seed = int(generator(job.seed, "dropout", client, step).integers(2**62))
        torch.default_generator.manual_seed(seed)
        if self.initial.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        return self._augmented(client, step, rows)

    def _augmented(self, client: int, step: int, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        job = self.job
        rng = generator(job.seed, "augment", client, step) if job.transform.augment else None
        return batch(job.data.train, rows, job.transform, rng)

    def deployed(self, client: int, round: int, w: Tensor) -> Deployed:
        """The model the client would ship after `round`, w being the server's newest model."""
        phase, _ = self.job.locate(round)
        return self.job.phases[phase].method.deployed(self.state(client, phase, w))

    def evaluate(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Judged]:
        """Judge deployed(state) of each client after `round`, w being the server's newest model."""
        phase, within = self.job.locate(round)
        method = self.job.phases[phase].method
        ends = within == self.job.phases[phase].rounds - 1
        clock = self.job.clock(round, self.job.local_steps - 1)
        probe = None if self.job.diagnostics == "off" else Probe(method, w, clock)
        for client in clients:
            state = self.state(client, phase, w)
            model = method.deployed(state)
            part, data = self.job.parts[client], self.job.data
            test = self._score(client, model.x, part.test(data))
            validation = self._score(client, model.x, part.validation(data))
            float_test = self._score(client, state.x, part.test(data)) if model.codebook else test
            codes = model.codebook.assign(model.x)
            dead = sum(len(dead_centers(k, len(c))) for (_, c), k in zip(model.codebook, codes, strict=True))
            size = model_bytes(len(model.x), model.codebook)
            weights = told(client, state.x, model, with_weights=ends) if client in self.shown else None
            seen = probe.look(state, self._probed(client, round)) if probe else None
            yield Judged(client, test, validation, float_test, size, mean_bits(model.codebook), dead, weights, seen)

    def _probed(self, client: int, round: int) -> ClientLoss:
        """The client's loss for diagnostics: on all of its training data, or on the batch of its next step."""
        if self.job.diagnostics == "full":
            batches = list(self.job.calibration(client, None))
        else:
            rows = self._rows(client, round + 1)[0]  # (b,)
            batches = [self._batch(client, (round + 1) * self.job.local_steps, rows)]
        return ClientLoss(self.oracle, batches, seed=0)

    def _score(self, client: int, x: Tensor, arrays: Arrays) -> Score:
        return self.judge.score(x, self.job.calibration(client), chunks(arrays, EVALUATION_BATCH, self.job.transform))

    def save(self, folder: Path, name: str) -> None:
        snapshot(self.store, folder, name)

    def load(self, folder: Path) -> None:
        restore(folder, self.mine, self.store, self.layout)


def screen(upload: Tensor | None, size: int) -> str | None:
    """Why an upload is refused, None if it is sound."""
    if upload is None:
        return None
    if upload.shape != (size,):
        return f"upload has shape {tuple(upload.shape)}, expected ({size},)"
    if not all_finite(upload):
        return "upload holds values that are not finite"
    return None


def sound(state: State) -> str | None:
    """Why a client's new state is refused, None if it is sound: a method that sends nothing is screened, too."""
    for tensor in (state.x, *state.codebook.centers):
        if not all_finite(tensor):
            return "its model holds values that are not finite"
    return None


def all_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and takes a fortieth of the time of looking at each; any other may be theirs."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def mean_or_nan(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
