"""A client of the federation: its own data, its own bits, its own state; it answers the server's questions.

hello     who it is: number, training samples, shape of an input, classes; the layout of the network it would train
train     tau steps from the server's w; the upload, or why there is none. Of a secure round: keys, and then
          share, mask, open (`masking`)
evaluate  how its deployed model scores on its own test data
export    write its packed model on its own disk; size and test accuracy
adapt     the same after the end, where it has not taken part: from w alone (`run.adapt`)

What of that leaves it, `boundary` says, and `audit` writes it down; all else that there is to say goes to its own log.
Jobs that its `policy` does not allow are refused.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from qupel.core.layout import Layout
from qupel.data.batches import generator
from qupel.data.partition import Part
from qupel.data.sources import Dataset
from qupel.deploy.budget import parse_size
from qupel.deploy.file import save
from qupel.engine.door import check_trainable
from qupel.engine.shard import Shard
from qupel.flower import audit, boundary
from qupel.flower.boundary import Answer
from qupel.flower.frames import Header
from qupel.flower.generations import Asked, Generations, Undone
from qupel.flower.ledger import Ledger
from qupel.flower.masking import Masking
from qupel.flower.policy import refuse
from qupel.flower.secure import codec_of, encoded
from qupel.flower.task import PROTOCOL, ClientConfig, Task, Wanted
from qupel.flower.wire import encode, noise_deviation, privatize, without_shares
from qupel.parts.base import Deployed, Rows, Upload, vector
from qupel.parts.methods.base import sends
from qupel.parts.servers import covering
from qupel.run.adapt import Origin, adapt_clients, layout_hash
from qupel.run.config import Config, DataConfig, MethodConfig, ModelConfig, SplitConfig, TaskConfig, explain
from qupel.run.jobs import Cell, assemble, build_model, build_plans, data_of, describe, split_clients
from qupel.run.networks import build_networks, network_of
from qupel.tasks import zoo
from qupel.tasks.judge import Judge, Score, value
from qupel.util.errors import UserError
from qupel.util.registry import NotAllowed, imports_limited_to

W = TypeVar("W", bound=Wanted)
MODEL = "model.safetensors"  # in the folder of the job


class Client:
    """Data and the newest job stay in memory between questions."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.data = data_of(merged(config, None))
        self.job: ClientJob | None = None

    def answer(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        """The answer to one question, whatever happens; what went wrong is told in a sentence of the list, or none."""
        kind, private = header.get("kind"), self.config.privacy is not None
        why = ""
        try:
            answer = boundary.told(kind, private, *self._answer(header, body))
        except UserError as e:
            log(f"{kind!r:.20}: {e}")
            why = getattr(e, "details", str(e))
            answer = boundary.refused(kind, private, str(e))
        except Exception as e:
            traceback.print_exc()
            text, why = (
                boundary.NO_QUESTION if type(e) in (KeyError, TypeError, ValueError) else boundary.FAILED,
                repr(e),
            )
            answer = boundary.refused(kind, private, text)
        if kind == "ping":
            return answer
        try:
            audit.answered(self.config.state, header, body, *answer, why)
        except (OSError, UserError) as e:
            log(f"{kind!r:.20}: {e}")
            return boundary.refused(kind, private, boundary.NO_LOG)
        return answer

    def _answer(self, header: Header, body: bytes) -> tuple[Answer, bytes]:
        kind, protocol = header.get("kind"), header.get("protocol")
        if kind == "ping":
            return boundary.Pong(), b""
        if protocol != PROTOCOL:
            raise UserError(f"the server speaks protocol {protocol}, this client {PROTOCOL}")
        if kind == "hello":
            return self._hello(header), b""
        if kind == "adapt":
            return LateJob(self.config, self._allowed(Task, header["task"])).adapt(int(header["round"]), body), b""
        job = self._job(header["task"])
        round, undone = int(header["round"]), [(int(first), int(last)) for first, last in header["undone"]]
        if kind in boundary.SECURE_STAGES:
            return job.stage(str(kind), round, str(header["session"]), body)
        w = job.rows(round, body)
        if kind == "train" and job.secure(round):
            return job.masked(Asked.of(int(header["attempt"]), round, body), w, undone, str(header["session"]))
        if kind == "train" and job.masking.path.exists() and job.task.secure is None:
            raise refuse("secure", "a round of a job that began with secure aggregation")
        if kind == "train":
            return job.train(Asked.of(int(header["attempt"]), round, body), w, undone)
        if kind == "evaluate":
            return job.evaluate(round, w, undone), b""
        if kind == "export":
            return job.export(round, w, undone), b""
        raise KeyError(kind)

    def _hello(self, header: Header) -> Answer:
        parts = all_parts(merged(self.config, None), self.data, int(header["seed"]))
        samples = len(parts[own_number(self.config, parts)].train_rows)
        if self.data.classes is None:
            raise UserError(boundary.NO_CLASSES)
        shape = self.data.shape
        layout = None
        if "wanted" in header:  # before any round: whether both sides have, and mean, the same
            wanted = self._allowed(Wanted, header["wanted"])
            with suppress(UserError):  # a network that does not fit these data has no layout, and the server sees why
                layout = layout_hash(zoo.build(wanted.model, shape, self.data.classes, 0, wanted.args))
            self.config.policy.check_network(wanted, layout)
        return boundary.Hello(self.config.client, samples, shape, self.data.classes, layout)

    def _allowed(self, kind: type[W], described: Any) -> W:
        """What a server describes, where all of its parts may be imported here."""
        try:
            with imports_limited_to(self.config.allow):  # a server says which parts, not which code is loaded
                found = kind.model_validate_json(json.dumps(described))
            if isinstance(found, Task):
                self.config.policy.check(found, self.config.privacy)
            return found
        except ValidationError as e:
            said = f"the server's task: {explain(e)}"
            if not any(isinstance(error.get("ctx", {}).get("error"), NotAllowed) for error in e.errors()):
                raise UserError(said) from None
            log(said)
            raise UserError(boundary.NOT_ALLOWED) from None

    def _job(self, described: Any) -> ClientJob:
        task = self._allowed(Task, described)
        if self.job is None or self.job.task != task:
            self.job = ClientJob(self.config, task)
        return self.job


class LateJob:
    """One job at this client: its settings, its data, its network."""

    def __init__(self, own: ClientConfig, task: Task) -> None:
        self.own, self.task, self.client = own, task, own.client
        self.config = merged(own, task)
        self.cell = Cell(task.label, task.seed)
        data = data_of(self.config)
        here = (data.shape, data.classes)
        if here != (task.shape, task.classes):
            raise UserError(f"{data.name} has (inputs, classes) {here}; the job is for {task.shape, task.classes}")
        module = build_model(self.config, data, self.cell)
        if (mine := layout_hash(module)) != (task.layout or mine):
            raise UserError(boundary.LAYOUT.replace("{hash}", "{}").format(task.layout, mine))
        parts = all_parts(self.config, data, task.seed)
        networks = build_networks(self.config, data, self.cell)  # w is the server's; what x is, is this client's affair
        plan = build_plans(self.config, self.cell, {"": module, **networks}, data, 1)[0]
        # Of the clients only this one is looked at: the others are on other machines.
        everyone = [parts[own_number(own, parts)]] * task.clients
        job = assemble(self.config, self.cell, module, data, everyone, [plan] * task.clients, networks)
        check_trainable(job)
        self.job = replace(job, epoch_steps=task.epoch_steps)
        self.size = Layout.of(module).size
        self.folder = own.state / task.job

    def rows(self, round: int, body: bytes) -> Rows:
        """What the server sent: the rows of this round's method."""
        if not 0 <= round < self.job.rounds:
            raise ValueError(f"round {round} of a job with {self.job.rounds}")
        numbers = torch.frombuffer(bytearray(body), dtype=torch.float32) if body else torch.empty(0)
        count = self.job.rows_of(self.job.locate(round)[0])
        if len(numbers) != count * self.size:
            raise UserError(f"the server's model has {len(numbers)} parameters, this client's {count * self.size}")
        return numbers.split(self.size)

    def adapt(self, round: int, body: bytes) -> Answer:
        """From the server's last w to a model of this client's own, on its own disk."""
        names: dict[str, Any] = {"layers": self.own.layers, "channels": self.own.levels == "channel"}
        names["standardize"] = self.config.data.standardize
        origin = Origin.of(self.job, self.rows(round, body), self.task.label, **names)
        name = f"client {self.client}"
        mine = (self.job.parts[:1], self.job.plans[:1], [name], self.job.network[:1])
        done = adapt_clients(origin, self.job.data, *mine)
        for fault in done.faults.values():
            log(f"{self.task.job}: {fault}")
            raise UserError(boundary.DIVERGED.format(round + 1))
        test = done.judged[0].test
        judge = Judge(self.job.modules[self.job.network_of(0)], self.job.loss)
        module = judge.load(done.models[0].x, done.job.calibration(0))
        written = self.write(module, done.models[0], name, test)
        if self.own.privacy:
            return boundary.PrivateExport(self.client, round)
        return boundary.Adapted(self.client, round, written, test.accuracy, done.plain[0].accuracy)

    def write(self, module: nn.Module, model: Deployed, name: str, test: Score) -> int:
        """This client's file; its bytes."""
        allowed = parse_size(self.own.budget) if self.own.budget and model.codebook else None
        score = value(test, self.job.judge_by) if test.count else None
        network = network_of(self.config, self.cell, 0)
        about = describe(self.config, self.cell, self.job.data_of(0), name, score, allowed, network)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = save(self.folder / MODEL, module, model.codebook, about=about)
        if allowed is not None and written > allowed:
            raise UserError(boundary.OVERSIZE.format(written, allowed))
        return written


class ClientJob(LateJob):
    """The same where this client takes part: a shard of one client, and its generations on disk."""

    def __init__(self, own: ClientConfig, task: Task) -> None:
        if own.client >= task.clients:
            raise UserError(f"client {own.client} in a job for {task.clients} clients, numbered from 0")
        super().__init__(own, task)
        self.shard = Shard(self.job, [self.client])
        self.shard.noise = np.random.default_rng()  # from the machine's entropy: the server knows the job's seed
        self.generations = Generations(self.folder, self.shard)
        self.ledger = Ledger(own.state, own.privacy) if own.privacy else None
        self.masking = Masking(own, task, self.folder)

    def secure(self, round: int) -> bool:
        """Whether the uploads of a round leave masked, for their sum."""
        return self.task.secure is not None and sends(self.job.phases[self.job.locate(round)[0]].method)

    def masked(self, asked: Asked, w: Rows, undone: Undone, session: str) -> tuple[Answer, bytes]:
        """One round whose upload stays here until `mask`; what leaves are keys for that."""
        self.masking.enter(asked.round)
        answer, payload = self.train(asked, w, undone)
        return answer, self.masking.begin(asked.round, session, payload, len(w))

    def stage(self, kind: str, round: int, session: str, body: bytes) -> tuple[Answer, bytes]:
        answer = self.masking.stage(kind, round, session, body)
        return boundary.Stage(self.client, self.task.job, round), answer

    def train(self, asked: Asked, w: Rows, undone: Undone) -> tuple[Answer, bytes]:
        """One round. Asked for again, it is answered again and not trained again. A private client pays for it when its
        answer is on disk and before it leaves: killed in between, it neither loses the round nor gives it twice."""
        known = self.generations.kept(asked) if self.ledger else self.generations.answered(asked)
        if known is None:
            if self.ledger:
                self.ledger.check(self.task.job, asked.round)
            answer = self._trained(asked, w, undone)
        else:
            answer = boundary.heard("train", known[0]), known[1]
        if self.ledger:
            self.ledger.pay(self.task.job, asked.round)
        return answer

    def _trained(self, asked: Asked, w: Rows, undone: Undone) -> tuple[Answer, bytes]:
        residual = self.generations.upto(asked.round - 1, undone)
        self.generations.loaded = None  # until this round is kept, what the shard holds is no generation
        (done,) = self.shard.train(asked.round, w, [self.client])
        if done.fault is not None:
            if self.ledger:  # whether it fails depends on the data: that is told once, too
                self.ledger.pay(self.task.job, asked.round)
            log(f"{self.task.job}: {done.fault}")
            raise UserError(boundary.DIVERGED.format(asked.round + 1))
        reply = self._update(asked.round, done.info)
        payload = b""
        if done.upload is not None:
            rng = generator(self.task.seed, "upload", self.client, asked.round)
            upload = self._private(done.upload, w)
            clipped = covering(self.job.phases[self.job.locate(asked.round)[0]].server) is not None
            before = None if clipped else residual  # what rounding left would lengthen a move that is clipped
            if self.task.secure:
                payload, residual = encoded(codec_of(self.task.secure), upload, w, before, rng)
            else:
                payload, residual = encode(self.task.upload, upload, w, before, rng)
            residual = None if clipped else residual
        kept, _ = boundary.told("train", self.own.privacy is not None, reply)
        self.generations.keep(asked, kept, payload, residual, undone)
        return reply, payload

    def _update(self, round: int, told: Mapping[str, float]) -> Answer:
        samples = len(self.job.parts[self.client].train_rows)
        if self.own.privacy:
            return boundary.PrivateUpdate(self.client, self.task.job, round, samples)
        losses = (sayable_loss(told[name]) if name in told else None for name in ("loss", "loss_quantized"))
        return boundary.Update(self.client, self.task.job, round, samples, *losses)

    def _private(self, upload: Upload, w: Rows) -> Upload:
        """Noise from the machine's own entropy: from the job's seed, the server could draw it again. All rows are
        clipped together; shares depend on the data and stay here."""
        private = self.own.privacy
        if private is None:
            return upload
        deviation = noise_deviation(private.epsilon, private.delta, private.sensitivity or 2 * private.clip)
        rows = vector(without_shares(upload, w))
        noised = privatize(rows, vector(w), private.clip, deviation, np.random.default_rng())
        return Upload(noised.split(len(w[0])))

    def evaluate(self, round: int, w: Rows, undone: Undone) -> Answer:
        """How the deployed model scores; a private client tells nothing of it, so it does not look."""
        if self.own.privacy:
            return boundary.PrivateScores(self.client, round)
        self.generations.upto(round, undone)
        (judged,) = self.shard.evaluate(round, w, [self.client])
        scores = (*sayable(judged.test), *sayable(judged.validation), *sayable(judged.float_test))
        size = (judged.bytes or 0, judged.bits or 0.0, judged.dead or 0, judged.test.count)
        more = (self._more(score) for score in (judged.test, judged.validation, judged.float_test))
        return boundary.Scores(self.client, round, *scores, *size, *more)

    def _more(self, score: Score) -> tuple[float | None, ...]:
        """The metrics that the job asks for."""
        told = (score.more.get(name) for name in self.task.metrics)
        return tuple(None if v is None or math.isnan(v) else sayable_loss(v) for v in told)

    def export(self, round: int, w: Rows, undone: Undone) -> Answer:
        """Write what this client ships after `round` to its own disk."""
        self.generations.upto(round, undone)
        (judged,) = self.shard.evaluate(round, w, [self.client])
        model = self.shard.deployed(self.client, round, w)
        module = self.shard.judge_of(self.client).load(model.x, self.job.calibration(self.client))
        written = self.write(module, model, self.job.name(self.client), judged.test)
        if self.own.privacy:
            return boundary.PrivateExport(self.client, round)
        return boundary.Export(self.client, round, written, judged.test.accuracy)


def sayable(score: Score) -> tuple[float | None, float | None]:
    """(accuracy, loss) as they are told: nothing where there is no data."""
    return (score.accuracy, sayable_loss(score.loss)) if score.count else (None, None)


def sayable_loss(loss: float) -> float:
    """One that is not finite is told as the largest that may be: not to tell it would look better than it is."""
    return max(-boundary.MOST_LOSS, loss) if loss < boundary.MOST_LOSS else boundary.MOST_LOSS


def log(text: str) -> None:
    """For this client's own eyes."""
    print(text, file=sys.stderr, flush=True)


def merged(own: ClientConfig, task: Task | None) -> Config:
    """The server's settings with the client's own data and bits, as one experiment; without a task, of the data."""
    data = DataConfig(**own.data.model_dump())
    split = own.split or SplitConfig(kind="one")
    if task is None:
        return Config(data=data, split=split, methods={"none": MethodConfig(recipe="fedavg")})
    return Config(
        data=data.model_copy(update={"augment": task.augment}),
        split=split,
        model=ModelConfig(
            name=task.model,
            args=task.args,
            layers=None if own.network else own.layers,
            levels=own.levels,
            networks=() if own.network is None else (own.network.model_copy(update={"layers": own.layers}),),
        ),
        task=TaskConfig(loss=task.loss, metrics=task.metrics, judge_by=task.judge_by),
        bits=own.bits or "auto",
        budget=own.budget,
        local_steps=task.local_steps,
        batch=task.batch,
        sample=task.sample,
        sampling=task.sampling,
        methods={task.label: MethodConfig(phases=task.phases)},
    )


def all_parts(config: Config, data: Dataset, seed: int) -> list[Part]:
    """Those that train, then in a try-out with `split.unseen` those that come later."""
    seen, later = split_clients(config, data, seed)
    return [*seen, *later]


def own_number(own: ClientConfig, parts: Sequence[Part]) -> int:
    """Which part of the data is this client's: all of it, or in a try-out its share of a set that all clients have."""
    if own.split is not None and own.client >= len(parts):
        raise UserError(f"split: client {own.client}, but there are {len(parts)} parts, numbered from 0")
    return own.client if own.split is not None else 0
