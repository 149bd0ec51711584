"""Clients sharded over the ranks of a group (torch.distributed, gloo), on one machine or several.

Rank 0 runs the loop of rounds and has clients of its own; every rank computes with one thread. Ranks build the job
themselves from its description, so that w, uploads, scores and records are all that travels. Rank 0 alone touches the
run's folder: clients' states come to it for a checkpoint and go out from it on resume, one by one. So no file system
need be shared, and any number of ranks, or another engine, can go on. Uploads are added in client order: any number of
ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qupel.engine.faults import raise_told, told
from qupel.engine.fingerprint import of_job
from qupel.engine.group import NOTHING, Group, Lost, Message
from qupel.engine.job import Job
from qupel.engine.rows import Shape, flatten, one_row, unflatten
from qupel.engine.shard import Judged, Trained
from qupel.engine.stack import open_shard
from qupel.engine.states import States
from qupel.engine.workers import ROOM
from qupel.parts.base import Deployed, Rows, State, Upload, vector
from qupel.tasks.judge import Score
from qupel.util.errors import UserError
from qupel.util.machine import keep_memory

USED = {"do": "used"}
Description = dict[str, Any]  # what a rank builds the job from, as JSON


class Ranks:
    """A job on a group: client i belongs to rank i mod (number of ranks). Use as a context manager: it gives the thread
    count and the state of torch's generator back."""

    def __init__(
        self, group: Group, job: Job, description: Description, store: str = "memory", scratch: Path | None = None
    ) -> None:
        self.group, self.job = group, job
        self.saved = States()  # of the other ranks' clients
        self.shard = open_shard(job, self._clients(0), store, scratch)
        folder = str(scratch) if scratch else None
        order = {"do": "job", "job": description, "digest": of_job(job), "store": store, "scratch": folder}
        self._everyone(order)

    def __enter__(self) -> Ranks:
        self.before = torch.get_num_threads()
        self.random = torch.get_rng_state()
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        torch.set_num_threads(self.before)
        torch.set_rng_state(self.random)

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        """In client order. While the one whose turn it is has not come, this rank works on, a few uploads ahead."""
        mine, asked = self._share("train", round, w, clients)
        own = self.shard.train(round, w, mine)
        early: dict[int, Trained] = {}
        for client in clients:
            while client not in early:
                ahead = sum(self._owner(i) == 0 for i in early)
                done = self._one(own if self._owner(client) == 0 or ahead < ROOM else iter(()), asked)
                early[done.client] = done
            yield early.pop(client)
            if self._owner(client) != 0:
                self._order({self._owner(client): USED})
        for _ in self._answers(asked):  # until all are done
            pass

    def _one(self, own: Iterator[Trained], asked: set[int]) -> Trained:
        """The next result: one that has come by now, else the next of this rank, else the next that comes."""
        found = self._next(asked, wait=False)
        if found is None:
            done = next(own, None)
            if done is not None:
                return done
            found = self._next(asked)
        assert found is not None
        what, row = found
        upload = None
        if what["sent"]:
            shares = None if what["shares"] is None else torch.tensor(what["shares"])
            upload = Upload(row.split(self.shard.layout.size), shares)
        return Trained(what["client"], upload, what["info"], what["fault"])

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]:
        mine, asked = self._share("evaluate", round, w, clients)
        for judged in self.shard.evaluate(round, w, mine):
            yield judged
            yield from map(_judged, self._answers(asked, wait=False))
        yield from map(_judged, self._answers(asked))

    def deployed(self, round: int, w: Rows, client: int) -> Deployed:
        own, asked = self._share("deployed", round, w, [client])
        if own:
            return self.shard.deployed(client, round, w)
        ((what, row),) = self._answers(asked)
        shipped = replace(self.shard.forms, state=lambda phase: State)
        model = unflatten(row, Shape.read(what), client, shipped, row)
        return Deployed(model.x, model.codebook)

    def save(self, folder: Path) -> None:
        self.shard.save(folder, "shard-0")
        self.saved.save(folder, "shard-others", self._changed())
        self._everyone({"do": "saved"})

    def _changed(self) -> Iterator[tuple[int, Shape, Iterable[Tensor]]]:
        """Records that the other ranks have and no checkpoint has, one at a time: rank 0 never holds them all."""
        for rank in self.group.peers:
            for what, _ in [*self._answers(self._order({rank: {"do": "changed"}}))]:
                for client in what["clients"]:
                    for shape, row in self._answers(self._order({rank: {"do": "record", "client": client}})):
                        yield client, Shape.read(shape), [row]

    def load(self, folder: Path | None) -> None:
        self.shard.load(folder)
        self._everyone({"do": "clear"})
        self.saved.load(folder, (i for i in range(len(self.job.parts)) if self._owner(i) != 0))
        for client in self.saved.places:
            found = self.saved.read(client)
            assert found is not None
            shape, row = found
            asked = self._order({self._owner(client): {"do": "put", "client": client, **shape.table()}}, row)
            for _ in self._answers(asked):
                pass
        self._everyone({"do": "saved"})

    def _everyone(self, order: dict[str, Any]) -> None:
        for _ in self._answers(self._order(dict.fromkeys(self.group.peers, order))):
            pass

    # --- orders and answers ---

    def _owner(self, client: int) -> int:
        return client % self.group.size

    def _clients(self, rank: int) -> range:
        return range(rank, len(self.job.parts), self.group.size)

    def _share(self, do: str, round: int, w: Rows, clients: Sequence[int]) -> tuple[list[int], set[int]]:
        """(rank 0's clients among these, the ranks that were asked for the others)."""
        groups: dict[int, list[int]] = {}
        for client in clients:
            groups.setdefault(self._owner(client), []).append(client)
        own = groups.pop(0, [])
        return own, self._order({r: {"do": do, "round": round, "clients": c} for r, c in groups.items()}, vector(w))

    def _order(self, orders: dict[int, dict[str, Any]], vector: Tensor = NOTHING) -> set[int]:
        """Send each rank its order, all with the same vector; the ranks that owe an answer."""
        with self._clients_named():
            for rank, order in orders.items():
                self.group.send(rank, order, vector)
        return set(orders)

    def _answers(self, asked: set[int], wait: bool = True) -> Iterator[Message]:
        """What the ranks that owe an answer say, until each is done; without `wait`, what has come by now."""
        while (found := self._next(asked, wait)) is not None:
            yield found

    def _next(self, asked: set[int], wait: bool = True) -> Message | None:
        """The next of those; None when all are done or, without `wait`, when there is none yet."""
        while asked or not wait:
            with self._clients_named():
                found = self.group.receive(asked, wait)
            if found is None:
                return None
            rank, (what, vector) = found
            raise_told(what, self.group.name(rank), name_user_errors=True)
            if what["kind"] != "done":
                return what, vector
            asked.discard(rank)
        return None

    @contextmanager
    def _clients_named(self) -> Iterator[None]:
        try:
            yield
        except Lost as e:
            theirs = self._clients(e.rank)
            raise Lost(e.rank, f"{e} with {self.job.list_names(theirs)}" if theirs else str(e)) from None


