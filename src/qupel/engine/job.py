"""What an engine is asked to do: a model, clients with their data and plans, and the phases to run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.codebook import Plan
from qupel.core.layout import Layout
from qupel.core.schedule import Clock
from qupel.data.batches import Transform, chunks, generator
from qupel.data.partition import Part
from qupel.data.scale import scale_of, unit_of
from qupel.data.sources import Dataset, kind_in_words
from qupel.engine.accounting import Budget
from qupel.parts.base import Rows, State, as_rows
from qupel.parts.methods import Method
from qupel.parts.methods.base import row_per_network
from qupel.parts.phase import Phase
from qupel.tasks.judge import CALIBRATION_SAMPLES, EVALUATION_BATCH
from qupel.tasks.metrics import Metric
from qupel.tasks.task import Batch, Loss, Task
from qupel.util.errors import UserError

TAKEN = frozenset({"test", "bits", "bytes", "number", "count", "loss"})  # names in lines of metrics


class Diagnostics(Protocol):
    """Looks at clients while they are judged, and tells it in the metrics (`paper.diagnostics`). It changes nothing."""

    @property
    def mode(self) -> str:
        """`cheap`: on the batch of a client's next step; `full`: on all of its training data."""

    def look(
        self,
        method: Method,
        state: State,
        w: Tensor,
        clock: Clock,
        task: Task,
        batches: Sequence[Batch],
        made: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """made: the steps of the phase that the client took part in; none: all so far."""

    def apart(self, upload: Tensor, w: Tensor) -> float: ...

    def summary(
        self,
        method: Method,
        clock: Clock,
        tau: int,
        seen: Sequence[Mapping[str, Any]],
        moved: tuple[Sequence[tuple[float, float]], Tensor, Tensor],
        before: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class Job:
    """One federation, or one training when there is one client. Clients' rows point into the data set.

    module: the shared network. networks: others, by name; network: the name of each client's own, "" the shared one.
    """

    module: nn.Module
    loss: Loss
    data: Dataset
    parts: Sequence[Part]
    plans: Sequence[Plan]
    phases: Sequence[Phase]
    seed: int = 0
    local_steps: int = 10  # tau
    batch: int = 50
    epoch_steps: float = 0  # of a client; 0: those that one with the median number of samples needs to see each once
    sample: float = 1.0  # share of the clients that take part in a round
    sampling: Literal["fixed", "poisson"] = "fixed"  # exactly so many, or each by its own draw
    weighted: bool = False  # server mean weighted by training samples
    evaluate_every: int = 10  # rounds; the last round of a phase is always evaluated
    evaluate_sample: float = 1.0  # share of the clients that are judged; at the end of a phase all are
    checkpoint_every: int = 0  # rounds; 0: with every evaluation
    on_bad_upload: Literal["refuse", "stop"] = "refuse"
    upload_bound: float = 50.0  # |upload - w| in medians over the clients (`engine.guard`); 0: no bound
    transform: Transform = field(default_factory=Transform)
    transforms: Sequence[Transform] = ()  # one a client, where each has its own mean and std, in place of `transform`
    names: Sequence[str] = ()
    diagnostics: Diagnostics | None = None
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    network: Sequence[str] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # beside loss and accuracy
    judge_by: str = ""  # what the score of a client is: a metric, "accuracy" or "loss"; accuracy where there are labels
    budget: Budget | None = None  # what its private phases may cost (`engine.ledger`)
    secret: int = 0  # 128 bits that nobody else knows, for noise and cohorts in place of the seed; 0: the seed
    stacked: bool = False  # clients of a process are trained in stacks (`engine.stack`), not one by one

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.plans):
            raise UserError(f"{len(self.parts)} clients but {len(self.plans)} plans of bits")
        for name, value in (("sample", self.sample), ("evaluate_sample", self.evaluate_sample)):
            if not 0 < value <= 1:
                raise UserError(f"{name} = {value}: allowed is a share above 0 up to 1")
        if self.network and (len(self.network) != len(self.parts) or not set(self.network) <= {"", *self.networks}):
            known = ", ".join(map(repr, ("", *self.networks)))
            raise UserError(f"network: one name a client is needed, of {known}; not {list(self.network)}")
        if taken := TAKEN & set(self.metrics):
            raise UserError(f"a metric cannot be called {sorted(taken)[0]!r}: lines of metrics have another under it")
        if self.judge_by not in {"", "accuracy", "loss", *self.metrics}:
            known = ", ".join(("accuracy", "loss", *self.metrics))
            raise UserError(f"judge_by = {self.judge_by!r} is none of the metrics; allowed: {known}")
        averaged = [row_per_network(phase.method) for phase in self.phases]
        if averaged != sorted(averaged, reverse=True):
            raise UserError(
                "phases: means of networks are there from the first phase on; a later one cannot begin them"
            )
        for i, part in enumerate(self.parts):
            if len(part.train_rows) == 0:
                raise UserError(f"{self.name(i)} has no training data")

    def with_phases(self, phases: Sequence[Phase]) -> Job:
        """This job with these phases; those of 0 rounds are left out."""
        if any(p.rounds < 0 for p in phases) or not any(p.rounds for p in phases):
            raise UserError("phases: at least one round in all, and no negative number of rounds")
        return replace(self, phases=[p for p in phases if p.rounds])

    def to(self, device: torch.device) -> Job:
        """This job with its model and data on a device; everything a run computes follows them there."""
        if device.type == "cpu":
            return self
        data = replace(self.data, train=self.data.train.to(device), test=self.data.test.to(device))
        networks = {name: copy.deepcopy(net).to(device) for name, net in self.networks.items()}
        return replace(self, module=copy.deepcopy(self.module).to(device), networks=networks, data=data)

    def transform_of(self, client: int) -> Transform:
        return self.transforms[client] if self.transforms else self.transform

    def data_of(self, client: int) -> Dataset:
        """The data with the client's own mean and std."""
        return replace(self.data, **self.transforms[client].scale) if self.transforms else self.data

    @property
    def standardized(self) -> bool:
        """Whether float inputs are scaled by mean and std."""
        kind = self.data.train.kinds[0]
        return bool(self.transforms or self.data.mean) and isinstance(kind, tuple) and kind[0] == torch.float32

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All networks by name, the shared one's is ""."""
        return {"": self.module, **self.networks}

    def network_of(self, client: int) -> str:
        return self.network[client] if self.network else ""

    def rows_of(self, phase: int) -> int:
        """How many rows the server has in the rounds of a phase: the method's, then means of networks."""
        return len(self.phases[phase].method.broadcast(torch.zeros(2))) + len(self.first_means)

    @cached_property
    def first_means(self) -> Rows:
        """Means of networks, where the first phase has them, as they begin: the models that their clients start from,
        each as rows of w's size. The shared network's mean is w. They stay with the server to the end."""
        return tuple(row for rows in self._first_models.values() for row in rows)

    @cached_property
    def places(self) -> dict[str, slice]:
        """By network, its own rows among the means."""
        ends = dict(zip(self._first_models, accumulate(map(len, self._first_models.values())), strict=True))
        return {name: slice(ends[name] - len(rows), ends[name]) for name, rows in self._first_models.items()}

    @cached_property
    def _first_models(self) -> dict[str, Rows]:
        if not row_per_network(self.phases[0].method):
            return {}
        size = Layout.of(self.module).size
        return {name: as_rows(Layout.of(net).flatten(net), size) for name, net in self.networks.items()}

    def name(self, client: int) -> str:
        """Of a client; of a number below 0: that of all together (`shard.SUM`)."""
        if client < 0:
            return "the sum"
        return self.names[client] if self.names else f"client {client}"

    def list_names(self, clients: Sequence[int]) -> str:
        return ", ".join(self.name(i) for i in clients[:10]) + (", ..." if len(clients) > 10 else "")

    @property
    def rounds(self) -> int:
        return sum(p.rounds for p in self.phases)

    @cached_property
    def participation(self) -> float:
        """The share of the rounds that a client is expected to take part in."""
        return self.sample if self.sampling == "poisson" else self._cohort_size / len(self.parts)

    @property
    def _cohort_size(self) -> int:
        return max(1, int(self.sample * len(self.parts) + 0.5))

    @cached_property
    def steps_per_epoch(self) -> float:
        """Steps of the run in which a client is expected to make those of an epoch."""
        return self.client_epoch_steps if self.participation == 1 else self.client_epoch_steps / self.participation

    @cached_property
    def client_epoch_steps(self) -> float:
        """Steps that a client makes in an epoch."""
        if self.epoch_steps:
            return self.epoch_steps
        median = int(np.median([len(p.train_rows) for p in self.parts]))
        return max(1, median // min(self.batch, median))

    def locate(self, round: int) -> tuple[int, int]:
        """(phase, round within it) of a round counted from 0 over the whole run."""
        for k, phase in enumerate(self.phases):
            if round < phase.rounds:
                return k, round
            round -= phase.rounds
        raise IndexError(round)

    def clock(self, round: int, local: int) -> Clock:
        """Where the `local`-th step of a round is within its phase."""
        phase, within = self.locate(round)
        rounds = self.phases[phase].rounds
        share = max(self.participation, 1 / rounds)  # a client that takes part at all makes a round's steps
        return Clock(within * self.local_steps + local, rounds * self.local_steps, self.steps_per_epoch, share)

    def steps_made(self, round: int) -> dict[int, np.ndarray]:
        """By client, the steps of this round's phase that it was drawn for up to this round."""
        _, within = self.locate(round)
        rounds: dict[int, list[int]] = {client: [] for client in range(len(self.parts))}
        for k in range(within + 1):
            for client in self.cohort(round - within + k):
                rounds[client].append(k)
        local = np.arange(self.local_steps)
        return {
            client: np.add.outer(np.array(k, int) * self.local_steps, local).ravel() for client, k in rounds.items()
        }

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, in ascending order; drawn from their own address, so every engine agrees."""
        n = len(self.parts)
        if self.sample >= 1:
            return list(range(n))
        rng = self.drawn("cohort", round)
        if self.sampling == "poisson":
            return np.flatnonzero(rng.random(n) < self.sample).tolist()
        return sorted(rng.choice(n, self._cohort_size, replace=False).tolist())

    def drawn(self, purpose: str, *address: int) -> np.random.Generator:
        """What is drawn for all clients: from the seed, or from what only the server knows."""
        if not self.secret:
            return generator(self.seed, purpose, *address)
        return generator(self.secret % 2**64, purpose, self.secret >> 64, *address)

    def judged(self, round: int) -> Sequence[int]:
        """The clients that are judged after a round: the same at every look, so that rounds can be compared."""
        phase, within = self.locate(round)
        n = len(self.parts)
        if self.evaluate_sample >= 1 or within == self.phases[phase].rounds - 1:
            return range(n)
        size = max(1, int(self.evaluate_sample * n + 0.5))
        return sorted(generator(self.seed, "judged").choice(n, size, replace=False).tolist())

    def share(self, client: int) -> float:
        return float(len(self.parts[client].train_rows)) if self.weighted else 1.0

    def calibration(self, client: int, samples: int | None = CALIBRATION_SAMPLES) -> Iterator[Batch]:
        """Training data of a client for BatchNorm's statistics, never augmented, in batches as equal as can be. Of more
        rows than `samples` a random draw: rows often come sorted, and the first of them are of one kind."""
        owned = self.parts[client].train_rows
        if samples is not None and len(owned) > samples:
            owned = owned[generator(self.seed, "calibration", client).permutation(len(owned))[:samples]]
        batches = -(-len(owned) // EVALUATION_BATCH)
        return chunks(self.data.train.take(owned), -(-len(owned) // batches), self.transform_of(client))


def standardized(job: Job, how: str) -> Job:
    """This job with inputs of mean 0 and deviation 1 in every channel: "client", by the client's own training data, or
    "shared", by all clients' together. "auto": floats are divided by one number, if they are far from the size that
    step sizes are made for. The numbers are part of every client's file."""
    if how == "off" or not len(job.data.train):  # a server that has none
        return job
    kind = job.data.train.kinds[0]
    if not (isinstance(kind, tuple) and kind[0] == torch.float32 and kind[1]):
        if how == "auto":
            return job
        what = kind_in_words(kind)
        raise UserError(f"standardize: for one input of floats (n, features, ...); {job.data.name} has {what}")
    rows = [part.train_rows for part in job.parts]
    if how == "auto":
        unit = 1.0 if job.data.mean else unit_of(job.data.train, rows)
        scales = [((0.0,) * kind[1][0], (unit,) * kind[1][0])]
        if unit == 1.0:
            return job
    else:
        scales = [scale_of(job.data.train, own) for own in (rows if how == "client" else [np.concatenate(rows)])]
    made = [replace(job.transform, mean=torch.tensor(mean), std=torch.tensor(std)) for mean, std in scales]
    if how == "client":
        return replace(job, transforms=made)
    mean, std = scales[0]
    return replace(job, transform=made[0], data=replace(job.data, mean=mean, std=std))
