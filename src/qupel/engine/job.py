"""What an engine is asked to do: a model, clients with their data and plans, and the phases to run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from qupel.algorithms import Phase
from qupel.codebook import Plan
from qupel.data.batches import Transform, chunks, generator
from qupel.data.partition import Part
from qupel.data.sources import Dataset
from qupel.errors import UserError
from qupel.evaluate import CALIBRATION_SAMPLES, EVALUATION_BATCH
from qupel.oracle import Loss
from qupel.schedule import Clock


@dataclass(frozen=True, eq=False)
class Job:
    """One federation, or one training when there is one client. Clients' rows point into the data set."""

    module: nn.Module
    loss: Loss
    data: Dataset
    parts: Sequence[Part]
    plans: Sequence[Plan]
    phases: Sequence[Phase]
    seed: int = 0
    local_steps: int = 10  # tau
    batch: int = 50
    epoch_steps: int = 0  # 0: the steps that a client with the median number of samples needs to see each once
    sample: float = 1.0  # share of the clients that take part in a round
    weighted: bool = False  # server mean weighted by training samples
    evaluate_every: int = 10  # rounds; the last round of a phase is always evaluated
    evaluate_sample: float = 1.0  # share of the clients that are judged; at the end of a phase all are
    checkpoint_every: int = 0  # rounds; 0: with every evaluation
    on_bad_upload: Literal["refuse", "stop"] = "refuse"
    upload_bound: float = 50.0  # |upload - w| in medians over the clients (`engine.guard`); 0: no bound
    transform: Transform = field(default_factory=Transform)
    names: Sequence[str] = ()
    diagnostics: Literal["off", "cheap", "full"] = "off"
    stacked: bool = False  # clients of a process are trained in stacks (`engine.stack`), not one by one

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.plans):
            raise UserError(f"{len(self.parts)} clients but {len(self.plans)} plans of bits")
        for name, value in (("sample", self.sample), ("evaluate_sample", self.evaluate_sample)):
            if not 0 < value <= 1:
                raise UserError(f"{name} = {value}: allowed is a share above 0 up to 1")
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
        return replace(self, module=copy.deepcopy(self.module).to(device), data=data)

    def name(self, client: int) -> str:
        return self.names[client] if self.names else f"client {client}"

    def list_names(self, clients: Sequence[int]) -> str:
        return ", ".join(self.name(i) for i in clients[:10]) + (", ..." if len(clients) > 10 else "")

    @property
    def rounds(self) -> int:
        return sum(p.rounds for p in self.phases)

    @cached_property
    def steps_per_epoch(self) -> int:
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
        steps = self.phases[phase].rounds * self.local_steps
        return Clock(within * self.local_steps + local, steps, self.steps_per_epoch)

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, in ascending order; drawn from their own address, so every engine agrees."""
        n = len(self.parts)
        if self.sample >= 1:
            return list(range(n))
        size = max(1, int(self.sample * n + 0.5))
        return sorted(generator(self.seed, "cohort", round).choice(n, size, replace=False).tolist())

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

    def calibration(self, client: int, samples: int | None = CALIBRATION_SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
        """Training data of a client for BatchNorm's statistics, never augmented, in batches as equal as can be."""
        owned = self.parts[client].train_rows[:samples]
        batches = -(-len(owned) // EVALUATION_BATCH)
        return chunks(self.data.train.take(owned), -(-len(owned) // batches), self.transform)
