"""What the rounds of a private job have cost: a file that is written before a round's sum is used, so that it is never
behind, and in which a round that is made again after a crash, to the same sum, stands once.

{"neighbours": ..., "runs": {run: {"releases": [...],                          the kinds of releases that there were
                                   "rounds": {"0": [[kind, sum's digest]]},    one entry for each sum that had noise
                                   "clients": {"3": [rounds of each kind]}}}}  in which a client took part

Noise is addressed by (seed, round, entry): the same sum gets the same noise again, and tells nothing new; another sum
of the same round, as when other clients answer, gets noise of its own, and is paid for. Digests are keyed by the seed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from qupel.data.batches import generator
from qupel.engine.accounting import Release, Releases, epsilon
from qupel.engine.job import Job
from qupel.parts.methods.base import sends
from qupel.parts.phase import Phase
from qupel.parts.servers import Covering, Sum, covering
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_sealed

FILE = "privacy.json"
SLACK = 1 + 1e-9


class Spent(UserError):
    """The next round would cost more than the budget has left."""


def release_of(job: Job, cover: Covering, came: int | None = None) -> Release:
    """What a round tells. came: clients whose uploads are in the sum (None: all that are expected); with shared noise,
    those who stay away keep theirs."""
    if cover.kind == "local":
        return Release(cover.noise, "local")
    noise = cover.noise
    if cover.kind == "shared" and came is not None:
        noise *= math.sqrt(min(1.0, came / (cover.clients or came or 1)))
    if job.participation == 1:
        return Release(noise)
    return Release(noise, job.sampling, job.participation, len(job.parts) if job.sampling == "fixed" else 0)


def private_part(phase: Phase) -> Covering | None:
    return covering(phase.server) if sends(phase.method) else None


def planned(job: Job, but: Collection[int] = (), taken: Mapping[Release, Mapping[int, int]] | None = None) -> Releases:
    """What the whole job tells, but for some of its rounds; with local noise, of the client that takes part most.
    taken: with local noise, rounds in which each client has taken part before these."""
    counts: Counter[Release] = Counter()
    took_part = {release: Counter(clients) for release, clients in (taken or {}).items()}
    first = 0
    for phase in job.phases:
        if cover := private_part(phase):
            release = release_of(job, cover)
            rounds = [round for round in range(first, first + phase.rounds) if round not in but]
            if cover.kind == "local":
                cohorts = (client for round in rounds for client in job.cohort(round))
                took_part.setdefault(release, Counter()).update(cohorts)
            else:
                counts[release] += len(rounds)
        first += phase.rounds
    for release, clients in took_part.items():
        counts[release] += max(clients.values(), default=0)
    return counts


class Ledger:
    """The entries of one run in a file that may hold those of others, on the same clients."""

    def __init__(self, path: Path, run: str, job: Job) -> None:
        self.path, self.run, self.job = path, run, job
        assert job.budget is not None
        self.budget = job.budget
        self.plan = planned(job)
        self.known = self._read()  # as it was when last looked at

    def _read(self) -> dict[str, Any]:
        known: dict[str, Any] = (
            read_json(self.path, sealed=True) if self.path.exists() else {"neighbours": "", "runs": {}}
        )
        known["runs"].setdefault(self.run, {"releases": [], "rounds": {}, "clients": {}})
        here = {release.neighbours for release in self.plan} - {known["neighbours"] or None}
        if known["neighbours"] and here:
            raise UserError(f"{self.path} counts for {known['neighbours']}; this run's sampling is for {here.pop()}")
        return known

    @contextmanager
    def _alone(self) -> Iterator[dict[str, Any]]:
        """The file, as it is now and as this process alone may change it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            with suppress(ImportError):  # Windows
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX)
            self.known = self._read()
            yield self.known
        finally:
            os.close(handle)

    # --- before a run, before a round ---

    def begin(self, start: int) -> None:
        """Refuse a run that cannot be paid for, or whose past is not here. start: rounds that are done."""
        paid = self._own["rounds"]
        lost = [r for r in range(start) if private_part(self.job.phases[self.job.locate(r)[0]]) and str(r) not in paid]
        if lost:
            raise UserError(
                f"{self.path} does not have round {lost[0] + 1} of this run, which is done: it is not its ledger"
            )
        if self.budget.epsilon is None:
            return
        rest = planned(self.job, {int(round) for round in paid}, self._taken())
        made = {release: count for release, count in self._made(self.run).items() if release.sampling != "local"}
        whole = self.cost(Counter(made) + Counter(rest))
        if whole > self.budget.epsilon * SLACK:
            others = self.cost(Counter()) if len(self.known["runs"]) > 1 else 0.0
            before = f", {others:.3g} of it by other runs" if others else ""
            raise UserError(
                f"privacy: these rounds make epsilon {whole:.3g}{before}, at delta {self.budget.delta:g}; "
                f"target_epsilon is {self.budget.epsilon:g}: give more noise, or fewer rounds"
            )

    def afford(self, round: int) -> None:
        """Raise `Spent` unless a release of this round, to all that are drawn, is within the budget."""
        cover = private_part(self.job.phases[self.job.locate(round)[0]])
        if cover is not None and str(round) not in self._own["rounds"]:
            self._check(round, release_of(self.job, cover), self.job.cohort(round))

    def _check(self, round: int, release: Release, clients: Sequence[int]) -> None:
        """Raise `Spent` unless one more release, of these clients, is within the budget."""
        if self.budget.epsilon is None:
            return
        own = Counter(self._made(self.run))
        if release.sampling == "local":
            taken = self._taken().get(release, {})
            own[release] = max(own[release], *(1 + taken.get(client, 0) for client in clients), 0)
        else:
            own[release] += 1
        if all(count <= self.plan.get(release, 0) for release, count in own.items()) and len(self.known["runs"]) == 1:
            return  # what `begin` has looked at
        if (cost := self.cost(own)) > self.budget.epsilon * SLACK:
            raise Spent(
                f"privacy: round {round + 1} would make epsilon {cost:.3g}, at delta {self.budget.delta:g}; "
                f"target_epsilon is {self.budget.epsilon:g}: the run ends after {round} of {self.job.rounds} rounds"
            )

    # --- a round ---

    def pay(
        self, round: int, cover: Covering, clients: Sequence[int], sums: Sequence[Sum | None]
    ) -> np.random.Generator:
        """The generator of the noise for these sums of a round; they are paid for when this returns. Raises `Spent`
        where they cost more than was planned: a second sum of a round, shared noise of too few, another run's rounds
        meanwhile."""
        digest = _digest(sums, self.job.drawn("digests").bytes(32))
        with self._alone() as known:
            own = known["runs"][self.run]
            entries = own["rounds"].setdefault(str(round), [])
            made = [of for _, of in entries]
            if digest not in made:
                made_of = release_of(self.job, cover, len(clients))
                self._check(round, made_of, clients)
                release = asdict(made_of)
                if release not in own["releases"]:
                    own["releases"].append(release)
                kind = own["releases"].index(release)
                entries.append([kind, digest])
                for client in map(str, clients):
                    counts = own["clients"].setdefault(client, [])
                    counts.extend([0] * (kind + 1 - len(counts)))
                    counts[kind] += 1
                known["neighbours"] = made_of.neighbours
                made.append(digest)
                write_sealed(self.path, known)
        return noise_of(self.job, round, made.index(digest))

    # --- what it adds up to ---

    @property
    def _own(self) -> dict[str, Any]:
        return self.known["runs"][self.run]

    def _made(self, run: str, upto: int | None = None) -> dict[Release, int]:
        """The releases of a run, of its rounds up to one; with local noise, of the client that took part most."""
        entries = self.known["runs"][run]
        kinds = [Release(**release) for release in entries["releases"]]
        counts = Counter(
            kinds[kind] for r, sums in entries["rounds"].items() if upto is None or int(r) <= upto for kind, _ in sums
        )
        for k, release in enumerate(kinds):
            if release.sampling == "local":
                most = max((counts[k] for counts in entries["clients"].values() if k < len(counts)), default=0)
                counts[release] = min(counts[release], most)
        return counts

    def _taken(self) -> dict[Release, dict[int, int]]:
        """Local releases of this run -> in how many of them each client took part."""
        kinds = {k: Release(**release) for k, release in enumerate(self._own["releases"])}
        clients = self._own["clients"].items()
        return {
            release: {int(client): counts[k] for client, counts in clients if k < len(counts)}
            for k, release in kinds.items()
            if release.sampling == "local"
        }

    def cost(self, own: Releases) -> float:
        """Epsilon of these releases and of all other runs'."""
        total = Counter(own)
        for run in self.known["runs"]:
            total.update(self._made(run) if run != self.run else {})
        return epsilon(total, self.budget.delta)

    def of_client(self, client: int) -> float:
        """Epsilon of a client for those who know which rounds it took part in: nothing is gained by sampling."""
        total: Counter[Release] = Counter()
        for entries in self.known["runs"].values():
            for release, count in zip(entries["releases"], entries["clients"].get(str(client), ()), strict=False):
                total[Release(release["noise"], "local" if release["sampling"] == "local" else "all")] += count
        return epsilon(total, self.budget.delta)

    def told(self, round: int) -> dict[str, Any]:
        """What a line of metrics says after a round."""
        return {"epsilon": self.cost(self._made(self.run, round)), "delta": self.budget.delta}


def noise_of(job: Job, round: int, entry: int = 0) -> np.random.Generator:
    """The noise on a round's sum. On one machine it comes from the seed, and whoever knows that can take it off; a
    server that tells its clients the seed has a secret."""
    return job.drawn("noise", round, entry)


def noise_at(job: Job, client: int, round: int) -> np.random.Generator:
    """The noise of a client on its own upload, where all clients are of one process."""
    return generator(job.seed, "own noise", client, round)


def _digest(sums: Sequence[Sum | None], key: bytes) -> str:
    found = hashlib.blake2b(key=key, digest_size=16)
    for total in sums:
        found.update(repr(total and total.weights).encode())
        for row in total.rows if total else ():
            found.update(row.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
