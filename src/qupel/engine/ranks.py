"""Clients sharded over the ranks of a group (torch.distributed, gloo), on one machine or several.

Rank 0 runs the loop of rounds and has clients of its own; every rank computes with one thread. Ranks build the job
themselves from its description, so that w, uploads, scores and records are all that travels. Rank 0 alone touches the
run's folder: clients' states come to it for a checkpoint and go out from it on resume, one by one. So no file system
need be shared, and any number of ranks, or another engine, can go on. Uploads are added in client order: any number of
ranks gives the same bits.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.algorithms.base import Deployed, State
from qupel.engine.group import NOTHING, Group, Lost, Message
from qupel.engine.job import Job
from qupel.engine.shard import Judged, Trained
from qupel.engine.stack import open_shard
from qupel.engine.store import Shape, flatten, read_rows, unflatten, write_rows
from qupel.engine.workers import ROOM
from qupel.errors import UserError
from qupel.evaluate import Score
from qupel.flat import Layout
from qupel.machine import keep_memory

USED = {"do": "used"}
Description = dict[str, Any]  # what a rank builds the job from, as JSON


class Ranks:
    """A job on a group: client i belongs to rank i mod (number of ranks). Use as a context manager: it gives the thread
    count and the state of torch's generator back."""

    def __init__(
        self, group: Group, job: Job, description: Description, store: str = "memory", scratch: Path | None = None
    ) -> None:
        self.group, self.job = group, job
        self.shard = open_shard(job, self._clients(0), store, scratch)
        folder = str(scratch) if scratch else None
        order = {"do": "job", "job": description, "digest": digest(job), "store": store, "scratch": folder}
        for _ in self._answers(self._order(dict.fromkeys(group.peers, order))):
            pass

    def __enter__(self) -> Ranks:
        self.before = torch.get_num_threads()
        self.random = torch.get_rng_state()
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        torch.set_num_threads(self.before)
        torch.set_rng_state(self.random)

    def train(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Trained]:
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
        what, vector = found
        return Trained(what["client"], vector if what["sent"] else None, what["loss"], what["fault"])

    def evaluate(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Judged]:
        mine, asked = self._share("evaluate", round, w, clients)
        for judged in self.shard.evaluate(round, w, mine):
            yield judged
            yield from map(_judged, self._answers(asked, wait=False))
        yield from map(_judged, self._answers(asked))

    def deployed(self, round: int, w: Tensor, client: int) -> Deployed:
        own, asked = self._share("deployed", round, w, [client])
        if own:
            return self.shard.deployed(client, round, w)
        ((what, row),) = self._answers(asked)
        model = unflatten(row, _shape(what), self.shard.layout, row)
        return Deployed(model.x, model.codebook)

    def save(self, folder: Path) -> None:
        write_rows(self._records(), folder, "shard-0")

    def _records(self) -> Iterator[tuple[int, Shape, Iterable[Tensor]]]:
        """One client's record at a time, so that rank 0 never holds them all."""
        for client in range(len(self.job.parts)):
            if self._owner(client) == 0:
                found = self.shard.store.get(client, self.shard.initial)
                if found:
                    yield client, *flatten(found[1], found[0])
            else:
                asked = self._order({self._owner(client): {"do": "record", "client": client}})
                for what, row in self._answers(asked):
                    yield client, _shape(what), [row]

    def load(self, folder: Path | None) -> None:
        self.shard.load(folder)
        for _ in self._answers(self._order({rank: {"do": "clear"} for rank in self.group.peers})):
            pass
        if folder is None:
            return
        others = [i for i in range(len(self.job.parts)) if self._owner(i) != 0]
        for client, shape, row in read_rows(folder, others, self.shard.layout):
            asked = self._order({self._owner(client): {"do": "put", "client": client, **asdict(shape)}}, row)
            for _ in self._answers(asked):
                pass

    # --- orders and answers ---

    def _owner(self, client: int) -> int:
        return client % self.group.size

    def _clients(self, rank: int) -> range:
        return range(rank, len(self.job.parts), self.group.size)

    def _share(self, do: str, round: int, w: Tensor, clients: Sequence[int]) -> tuple[list[int], set[int]]:
        """(rank 0's clients among these, the ranks that were asked for the others)."""
        groups: dict[int, list[int]] = {}
        for client in clients:
            groups.setdefault(self._owner(client), []).append(client)
        own = groups.pop(0, [])
        return own, self._order({r: {"do": do, "round": round, "clients": c} for r, c in groups.items()}, w)

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
            kind = what["kind"]
            if kind == "done":
                asked.discard(rank)
            elif kind == "wrong":
                raise UserError(f"{self.group.name(rank)}: {what['text']}")
            elif kind == "disk":
                raise OSError(*what["error"])
            elif kind == "bug":
                raise RuntimeError(f"{self.group.name(rank)} failed:\n{what['text']}")
            else:
                return what, vector
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


