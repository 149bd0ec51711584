"""Clients of one process trained in stacks: states (k, d), one call of `step` for all of them.

The methods' own functions run on a stack as on one client, so there is no second copy of a formula. A stack holds
clients whose states have the same shape and whose batches have the same size; sums are taken in another order than one
by one, so the last bits differ. Small models gain, because a step of theirs is mostly the cost of calling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qupel.data.batches import batch
from qupel.engine.job import Job
from qupel.engine.rows import flatten
from qupel.engine.shard import Shard, Trained, named
from qupel.engine.sound import all_finite, screen, sound
from qupel.parts.base import Rows, State, Upload, combined
from qupel.parts.methods.base import keeps_state
from qupel.tasks.stack import StackTask
from qupel.tasks.task import Batch, Problem
from qupel.tasks.trees import over

STACK = 2**20  # numbers in x of a stack (k, d), 4 MB: more would leave the processor's caches
MOST = 128  # clients in a stack; more gain nothing
HELD = 2**24  # numbers in uploads that wait for a client before them, 64 MB

Group = tuple[object, ...]  # what the clients of a stack have in common


class StackedShard(Shard):
    """A shard that trains its clients in stacks."""

    def __init__(self, job: Job, mine: Sequence[int], store: str = "memory", scratch: Path | None = None) -> None:
        super().__init__(job, mine, store, scratch)
        self.stack_tasks: dict[str, StackTask] = {}
        self.most = most_clients(self.layout.size)

    def stack_task(self, network: str) -> StackTask:
        if network not in self.stack_tasks:
            self.stack_tasks[network] = StackTask(self._network(network), self.job.loss)
        return self.stack_tasks[network]

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        """tau local steps at each of these clients, in their order. A stack is trained when it is full, or when the
        client whose turn it is waits in it and nothing more may be held."""
        phase, _ = self.job.locate(round)
        held = max(self.most, HELD // self.layout.size)
        groups: dict[Group, dict[int, State]] = {}
        found: dict[int, Group] = {}
        done: dict[int, Trained] = {}
        ahead = iter(clients)
        for client in clients:
            while client not in done:
                other = next(ahead, None) if len(found) + len(done) < held else None
                if other is not None:
                    state = self.state(other, phase, w)
                    found[other] = self._group(other, state, phase)
                    group = groups.setdefault(found[other], {})
                    group[other] = state
                    full = found[other] if len(group) == self.most else None
                else:
                    full = found[client]
                if full is not None:
                    for trained in self._train_stack(round, w, groups.pop(full)):
                        del found[trained.client]
                        done[trained.client] = trained
            yield done.pop(client)

    def _group(self, client: int, state: State, phase: int) -> Group:
        """Its network, the shape of its state and the size of its batches."""
        shape, _ = flatten(state, 0)
        size = min(self.job.batch, len(self.steps.seen(client, phase)))
        return self.job.network_of(client), *shape.parts.items(), *shape.layers.items(), size

    def _train_stack(self, round: int, w: Rows, members: dict[int, State]) -> Iterator[Trained]:
        """Clients that fail keep the state they had before the round; the others do not notice."""
        job, clients = self.job, list(members)
        own, shared = self.stack_task(job.network_of(clients[0])), self.stack_task("")
        phase, _ = job.locate(round)
        method, state = job.phases[phase].method, together(list(members.values()))
        rows = np.stack([self.steps.rows(client, round) for client in clients], axis=1)  # (tau, k, b)
        values: dict[str, list[list[float]]] = {}  # name -> per step, the clients' values
        faults: dict[int, str] = {}
        own.faults = shared.faults = {}
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # a client that diverges goes on, and is refused
                for local in range(job.local_steps):
                    inputs = self.batches(clients, round * job.local_steps + local, rows[local])
                    state, info = method.step(state, Problem(own, shared), inputs, job.clock(round, local))
                    for name, value in named(info):
                        values.setdefault(name, []).append(torch.as_tensor(value).expand(len(clients)).tolist())
                    for row, what in own.faults.items():
                        faults.setdefault(row, f"round {round + 1}, step {local + 1}: {what}")
        except Exception:  # whose fault it is shows when they are trained one by one
            yield from super().train(round, w, clients)
            return
        sent = method.upload(state)
        rows_sent = () if sent is None else tuple(row.expand(len(clients), -1) for row in sent.rows)  # each (k, d)
        # one look at all of them
        clean = sound(state) is None and (sent is None or all(row is state.x or all_finite(row) for row in sent.rows))
        keeps = keeps_state(method)
        for row, client in enumerate(clients):
            upload, fault = _one_upload(sent, rows_sent, row), faults.get(row)
            upload = self.sent(client, phase, upload, w)
            if fault is None and not clean:
                fault = screen(upload, w) or sound(one_of(state, row))
                fault = f"round {round + 1}: {fault}" if fault else None
            if fault is None and keeps:
                self.store.put(client, phase, one_of(state, row))
            means = {name: sum(v[row] for v in steps) / len(steps) for name, steps in values.items()}
            yield Trained(client, self.leaving(client, round, upload, w) if fault is None else None, means, fault)

    def batches(self, clients: Sequence[int], step: int, rows: np.ndarray) -> Batch:
        """The clients' batches of a step, rows (k, b) of the data set: inputs (k, b, ...), targets (k, b, ...)."""
        job = self.job
        if job.transform.augment or job.transforms:
            each = [self.steps.augmented(client, step, own) for client, own in zip(clients, rows, strict=True)]
            return Batch(*over(lambda *leaf: torch.stack(leaf), *map(tuple, each)))
        flat = batch(job.data.train, rows.reshape(-1), job.transform)
        return Batch(*over(lambda leaf: leaf.unflatten(0, rows.shape), tuple(flat)))


def open_shard(job: Job, mine: Sequence[int], store: str = "memory", scratch: Path | None = None) -> Shard:
    return (StackedShard if job.stacked else Shard)(job, mine, store, scratch)


def most_clients(size: int) -> int:
    """How many clients with a model of this size make a stack."""
    return min(max(1, STACK // size), MOST)


def together(states: Sequence[State]) -> State:
    """States of one form as one: x (k, d), w (k, d), centers (k, m), and so on. What all share is not copied."""

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        if all(t is first for t in tensors):
            return first.expand(len(tensors), *first.shape)
        return torch.stack(list(tensors))

    return combined(states, stack)


def one_of(state: State, row: int) -> State:
    """One client's state, as views of the stack."""
    return combined([state], lambda tensors: tensors[0][row])


def _one_upload(sent: Upload | None, rows: Rows, client: int) -> Upload | None:
    if sent is None:
        return None
    shares = None if sent.shares is None else sent.shares.expand(len(rows[0]), -1)[client]
    return Upload(tuple(row[client] for row in rows), shares)
