"""What the clients of a job see, step by step: which of their samples, and as which batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor

from qupel.core.schedule import Clock
from qupel.data.batches import batch, generator, held_back, rows_of_steps
from qupel.engine.job import Job
from qupel.parts.methods.base import Method
from qupel.tasks.task import Batch


class Steps:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.on_gpu = next(job.module.parameters()).device.type == "cuda"
        self.known: dict[tuple[int, float], np.ndarray] = {}

    def held(self, client: int, phase: int) -> np.ndarray | None:
        """Which of a client's rows the steps of a phase do not see (n,); none: they see all."""
        share = self.job.phases[phase].held
        if not share:
            return None
        if (client, share) not in self.known:
            rows = self.job.parts[client].train_rows
            targets = self.job.data.train.read(rows).targets if self.job.data.classes is not None else None
            classes = isinstance(targets, Tensor) and targets.ndim == 1
            labels = torch.as_tensor(targets).cpu().numpy() if classes else np.zeros(len(rows))
            self.known[client, share] = held_back(labels, share)
        return self.known[client, share]

    def seen(self, client: int, phase: int) -> np.ndarray:
        """The client's rows of the data set that the steps of a phase see."""
        rows, held = self.job.parts[client].train_rows, self.held(client, phase)
        return rows if held is None else rows[~held]

    def rows(self, client: int, round: int, phase: int | None = None) -> np.ndarray:
        """Rows of the data set that a client sees in a round, of those of its phase or another, by steps (tau, b)."""
        job, owned = self.job, self.seen(client, self.job.locate(round)[0] if phase is None else phase)
        return owned[rows_of_steps(job.seed, client, round * job.local_steps, job.local_steps, len(owned), job.batch)]

    def batch(self, client: int, step: int, rows: np.ndarray) -> Batch:
        """The batch of these rows, and torch's generator, of which dropout draws, where this step finds it."""
        seed = int(generator(self.job.seed, "dropout", client, step).integers(2**62))
        torch.default_generator.manual_seed(seed)
        if self.on_gpu:
            torch.cuda.manual_seed(seed)
        return self.augmented(client, step, rows)

    def augmented(self, client: int, step: int, rows: np.ndarray) -> Batch:
        job = self.job
        rng = generator(job.seed, "augment", client, step) if job.transform.augment else None
        return batch(job.data.train, rows, job.transform_of(client), rng)

    def batches(self, client: int, round: int, phase: int) -> Iterator[Batch]:
        """The client's batches of a round, of the rows that a phase sees."""
        for local, rows in enumerate(self.rows(client, round, phase)):
            yield self.batch(client, round * self.job.local_steps + local, rows)

    def ahead(self, client: int, round: int, phase: int) -> Iterator[Batch]:
        """Those of all steps after a round."""
        for later in count(round + 1):
            yield from self.batches(client, later, phase)

    def past(self, client: int, phase: int) -> Iterator[tuple[Method, Iterator[tuple[Batch, Clock]]]]:
        """The phases before one, as a client went through them, but for its samples, which are those of this phase."""
        job, end = self.job, 0
        for past in job.phases[:phase]:
            begin, end = end, end + past.rounds
            yield past.method, self._timed(client, range(begin, end), phase)

    def _timed(self, client: int, rounds: range, phase: int) -> Iterator[tuple[Batch, Clock]]:
        for round in rounds:
            if client in self.job.cohort(round):
                for local, seen in enumerate(self.batches(client, round, phase)):
                    yield seen, self.job.clock(round, local)

    def unseen(self, client: int, phase: int) -> Batch | None:
        """What the steps of a phase do not see; none, where they see all."""
        held = self.held(client, phase)
        if held is None or not held.any():
            return None
        return batch(self.job.data.train, self.job.parts[client].train_rows[held], self.job.transform_of(client))
