"""The server's side: `engine.rounds` runs the job; its engine is a fleet of clients that may be late, gone or wrong.

A round ends when all asked clients have answered or at its deadline; those that answered soundly are averaged, at least
`minimum` of them. What comes later, twice, from an old round or broken is not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from qupel.algorithms.base import Deployed
from qupel.config import Config, Strict, explain
from qupel.data.partition import Part
from qupel.data.sources import Arrays, Dataset
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.job import Job
from qupel.engine.rounds import Failed, Finished, Progress, run
from qupel.engine.shard import Judged, Trained, screen
from qupel.errors import UserError
from qupel.experiment import Cell, assemble, build_model
from qupel.files import write_atomic, write_json
from qupel.flower.frames import Header
from qupel.flower.task import PROTOCOL, Task
from qupel.flower.wire import Codec, decode

TRIES = 3  # of a round that too few clients answer
MOST = 100  # times the median: a client that claims more samples counts for so many


@dataclass(frozen=True)
class Reply:
    """What came back from a client; `header` has an "error" where there was one."""

    client: int
    header: Header
    body: bytes = b""


class Post(Protocol):
    """Carries questions to clients and their answers back."""

    def present(self) -> list[int]:
        """The clients that are connected, by number."""

    def ask(self, header: Header, body: bytes, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        """Ask these clients; answers as they come, until all have answered or time is over."""


@dataclass(frozen=True)
class Terms:
    """How the server treats its clients."""

    clients: int  # of the federation, numbered from 0
    minimum: int = 1  # sound uploads that a round needs
    deadline: float = 120.0  # seconds a round may take
    patience: float = 600.0  # seconds to wait for the minimum to connect, and for their first answers
    upload: Codec = "fp32"


class Fleet:
    """The engine of `engine.rounds.run`: its clients are behind a `Post`. `parts` is the job's own list of them."""

    def __init__(self, job: Job, task: Task, parts: list[Part], post: Post, terms: Terms, attempt: int) -> None:
        self.job, self.task, self.parts, self.post, self.terms, self.attempt = job, task, parts, post, terms, attempt
        self.most = MOST * int(np.median([len(p.train_rows) for p in parts]))

    def train(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Trained]:
        needed = min(self.terms.minimum, len(clients))
        for _ in range(TRIES):
            asked = wait_for(self.post, clients, needed, self.terms.patience)
            done = {client: Trained(client, None, math.nan, "not connected") for client in clients}
            done |= {client: Trained(client, None, math.nan, "no answer before the deadline") for client in asked}
            for reply in self._ask("train", round, w, asked):
                done[reply.client] = self._read(reply, round, w)
            if sum(d.fault is None for d in done.values()) >= needed:
                return iter(done.values())
        faults = "; ".join(f"{self.job.name(d.client)}: {d.fault}" for d in done.values() if d.fault)
        raise Failed(f"round {round + 1}: fewer than {needed} clients answered soundly ({faults})")

    def _ask(self, kind: str, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Reply]:
        """First answers only, and only of clients that were asked."""
        header: Header = {"kind": kind, "protocol": PROTOCOL, "attempt": self.attempt, "round": round}
        header["seconds"] = self.terms.deadline
        header["task"] = json.loads(self.task.model_dump_json())
        waiting = set(clients)
        for reply in self.post.ask(header, w.numpy().tobytes(), clients, self.terms.deadline):
            if reply.client in waiting:
                waiting.discard(reply.client)
                yield reply

    def _read(self, reply: Reply, round: int, w: Tensor) -> Trained:
        """A client's round out of its answer, or why it does not count."""
        upload, header = None, reply.header
        loss, samples = header.get("loss"), header.get("samples")
        fault = fault_of(reply, round)
        if fault is None and header.get("job") != self.task.job:
            fault = f"answered job {header.get('job')!r:.40}"
        if fault is None and (type(samples) is not int or not 1 <= samples < 2**31):
            fault = f"says it has {samples!r:.40} samples"
        if fault is None and reply.body:
            try:
                upload = decode(self.task.upload, reply.body, w)
                fault = screen(upload, len(w))
            except UserError as e:
                fault = str(e)
        if fault is not None:
            return Trained(reply.client, None, math.nan, fault)
        self.parts[reply.client] = stand_in(min(int(samples or 0), self.most))
        return Trained(reply.client, upload, loss if type(loss) is float else math.nan, wire=len(reply.body))

    def evaluate(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Judged]:
        judged = []
        for reply in self._ask("evaluate", round, w, wait_for(self.post, clients, 1, self.terms.patience)):
            if fault_of(reply, round) is None:
                try:
                    judged.append(_JUDGED.validate_python({k: v for k, v in reply.header.items() if k != "round"}))
                except ValidationError:
                    continue
        if not judged:
            raise Failed(f"round {round + 1}: no client told how its model scores")
        return iter(judged)

    def export(self, round: int, w: Tensor) -> list[dict[str, Any]]:
        """Let every connected client write its model on its own disk: per client its bytes and test score, or error."""
        everyone = range(self.terms.clients)
        told: dict[int, dict[str, Any]] = {client: {"error": "no answer"} for client in everyone}
        for reply in self._ask("export", round, w, wait_for(self.post, everyone, 1, self.terms.patience)):
            fault = fault_of(reply, round)
            told[reply.client] = {k: reply.header.get(k) for k in ("bytes", "test")} if not fault else {"error": fault}
        return [{"client": client, **told[client]} for client in everyone]

    def deployed(self, round: int, w: Tensor, client: int) -> Deployed:
        raise Failed("a client's model never leaves it; let it write the model on its own disk with `export`")

    def save(self, folder: Path) -> None:
        """Nothing: every client keeps its own generations."""

    def load(self, folder: Path | None) -> None:
        """Nothing, for the same reason."""


