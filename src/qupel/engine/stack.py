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

from qupel.algorithms.base import State, keeps_state
from qupel.data.batches import batch
from qupel.engine.job import Job
from qupel.engine.shard import Shard, Trained, all_finite, mean_losses, screen, sound
from qupel.engine.store import flatten
from qupel.oracle import Losses, StackOracle

STACK = 2**20  # numbers in x of a stack (k, d), 4 MB: more would leave the processor's caches
MOST = 128  # clients in a stack; more gain nothing
HELD = 2**24  # numbers in uploads that wait for a client before them, 64 MB

Group = tuple[object, ...]  # what the clients of a stack have in common


class StackedShard(Shard):
    """A shard that trains its clients in stacks."""

    def __init__(self, job: Job, mine: Sequence[int], store: str = "memory", scratch: Path | None = None) -> None:
        super().__init__(job, mine, store, scratch)
        self.stack_oracle = StackOracle(job.module, job.loss)
        self.most = most_clients(self.layout.size)

    def train(self, round: int, w: Tensor, clients: Sequence[int]) -> Iterator[Trained]:
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
                    found[other] = self._group(other, state)
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

    def _group(self, client: int, state: State) -> Group:
        """The shape of its state and the size of its batches."""
        shape, _ = flatten(state, 0)
        return *shape.centers.items(), *shape.memory, min(self.job.batch, len(self.job.parts[client].train_rows))

    def _train_stack(self, round: int, w: Tensor, members: dict[int, State]) -> Iterator[Trained]:
        """Clients that fail keep the state they had before the round; the others do not notice."""
        job, oracle, clients = self.job, self.stack_oracle, list(members)
        phase, _ = job.locate(round)
        method, state = job.phases[phase].method, together(list(members.values()))
        rows = np.stack([self._rows(client, round) for client in clients], axis=1)  # (tau, k, b)
        losses: list[list[Losses]] = [[] for _ in clients]
        faults: dict[int, str] = {}
        oracle.faults = {}
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # a client that diverges goes on, and is refused
                for local in range(job.local_steps):
                    inputs = self._batches(clients, round * job.local_steps + local, rows[local])
                    oracle.losses = Losses()
                    state = method.step(state, oracle, inputs, job.clock(round, local))
                    for row, told in enumerate(each_of(oracle.losses, len(clients))):
                        if row in oracle.faults:
                            faults.setdefault(row, f"round {round + 1}, step {local + 1}: {oracle.faults[row]}")
                        else:
                            losses[row].append(told)
        except Exception:  # whose fault it is shows when they are trained one by one
            yield from super().train(round, w, clients)
            return
        uploads = method.upload(state)
        # one look at all of them
        clean = sound(state) is None and (uploads is None or uploads is state.x or all_finite(uploads))
        uploads = None if uploads is None else uploads.expand(len(clients), -1)  # (k, d)
        keeps = keeps_state(method)
        for row, client in enumerate(clients):
            upload, fault = None if uploads is None else uploads[row], faults.get(row)
            if fault is None and not clean:
                fault = screen(upload, len(w)) or sound(one_of(state, row, w))
                fault = f"round {round + 1}: {fault}" if fault else None
            if fault is None and keeps:
                self.store.put(client, phase, one_of(state, row, w))
            yield Trained(client, upload if fault is None else None, mean_losses(losses[row]), fault)

    def _batches(self, clients: Sequence[int], step: int, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """The clients' batches of a step, rows (k, b) of the data set: inputs (k, b, ...), targets (k, b, ...)."""
        job = self.job
        if job.transform.augment:
            each = [self._augmented(client, step, own) for client, own in zip(clients, rows, strict=True)]
            inputs, targets = (torch.stack(parts) for parts in zip(*each, strict=True))
            return inputs, targets
        inputs, targets = batch(job.data.train, rows.reshape(-1), job.transform)
        return inputs.unflatten(0, rows.shape), targets.unflatten(0, rows.shape)


def open_shard(job: Job, mine: Sequence[int], store: str = "memory", scratch: Path | None = None) -> Shard:
    return (StackedShard if job.stacked else Shard)(job, mine, store, scratch)


def most_clients(size: int) -> int:
    """How many clients with a model of this size make a stack."""
    return min(max(1, STACK // size), MOST)


def together(states: Sequence[State]) -> State:
    """States of one shape as one: x (k, d), w (k, d), centers (k, m), memory (k, ...). What all share is not copied."""

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        if all(t is first for t in tensors):
            return first.expand(len(tensors), *first.shape)
        return torch.stack(list(tensors))

    centers = (stack(c) for c in zip(*(s.codebook.centers for s in states), strict=True))
    memory = (stack(m) for m in zip(*(s.memory for s in states), strict=True))
    codebook = states[0].codebook.with_centers(centers)
    return State(stack([s.x for s in states]), stack([s.w for s in states]), codebook, tuple(memory))


def each_of(losses: Losses, k: int) -> list[Losses]:
    """The losses (k,) of a stack, client by client."""
    kinds = ([kind] * k if isinstance(kind, float) else kind.tolist() for kind in losses)
    return [Losses(*pair) for pair in zip(*kinds, strict=True)]


def one_of(state: State, row: int, w: Tensor) -> State:
    """One client's state, as views of the stack."""
    codebook = state.codebook.with_centers(c[row] for c in state.codebook.centers)
    return State(state.x[row], w, codebook, tuple(m[row] for m in state.memory))
