"""A client of the federation: its own data, its own bits, its own state; it answers the server's questions.

hello     who it is: number, training samples, shape of an input, classes
train     tau steps from the server's w; the upload, or why there is none
evaluate  how its deployed model scores on its own test data
export    write its packed model on its own disk; size and test accuracy
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from qupel.config import Config, DataConfig, MethodConfig, ModelConfig, SplitConfig, explain
from qupel.data.batches import generator
from qupel.data.partition import Part
from qupel.deploy.budget import parse_size
from qupel.deploy.file import save
from qupel.engine.rounds import value
from qupel.engine.shard import Shard
from qupel.errors import UserError
from qupel.evaluate import Score
from qupel.experiment import Cell, build_job, describe, load_data, split_data
from qupel.flower.frames import Header
from qupel.flower.generations import Asked, Generations
from qupel.flower.ledger import Ledger
from qupel.flower.task import PROTOCOL, ClientConfig, Task
from qupel.flower.wire import encode, noise_deviation, privatize

MODEL = "model.safetensors"  # in the folder of the job


class Client:
    """Data and the newest job stay in memory between questions."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.data = load_data(config.data.name, config.data.folder, config.data.limit)
        self.job: ClientJob | None = None

    def answer(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        """The answer to one question; a mistake that somebody can mend is an answer, too."""
        try:
            kind = header.get("kind")
            if kind == "ping":
                return {}, b""
            if header.get("protocol") != PROTOCOL:
                raise UserError(f"the server speaks protocol {header.get('protocol')}, this client {PROTOCOL}")
            if kind == "hello":
                return self._hello(int(header["seed"])), b""
            job = self._job(header["task"])
            w = torch.frombuffer(bytearray(body), dtype=torch.float32) if body else torch.empty(0)  # (d,)
            if w.shape != job.shard.initial.shape:
                here = f"{job.task.model} has {len(job.shard.initial)}"
                raise UserError(f"the server's model has {len(w)} parameters, {here}")
            if kind == "train":
                return job.train(Asked.of(int(header["attempt"]), int(header["round"]), body), w)
            if kind == "evaluate":
                return job.evaluate(int(header["round"]), w), b""
            if kind == "export":
                return job.export(int(header["round"]), w), b""
            raise UserError(f"unknown question {kind!r}")
        except (UserError, OSError) as e:
            return {"client": self.config.client, "error": f"{e}"}, b""
        except (KeyError, TypeError, ValueError) as e:
            return {"client": self.config.client, "error": f"not a question this client understands: {e!r}"}, b""

    def _hello(self, seed: int) -> Header:
        parts = split_data(merged(self.config, None), self.data, seed)
        samples = len(parts[own_number(self.config, parts)].train_rows)
        shape = list(self.data.train.inputs.shape[1:])
        return {"client": self.config.client, "samples": samples, "shape": shape, "classes": self.data.classes}

    def _job(self, described: Any) -> ClientJob:
        try:
            task = Task.model_validate_json(json.dumps(described))
        except ValidationError as e:
            raise UserError(f"the server's task: {explain(e)}") from None
        if self.job is None or self.job.task != task:
            self.job = ClientJob(self.config, task)
        return self.job


class ClientJob:
    """One job at this client: a shard of one client, and its generations on disk."""

    def __init__(self, own: ClientConfig, task: Task) -> None:
        self.own, self.task, self.client = own, task, own.client
        if self.client >= task.clients:
            raise UserError(f"client {self.client} in a job for {task.clients} clients, numbered from 0")
        self.config = merged(own, task)
        self.cell = Cell(task.label, task.seed)
        job = build_job(self.config, self.cell)
        here = (tuple(job.data.train.inputs.shape[1:]), job.data.classes)
        if here != (task.shape, task.classes):
            raise UserError(f"{job.data.name} has (inputs, classes) {here}; the job is for {task.shape, task.classes}")
        mine = own_number(own, job.parts)
        # Of the clients only this one is looked at: the others are on other machines.
        parts, plans = [job.parts[mine]] * task.clients, [job.plans[mine]] * task.clients
        self.job = replace(job, parts=parts, plans=plans, epoch_steps=task.epoch_steps)
        self.shard = Shard(self.job, [self.client])
        self.folder = own.state / task.job
        self.generations = Generations(self.folder, self.shard)
        self.ledger = Ledger(own.state, own.privacy) if own.privacy else None

    def train(self, asked: Asked, w: Tensor) -> tuple[Header, bytes]:
        """One round. Asked for again, it is answered again and not trained again. A private client pays for it when its
        answer is on disk and before it leaves: killed in between, it neither loses the round nor gives it twice."""
        if self.ledger is None:
            return self.generations.answered(asked) or self._trained(asked, w)
        answer = self.generations.kept(asked)
        if answer is None:
            self.ledger.check(self.task.job, asked.round)
            answer = self._trained(asked, w)
        self.ledger.pay(self.task.job, asked.round)
        return answer

    def _trained(self, asked: Asked, w: Tensor) -> tuple[Header, bytes]:
        residual = self.generations.before(asked.round)
        (done,) = self.shard.train(asked.round, w, [self.client])
        reply = {
            "client": self.client,
            "job": self.task.job,
            "round": asked.round,
            "samples": len(self.job.parts[self.client].train_rows),
            "loss": None if self.own.privacy else done.loss,
            "fault": done.fault,
        }
        if done.fault is not None:
            if self.ledger:  # whether it fails depends on the data: that is told once, too
                self.ledger.pay(self.task.job, asked.round)
            return reply, b""
        payload = b""
        if done.upload is not None:
            rng = generator(self.task.seed, "upload", self.client, asked.round)
            payload, residual = encode(self.task.upload, self._private(done.upload, w), w, residual, rng)
        self.generations.keep(asked, reply, payload, residual)
        return reply, payload

    def _private(self, upload: Tensor, w: Tensor) -> Tensor:
        """Noise from the machine's own entropy: from the job's seed, the server could draw it again."""
        private = self.own.privacy
        if private is None:
            return upload
        deviation = noise_deviation(private.epsilon, private.delta, private.sensitivity or 2 * private.clip)
        return privatize(upload, w, private.clip, deviation, np.random.default_rng())

    def evaluate(self, round: int, w: Tensor) -> Header:
        """How the deployed model scores; a private client tells no scores, they depend on its data."""
        self.generations.upto(round)
        (judged,) = self.shard.evaluate(round, w, [self.client])
        if self.own.privacy:
            unsaid = Score(math.nan, None, 0)
            judged = replace(judged, test=unsaid, validation=unsaid, float_test=unsaid)
        return {"round": round, **asdict(judged)}

    def export(self, round: int, w: Tensor) -> Header:
        """Write what this client ships after `round` to its own disk."""
        self.generations.upto(round)
        (judged,) = self.shard.evaluate(round, w, [self.client])
        model = self.shard.deployed(self.client, round, w)
        module = self.shard.judge.load(model.x, self.job.calibration(self.client))
        allowed = parse_size(self.own.budget) if self.own.budget and model.codebook else None
        name, test = self.job.name(self.client), value(judged.test)
        about = describe(self.config, self.cell, self.job.data, name, test, allowed)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = save(self.folder / MODEL, module, model.codebook, about=about)
        if allowed is not None and written > allowed:
            raise UserError(f"its file has {written} bytes, over its budget of {allowed}")
        told = None if self.own.privacy or not judged.test.count else test
        return {"client": self.client, "round": round, "bytes": written, "test": told}


def merged(own: ClientConfig, task: Task | None) -> Config:
    """The server's settings with the client's own data and bits, as one experiment; without a task, of the data."""
    data = DataConfig(name=own.data.name, folder=own.data.folder, limit=own.data.limit)
    split = own.split or SplitConfig(kind="one")
    if task is None:
        return Config(data=data, split=split, methods={"none": MethodConfig(recipe="fedavg")})
    return Config(
        data=data.model_copy(update={"augment": task.augment}),
        split=split,
        model=ModelConfig(name=task.model, layers=own.layers),
        bits=own.bits or "auto",
        budget=own.budget,
        local_steps=task.local_steps,
        batch=task.batch,
        methods={task.label: MethodConfig(phases=task.phases)},
    )


def own_number(own: ClientConfig, parts: Sequence[Part]) -> int:
    """Which part of the data is this client's: all of it, or in a try-out its share of a set that all clients have."""
    if own.split is not None and own.client >= len(parts):
        raise UserError(f"split: client {own.client}, but there are {len(parts)} parts, numbered from 0")
    return own.client if own.split is not None else 0