_JUDGED = TypeAdapter(Judged)


def fault_of(reply: Reply, round: int) -> str | None:
    """Why an answer does not count, whatever it holds: an error, another client's number, another round."""
    header = reply.header
    if header.get("error"):
        return str(header["error"])[:300]
    if header.get("client") != reply.client:
        return f"says it is client {header.get('client')!r:.40}"
    if header.get("round") != round:
        told = header.get("round")
        return f"answered round {told + 1 if type(told) is int else repr(told)[:40]} when asked for round {round + 1}"
    return str(header["fault"])[:300] if header.get("fault") else None


def wait_for(post: Post, clients: Sequence[int], least: int, patience: float) -> list[int]:
    """Those of the clients that are connected, as soon as at least so many are."""
    limit = time.monotonic() + patience
    while True:
        here = set(post.present())
        found = [client for client in clients if client in here]
        if len(found) >= least:
            return found
        if time.monotonic() > limit:
            raise Failed(f"{len(found)} of {len(clients)} clients are connected, {least} are needed")
        time.sleep(0.5)


def stand_in(samples: int) -> Part:
    """A client's data as the server knows it: how much there is."""
    return Part(np.broadcast_to(np.int64(0), samples), np.empty(0, np.int64))  # no memory, whatever a client says


# --- a whole run ---


class Request(Strict):
    """RUN/request.json: what `qupel flower run` asks the server for."""

    job: str
    config: Config
    label: str
    seed: int
    terms: Terms

    @classmethod
    def read(cls, folder: Path) -> Request:
        return cls.model_validate_json((folder / "request.json").read_text())

    def write(self, folder: Path) -> None:
        write_atomic(folder / "request.json", self.model_dump_json(indent=1) + "\n")


class Hello(Strict):
    client: int
    samples: int = Field(ge=1, lt=2**31)
    shape: tuple[int, ...]
    classes: int = Field(ge=1)


