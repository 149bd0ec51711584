"""Clients that are ill: one whose answers fail three times in a row is named, and left alone for some rounds, twice as
many each time. It is asked again sooner where too few others are left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qupel.engine.job import Job
from qupel.engine.shard import Trained

MOST = 3  # failures in a row
REST = 5  # rounds, the first time
ABSENT = "not connected"  # who is not asked cannot fail
LONELY = "too few of its neighbours are left"  # in a secure sum: the others' failure


class Health:
    """What is known of the clients, by number; part of a checkpoint."""

    def __init__(self, job: Job, ill: Mapping[int, int] | None = None, back: Mapping[int, int] | None = None) -> None:
        self.job = job
        self.ill = dict(ill or {})  # failures since the last sound answer
        self.back = dict(back or {})  # the round (from 0) in which it is asked again

    @classmethod
    def of(cls, known: Mapping[str, Any], job: Job) -> Health:
        ill, back = ({int(k): v for k, v in known.get(name, {}).items()} for name in ("ill", "back"))
        return cls(job, ill, back)

    def save(self) -> dict[str, Any]:
        return {"ill": self.ill, "back": self.back}

    def awake(self, round: int, clients: Sequence[int], least: int) -> list[int]:
        """Those that are asked in a round; all, where fewer than needed are well."""
        well = [client for client in clients if self.back.get(client, 0) <= round]
        return well if len(well) >= min(least, len(clients)) else list(clients)

    def seen(self, round: int, done: Iterable[Trained]) -> Iterator[Trained]:
        """The same, where a client becomes ill with a word about it."""
        done = list(done)  # of a secure sum a client may have two: it is in the sum, and failed when that was opened
        failed = {d.client for d in done if d.fault is not None}
        for d in done:
            if d.client not in failed:
                self.ill.pop(d.client, None)
            elif d.fault not in (None, ABSENT, LONELY) and d.client >= 0:
                times = self.ill[d.client] = self.ill.get(d.client, 0) + 1
                if times >= MOST:
                    self.back[d.client] = round + 1 + REST * 2 ** min(times - MOST, 10)
                    left = f"{d.fault}; {times} times in a row: left alone until round {self.back[d.client] + 1}"
                    d = replace(d, fault=left)
            yield d