def _judged(message: Message) -> Judged:
    what = message[0]["judged"]
    test, validation, before = (Score(**what.pop(name)) for name in ("test", "validation", "float_test"))
    return Judged(test=test, validation=validation, float_test=before, **what)


# --- the other ranks ---


def serve(group: Group, build: Callable[[Description], Job]) -> None:
    """A rank's life: answer rank 0's orders, until its listener ends this process."""
    torch.set_num_threads(1)
    keep_memory()
    desk = _Desk(group, build)
    while True:
        order, vector = group.order()
        try:
            for what, row in desk.answer(order, vector):
                group.send(0, {"kind": "item", **what}, row)
            last: dict[str, Any] = {"kind": "done"}
        except Exception as e:
            last = told(e)
        group.send(0, last)


class _Desk:
    """The orders a rank answers, each with any number of messages."""

    def __init__(self, group: Group, build: Callable[[Description], Job]) -> None:
        self.group, self.build = group, build

    def _rows(self, sent: Tensor) -> Rows:
        return sent.split(self.shard.layout.size)

    def answer(self, order: dict[str, Any], sent: Tensor) -> Iterator[Message]:
        do = order["do"]
        if do == "job":
            self._job(order)
        elif do == "train":
            for k, done in enumerate(self.shard.train(order["round"], self._rows(sent), order["clients"])):
                if k >= ROOM:
                    self._wait_until_used()
                up = done.upload
                what = {"client": done.client, "info": dict(done.info), "fault": done.fault, "sent": up is not None}
                what["shares"] = up.shares.tolist() if up is not None and up.shares is not None else None
                yield what, NOTHING if up is None else vector(up.rows)
            for _ in order["clients"][:ROOM]:
                self._wait_until_used()
        elif do == "evaluate":
            for judged in self.shard.evaluate(order["round"], self._rows(sent), order["clients"]):
                yield {"judged": asdict(judged)}, NOTHING
        elif do == "deployed":
            for client in order["clients"]:
                model = self.shard.deployed(client, order["round"], self._rows(sent))
                yield _record(State(model.x, model.x, model.codebook), 0)
        elif do == "record":
            found = self.shard.store.get(order["client"], self.shard.initial)
            if found:
                yield _record(found[1], found[0])
        elif do == "changed":
            yield {"clients": sorted(self.shard.store.changed)}, NOTHING
        elif do == "saved":  # rank 0 knows where
            self.shard.store.changed.clear()
        elif do == "clear":
            self.shard.load(None)
        elif do == "put":
            state = unflatten(sent, Shape.read(order), order["client"], self.shard.forms, sent)
            self.shard.store.put(order["client"], order["phase"], state)
        else:
            raise RuntimeError(f"unknown order {do!r}")

    def _wait_until_used(self) -> None:
        """One more of the uploads sent is averaged: rank 0 holds a few of each rank, not all."""
        order, _ = self.group.order()
        assert order == USED, order

    def _job(self, order: dict[str, Any]) -> None:
        job = self.build(order["job"])
        if of_job(job) != order["digest"]:
            raise UserError("its data, its split or its first model is not that of rank 0")
        folder = Path(order["scratch"]) if order["scratch"] else None
        here = folder if folder and folder.is_dir() else None  # rank 0's folder, where this machine has it
        mine = range(self.group.rank, len(job.parts), self.group.size)
        self.shard = open_shard(job, mine, order["store"], here)


def _record(state: State, phase: int) -> Message:
    shape, tensors = flatten(state, phase)
    return shape.table(), one_row(tensors)