def greet(post: Post, request: Request) -> dict[str, Any]:
    """Ask the clients what they have, again if too few answer: they load torch and their data now. Those whose data are
    of another kind than most clients' are left out."""
    terms = request.terms
    header = {"kind": "hello", "protocol": PROTOCOL, "seed": request.seed}
    limit = time.monotonic() + terms.patience
    hellos: dict[int, Hello] = {}
    for _ in range(TRIES):
        here = wait_for(post, range(terms.clients), terms.minimum, terms.patience)
        faults = {client: "no answer" for client in here if client not in hellos}
        for reply in post.ask(header, b"", list(faults), max(1.0, limit - time.monotonic())):
            if reply.client in faults:
                heard = read_hello(reply)
                if isinstance(heard, Hello):
                    hellos[reply.client] = heard
                    del faults[reply.client]
                else:
                    faults[reply.client] = heard
        if len(hellos) >= terms.minimum or time.monotonic() > limit:
            break
    kinds: dict[tuple[tuple[int, ...], int], dict[int, int]] = {}  # (shape, classes) -> client -> samples
    for client, hello in hellos.items():
        kinds.setdefault((hello.shape, hello.classes), {})[client] = hello.samples
    kind = max(kinds, key=lambda k: (len(kinds[k]), -min(kinds[k])), default=None)
    told = kinds[kind] if kind else {}
    for other in kinds.keys() - {kind}:
        faults |= dict.fromkeys(kinds[other], f"inputs {other[0]} and {other[1]} classes, most have {kind}")
    if kind is None or len(told) < terms.minimum:
        named = "; ".join(f"client {client}: {fault}" for client, fault in sorted(faults.items()))
        raise UserError(f"{len(told)} of {len(here)} clients can take part, {terms.minimum} are needed ({named})")
    typical = int(np.median(list(told.values())))
    samples = [min(told.get(i, typical), MOST * typical) for i in range(terms.clients)]
    return {"shape": kind[0], "classes": kind[1], "samples": samples, "left_out": faults}


def read_hello(reply: Reply) -> Hello | str:
    """What a client has, or what is wrong with its answer."""
    fault = fault_of(Reply(reply.client, {**reply.header, "round": 0}), 0)
    if fault:
        return fault
    try:
        return Hello.model_validate_json(json.dumps(reply.header))
    except ValidationError as e:
        return explain(e)


def open_fleet(folder: Path, post: Post) -> Fleet:
    """The fleet of a run folder, with the answers of its first greeting; every opening counts as an attempt."""
    request = Request.read(folder)
    counted = folder / "attempt.json"
    attempt = 1 + (json.loads(counted.read_text()) if counted.exists() else 0)
    write_json(counted, attempt)
    greeting = folder / "clients.json"
    if not greeting.exists():
        write_json(greeting, greet(post, request))
    told = json.loads(greeting.read_text())
    none = Arrays(torch.empty(0, *told["shape"]), torch.empty(0, dtype=torch.int64))
    data = Dataset("the clients' own", none, none, told["classes"])
    parts = [stand_in(n) for n in told["samples"]]
    config, cell = request.config, Cell(request.label, request.seed)
    job = assemble(config, cell, build_model(config, data, cell), data, parts, [{} for _ in parts])
    job = replace(job, epoch_steps=job.steps_per_epoch, checkpoint_every=1)
    task = Task.of(job, name=request.job, label=cell.label, model=config.model.name, upload=request.terms.upload)
    return Fleet(job, task, parts, post, request.terms, attempt)


def conduct(
    folder: Path,
    post: Post,
    watch: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run the job of a folder to its end, from its newest checkpoint if there is one, and let the clients export."""
    fleet = open_fleet(folder, post)
    checkpoints = Checkpoints(folder, fleet.task.job)
    finished = run(fleet.job, fleet, checkpoints=checkpoints, watch=watch, should_stop=should_stop)
    write_atomic(folder / "w.bin", finished.w.numpy().tobytes())
    if Request.read(folder).config.save_models:
        export(folder, fleet)
    write_json(folder / "result.json", {"rounds": fleet.job.rounds, "lines": finished.lines})
    checkpoints.remove()
    return finished


def export(folder: Path, fleet: Fleet) -> list[dict[str, Any]]:
    """Let the clients of a finished run write their models; what they tell goes to RUN/exports.json."""
    w = torch.from_numpy(np.fromfile(folder / "w.bin", np.float32))
    told = fleet.export(fleet.job.rounds - 1, w)
    write_json(folder / "exports.json", told)
    return told
