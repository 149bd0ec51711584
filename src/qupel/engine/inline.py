"""All clients in this process: the reference engine, for notebooks, small runs and tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from qupel.engine.job import Job
from qupel.engine.shard import Judged, Trained
from qupel.engine.stack import open_shard
from qupel.parts.base import Deployed, Rows


class Inline:
    """One shard with every client, on `threads` threads. Use as a context manager: it gives the thread count and the
    state of torch's generator back."""

    def __init__(self, job: Job, threads: int = 1, store: str = "memory", scratch: Path | None = None) -> None:
        self.shard = open_shard(job, range(len(job.parts)), store, scratch)
        self.threads = threads

    def __enter__(self) -> Inline:
        self.before = torch.get_num_threads()
        self.random = torch.get_rng_state()
        torch.set_num_threads(self.threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        torch.set_num_threads(self.before)
        torch.set_rng_state(self.random)

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        return self.shard.train(round, w, clients)

    def evaluate(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Judged]:
        return self.shard.evaluate(round, w, clients)

    def deployed(self, round: int, w: Rows, client: int) -> Deployed:
        return self.shard.deployed(client, round, w)

    def save(self, folder: Path) -> None:
        self.shard.save(folder, "shard-0")

    def load(self, folder: Path | None) -> None:
        self.shard.load(folder)