def _shape(what: dict[str, Any]) -> Shape:
    return Shape(what["phase"], what["centers"], tuple(what["memory"]))


def digest(job: Job) -> str:
    """What every rank must have alike: the first model, data, who has which rows, bits and phases."""
    found = hashlib.sha256(repr([job.plans, job.phases, job.seed, job.local_steps, job.batch]).encode())
    for part in job.parts:
        for rows in (part.train_rows, part.test_rows, part.validation_rows):
            found.update(np.ascontiguousarray(rows).data)
    first = Layout.of(job.module).flatten(job.module)
    arrays = (job.data.train.inputs, job.data.train.targets, job.data.test.inputs, job.data.test.targets)
    for tensor in (first, *arrays):
        found.update(np.ascontiguousarray(tensor.numpy()).data)
    return found.hexdigest()


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
        except UserError as e:
            last = {"kind": "wrong", "text": str(e)}
        except OSError as e:
            last = {"kind": "disk", "error": [e.errno, e.strerror, e.filename and str(e.filename)]}
        except Exception:
            last = {"kind": "bug", "text": traceback.format_exc()}
        group.send(0, last)


class _Desk:
    """The orders a rank answers, each with any number of messages."""

    def __init__(self, group: Group, build: Callable[[Description], Job]) -> None:
        self.group, self.build = group, build

    def answer(self, order: dict[str, Any], vector: Tensor) -> Iterator[Message]:
        do = order["do"]
        if do == "job":
            self._job(order)
        elif do == "train":
            for k, done in enumerate(self.shard.train(order["round"], vector, order["clients"])):
                if k >= ROOM:
                    self._wait_until_used()
                what = {"client": done.client, "loss": done.loss, "fault": done.fault, "sent": done.upload is not None}
                yield what, NOTHING if done.upload is None else done.upload
            for _ in order["clients"][:ROOM]:
                self._wait_until_used()
        elif do == "evaluate":
            for judged in self.shard.evaluate(order["round"], vector, order["clients"]):
                yield {"judged": asdict(judged)}, NOTHING
        elif do == "deployed":
            for client in order["clients"]:
                model = self.shard.deployed(client, order["round"], vector)
                yield _record(State(model.x, model.x, model.codebook), 0)
        elif do == "record":
            found = self.shard.store.get(order["client"], self.shard.initial)
            if found:
                yield _record(found[1], found[0])
        elif do == "clear":
            self.shard.load(None)
        elif do == "put":
            state = unflatten(vector, _shape(order), self.shard.layout, vector)
            self.shard.store.put(order["client"], order["phase"], state)
        else:
            raise RuntimeError(f"unknown order {do!r}")

    def _wait_until_used(self) -> None:
        """One more of the uploads sent is averaged: rank 0 holds a few of each rank, not all."""
        order, _ = self.group.order()
        assert order == USED, order

    def _job(self, order: dict[str, Any]) -> None:
        job = self.build(order["job"])
        if digest(job) != order["digest"]:
            raise UserError("its data, its split or its first model is not that of rank 0")
        folder = Path(order["scratch"]) if order["scratch"] else None
        here = folder if folder and folder.is_dir() else None  # rank 0's folder, where this machine has it
        mine = range(self.group.rank, len(job.parts), self.group.size)
        self.shard = open_shard(job, mine, order["store"], here)


def _record(state: State, phase: int) -> Message:
    shape, tensors = flatten(state, phase)
    return asdict(shape), torch.cat(tensors)
