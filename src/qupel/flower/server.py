"""The server's side: `engine.rounds` runs the job; its engine is a fleet of clients that may be late, gone or wrong.

A round ends when all asked clients have answered or at its deadline; those that answered soundly are averaged, at least
`minimum` of them. What comes later, twice, from an old round or broken is not (`post.hear`). With `secure` the server
gets no upload, only their sum (`summing`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qupel.core.codebook import Plan
from qupel.core.layout import Layout
from qupel.engine import scores
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.job import Job
from qupel.engine.rounds import Failed, Finished, Progress, run
from qupel.engine.shard import Judged, Trained
from qupel.engine.sound import screen
from qupel.flower import boundary
from qupel.flower.boundary import printable
from qupel.flower.frames import Header
from qupel.flower.health import Health
from qupel.flower.known import judged_of, nothing, stand_in
from qupel.flower.late import Late
from qupel.flower.post import Bodies, Post, Reply, hear, wait_for
from qupel.flower.roundlog import RoundLog
from qupel.flower.secure import check_secure
from qupel.flower.summing import Summing
from qupel.flower.task import PROTOCOL, Task, Wanted, refuse_means_of_networks
from qupel.flower.wire import decode
from qupel.parts.base import Deployed, Rows, vector
from qupel.parts.methods.base import sends
from qupel.run.adapt import FILE, layout_hash, write_origin
from qupel.run.config import Config, Strict, find_modules_in
from qupel.run.folder import origin_of
from qupel.run.jobs import Cell, assemble, build_model
from qupel.run.privacy import open_ledger
from qupel.run.sections import SecureConfig
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_atomic, write_json

TRIES = 3  # of a round that too few clients answer
EXPORTS, ADAPT, ADAPTED = "exports.json", "adapt.json", "adapted.json"  # in a run's folder
SECRET = "noise.key"  # in the folder of a private run
UNDONE = "undone.json"  # in a checkpoint: rounds that do not count, which clients need to know


@dataclass(frozen=True)
class Terms:
    """How the server treats its clients."""

    clients: int  # of the federation, numbered from 0
    minimum: int = 1  # sound uploads that a round needs
    deadline: float = 120.0  # seconds a round may take
    patience: float = 600.0  # seconds to wait for the minimum to connect, and for their first answers
    upload: str = "fp32"  # the codec
    most_weight: float = 10.0  # what a client may count for in a weighted mean, in medians of all clients
    buffer: int = 0  # asynchronous rounds: uploads that make one (`flower.late`); 0: rounds wait for all that are asked
    secure: SecureConfig | None = None  # the server gets sums of uploads only
    audit: bool = False  # keep what it takes to replay the run


class Fleet:
    """The engine of `engine.rounds.run`: its clients are behind a `Post`."""

    def __init__(self, job: Job, task: Task, post: Post, terms: Terms, attempt: int) -> None:
        self.job, self.task, self.post, self.terms, self.attempt = job, task, post, terms, attempt
        self.samples = [len(part.train_rows) for part in job.parts]  # as the clients tell
        self.round = -1  # the last one that was asked for
        self.undone: list[list[int]] = []  # rounds [first, last] that were taken back
        self.health = Health(job)
        self.late = Late(self, terms.buffer) if terms.buffer else None
        self.unheard: list[str] = []  # whose scores could not be read since they were last asked for, and why
        self.size = Layout.of(job.module).size
        self.sums = Summing(self, task.secure) if task.secure else None
        self.log: RoundLog | None = None  # what an auditor replays
        self.peers: Path | None = None  # a folder with all clients' public keys

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        self.round = round
        awake = self.health.awake(round, clients, self.terms.minimum)
        masked = self.sums if self._sends(round) else None  # of a phase without uploads there is no sum
        train = masked.train if masked else self.late.train if self.late else self._train
        done = self.health.seen(round, train(round, w, awake))
        return self.log.keep(round, w, done) if self.log else done

    def _train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        needed = min(self.terms.minimum, len(clients))
        for _ in range(TRIES):
            asked = wait_for(self.post, clients, needed, self.terms.patience)
            done = {client: Trained(client, None, fault="not connected") for client in clients}
            done |= {client: Trained(client, None, fault="no answer before the deadline") for client in asked}
            for reply in self.ask("train", round, as_bytes(w), asked):
                done[reply.client] = self.read(reply, round, w)
            if sum(d.fault is None for d in done.values()) >= needed:
                return self._weighed(done.values())
        faults = "; ".join(f"{self.job.name(d.client)}: {d.fault}" for d in done.values() if d.fault)
        raise Failed(f"round {round + 1}: fewer than {needed} clients answered soundly ({faults})")

    def ask(self, kind: str, round: int, body: Bodies, clients: Sequence[int], **more: Any) -> Iterator[Reply]:
        """First answers only, and only of clients that were asked."""
        header: Header = {"kind": kind, "protocol": PROTOCOL, "attempt": self.attempt, "round": round, **more}
        header |= {"undone": self.undone, "seconds": self.terms.deadline}
        header["task"] = json.loads(self.task.model_dump_json())
        waiting = set(clients)
        for reply in self.post.ask(header, body, clients, self.terms.deadline):
            if reply.client in waiting:
                waiting.discard(reply.client)
                yield reply

    def read(self, reply: Reply, round: int, w: Rows) -> Trained:
        """A client's round out of its answer, or why it does not count."""
        heard = hear("train", reply, round=round, job=self.task.job)
        if not isinstance(heard, boundary.PrivateUpdate):
            return Trained(reply.client, None, fault=str(heard))
        expected = self._sends(round)
        upload, fault = None, None
        if expected != bool(reply.body):
            fault = "sent no upload" if expected else "sent an upload, and this phase has none"
        elif expected:
            try:
                upload = decode(self.task.upload, reply.body, w)
                fault = screen(upload, w)
            except Exception as e:
                fault = printable(e)
        if fault is not None:
            return Trained(reply.client, None, fault=fault)
        if self.log:
            self.log.payloads[reply.client] = reply.body
        return Trained(reply.client, upload, self.told(heard), wire=len(reply.body))

    def _sends(self, round: int) -> bool:
        """Whether the method of a round sends uploads."""
        return sends(self.job.phases[self.job.locate(round)[0]].method)

    def told(self, heard: boundary.PrivateUpdate) -> dict[str, float]:
        """What a client tells of its round beside the upload."""
        self.samples[heard.client] = heard.samples
        told = {name: getattr(heard, name, None) for name in ("loss", "loss_quantized")}
        return {name: value for name, value in told.items() if value is not None}

    def _weighed(self, done: Iterable[Trained]) -> Iterator[Trained]:
        """Clients count by the samples they tell, but none for more than `most_weight` medians: a lie of 2^31 samples
        must not make a weighted mean one client's own. Of two medians the lower one, which no single client moves."""
        if not self.job.weighted:
            return iter(done)
        most = max(1, int(self.terms.most_weight * sorted(self.samples)[(len(self.samples) - 1) // 2]))
        return (replace(d, share=float(min(self.samples[d.client], most))) for d in done)

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]:
        """Of nobody, if nobody answers: the metrics have a gap there, and the run goes on."""
        judged, self.unheard = [], []
        for reply in self.ask("evaluate", round, as_bytes(w), self._to_judge(clients)):
            heard = hear("evaluate", reply, round=round)
            if isinstance(heard, boundary.PrivateScores):
                judged.append(judged_of(heard, self.task.metrics))
            else:
                self.unheard.append(f"{self.job.name(reply.client)}: {heard}")
        if not judged:
            self.unheard.append("no client told how its model scores")
        return iter(judged)

    def _to_judge(self, clients: Sequence[int]) -> list[int]:
        """The connected ones; in asynchronous rounds, those that are not busy with one."""
        try:
            here = wait_for(self.post, clients, 1, self.terms.patience)
        except Failed:
            return []
        return [client for client in here if self.late is None or client not in self.late.asked]

    def written(self, kind: str, round: int, w: Rows, clients: Sequence[int]) -> list[dict[str, Any]]:
        """`export`: let these clients, where they are connected, write their models on their own disks; `adapt`: models
        made of w, where they need not have taken part. Per client its bytes and test score, or error."""
        told: dict[int, dict[str, Any]] = {client: {"error": "no answer"} for client in clients}
        for reply in self.ask(kind, round, as_bytes(w), wait_for(self.post, clients, 1, self.terms.patience)):
            heard = hear(kind, reply, round=round)
            if isinstance(heard, boundary.PrivateExport):
                more = {"shared": heard.shared} if isinstance(heard, boundary.Adapted) else {}
                told[reply.client] = {k: getattr(heard, k, None) for k in ("bytes", "test")} | more
            else:
                told[reply.client] = {"error": str(heard)}
        return [{"client": client, **told[client]} for client in clients]

    def deployed(self, round: int, w: Rows, client: int) -> Deployed:
        raise Failed("a client's model never leaves it; let it write the model on its own disk with `export`")

    def save(self, folder: Path) -> None:
        """Every client keeps its own generations, but which of them count the server knows."""
        write_json(folder / UNDONE, {"undone": self.undone, **self.health.save()})
        if self.late:
            self.late.save(folder)

    def load(self, folder: Path | None) -> None:
        """Clients go back to the states they had at a checkpoint, None: at the start, when they are next asked."""
        first = 0 if folder is None else int(folder.name.removeprefix("round-"))
        known = {"undone": []} if folder is None else read_json(folder / UNDONE)
        self.undone, self.health = known["undone"], Health.of(known, self.job)
        if self.late:
            self.late.load(folder)
        if first <= self.round:
            self.undone = [*self.undone, [first, self.round]]


def as_bytes(w: Rows) -> bytes:
    return vector(w).numpy().tobytes()


# --- a whole run ---


class Request(Strict):
    """RUN/request.json: what `qupel flower run` asks the server for."""

    job: str
    config: Config
    label: str
    seed: int
    terms: Terms
    modules: Path | None = None  # where parts of one's own are: beside the config
    peers: Path | None = None  # a folder with all clients' public keys (`peers`)

    @classmethod
    def read(cls, folder: Path) -> Request:
        raw = read_json(folder / "request.json")
        if raw.get("modules"):
            find_modules_in(Path(raw["modules"]))
        return cls.model_validate_json(json.dumps(raw))

    def write(self, folder: Path) -> None:
        write_atomic(folder / "request.json", self.model_dump_json(indent=1) + "\n")


def greet(post: Post, request: Request) -> dict[str, Any]:
    """Ask the clients what they have, again if too few answer: they load torch and their data now. Those whose data are
    of another kind than most clients' are left out."""
    terms = request.terms
    header = {"kind": "hello", "protocol": PROTOCOL, "seed": request.seed}
    cell = Cell(request.label, request.seed)
    header["wanted"] = Wanted.of_config(request.config, cell).model_dump()
    limit = time.monotonic() + terms.patience
    hellos: dict[int, boundary.Hello] = {}
    for _ in range(TRIES):
        here = wait_for(post, range(terms.clients), terms.minimum, terms.patience)
        faults = {client: "no answer" for client in here if client not in hellos}
        for reply in post.ask(header, b"", list(faults), max(1.0, limit - time.monotonic())):
            if reply.client in faults:
                heard = hear("hello", reply)
                if isinstance(heard, boundary.Hello):
                    hellos[reply.client] = heard
                    del faults[reply.client]
                else:
                    faults[reply.client] = str(heard)
        if len(hellos) >= terms.minimum or time.monotonic() > limit:
            break
    kinds: dict[tuple[tuple[int, ...], int], dict[int, int]] = {}  # (shape, classes) -> client -> samples
    for client, hello in hellos.items():
        kinds.setdefault((hello.shape, hello.classes), {})[client] = hello.samples
    kind = max(kinds, key=lambda k: (len(kinds[k]), -min(kinds[k])), default=None)
    told = kinds[kind] if kind else {}
    for other in kinds.keys() - {kind}:
        faults |= dict.fromkeys(kinds[other], f"inputs {other[0]} and {other[1]} classes, most have {kind}")
    if kind is not None:
        layout = layout_hash(build_model(request.config, nothing(*kind), cell))
        for client in [i for i in told if hellos[i].layout != layout]:
            del told[client]
            faults[client] = f"its network has layout {hellos[client].layout}, the server's {layout}"
    if kind is None or len(told) < terms.minimum:
        named = "; ".join(f"client {client}: {fault}" for client, fault in sorted(faults.items()))
        raise UserError(f"{len(told)} of {len(here)} clients can take part, {terms.minimum} are needed ({named})")
    typical = int(np.median(list(told.values())))
    samples = [told.get(i, typical) for i in range(terms.clients)]
    return {"shape": kind[0], "classes": kind[1], "samples": samples, "left_out": faults}


def check_told(config: Config, terms: Terms | None = None) -> None:
    """Clients tell a closed list of things, and are told another: what a run needs beyond cannot be had."""
    if terms and terms.buffer and config.privacy is not None:
        raise UserError("privacy: what it costs in asynchronous rounds is not counted; leave out one of the two")
    if terms and terms.buffer and (terms.secure or terms.audit):
        what = "--secure: a sum is of one round's uploads" if terms.secure else "--audit: a log is of rounds in turn"
        raise UserError(f"{what}; leave out --mode async")
    if config.diagnostics != "off":
        raise UserError("diagnostics: clients on Flower tell scores only; leave it out")
    refuse_means_of_networks(config)
    if config.model.start is not None:
        raise UserError("model.start: a federation on Flower starts from the model's name and the seed")
    if config.data.standardize == "shared":
        raise UserError('data.standardize = "shared": clients on Flower tell nothing of their data; use "client"')


def open_fleet(folder: Path, post: Post) -> Fleet:
    """The fleet of a run folder, with the answers of its first greeting; every opening counts as an attempt."""
    request = Request.read(folder)
    check_told(request.config, request.terms)
    counted = folder / "attempt.json"
    attempt = 1 + (json.loads(counted.read_text()) if counted.exists() else 0)
    write_json(counted, attempt)
    greeting = folder / "clients.json"
    if not greeting.exists():
        write_json(greeting, greet(post, request))
    job, task = described(folder, request)
    fleet = Fleet(job, task, post, request.terms, attempt)
    fleet.peers = request.peers
    fleet.log = RoundLog(folder, attempt, task.model_dump_json()) if request.terms.audit else None
    return fleet


def described(folder: Path, request: Request) -> tuple[Job, Task]:
    """The job of a run folder whose clients were greeted, and what clients are told of it."""
    told = read_json(folder / "clients.json")
    data = nothing(tuple(told["shape"]), told["classes"])
    parts = [stand_in(n) for n in told["samples"]]
    config, cell, terms = request.config, Cell(request.label, request.seed), request.terms
    job = assemble(config, cell, build_model(config, data, cell), data, parts, [Plan() for _ in parts])
    job = replace(job, epoch_steps=job.client_epoch_steps, checkpoint_every=1, secret=secret_of(folder, job))
    if terms.secure:
        check_secure(job.phases, job.weighted, terms.upload)
    return job, Task.of(job, config, cell, name=request.job, upload=terms.upload, secure=terms.secure)


def secret_of(folder: Path, job: Job) -> int:
    """What noise and cohorts of a private job are drawn from; clients know its seed, so it is another number."""
    if job.budget is None:
        return 0
    path = folder / SECRET
    if not path.exists():
        write_json(path, secrets.randbits(127) + 1)
        path.chmod(0o600)
    return int(read_json(path))


def conduct(
    folder: Path,
    post: Post,
    watch: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run the job of a folder to its end, from its newest checkpoint if there is one, and let the clients export."""
    request, fleet = Request.read(folder), open_fleet(folder, post)
    checkpoints = Checkpoints(folder, fleet.task.job)

    def tell(progress: Progress) -> None:
        unheard = fleet.unheard if progress.line else []
        watch(replace(progress, refused=[*progress.refused, *unheard]))

    ledger = open_ledger(request.config, fleet.job, folder, request.job)
    finished = run(fleet.job, fleet, checkpoints=checkpoints, ledger=ledger, watch=tell, should_stop=should_stop)
    write_atomic(folder / "w.bin", vector(finished.w).numpy().tobytes())
    fleet.save(folder)
    if fleet.log:
        fleet.log.end(finished.w)
    write_origin(folder / FILE, origin_of(request.config, Cell(request.label, request.seed), fleet.job, finished.w))
    if request.config.save_models:
        export(folder, fleet)
    write_json(
        folder / "result.json", {"rounds": fleet.job.rounds, "lines": [scores.short(line) for line in finished.lines]}
    )
    checkpoints.remove()
    return finished


def export(folder: Path, fleet: Fleet) -> list[dict[str, Any]]:
    """Let the clients of a finished run write their models; what they tell goes to RUN/exports.json."""
    told = fleet.written("export", fleet.job.rounds - 1, _last(folder, fleet), range(fleet.terms.clients))
    write_json(folder / EXPORTS, told)
    return told


def adapt(folder: Path, fleet: Fleet) -> list[dict[str, Any]]:
    """Serve clients after the end: those that RUN/adapt.json names, else all that have no model of this run. What they
    tell goes to RUN/adapted.json."""
    asked = folder / ADAPT
    known = read_json(folder / EXPORTS) if (folder / EXPORTS).exists() else []
    have = {told["client"] for told in known if "error" not in told}
    clients = read_json(asked) if asked.exists() else [i for i in range(fleet.terms.clients) if i not in have]
    told = fleet.written("adapt", fleet.job.rounds - 1, _last(folder, fleet), clients) if clients else []
    write_json(folder / ADAPTED, told)
    return told


def _last(folder: Path, fleet: Fleet) -> Rows:
    """The rows that a finished run has left; from here on the clients' rounds count as they did at its end."""
    w = torch.from_numpy(np.fromfile(folder / "w.bin", np.float32))
    fleet.undone = read_json(folder / UNDONE)["undone"]
    return w.split(Layout.of(fleet.job.module).size)
