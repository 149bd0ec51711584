"""What an auditor needs to replay a server's run (`replay`), with `--audit`:

RUN/audit.jsonl                 a chained log (`chain`): the job's hash at every start; of every round the hash of what
                                was sent, who answered what, the hash of the file below; at last the hash of w
RUN/audit/round-000004.bin      the uploads of round 4 as they came, one after the other; of a secure round their sum

A round that was done again, by a server that was killed or went back, has a second entry and file: the last one counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qupel.engine.shard import Trained
from qupel.flower import chain
from qupel.flower.audit import now
from qupel.parts.base import Rows, vector
from qupel.util.files import write_atomic

LOG, FOLDER = "audit.jsonl", "audit"


def hash_of(w: Rows) -> str:
    return hashlib.sha256(vector(w).numpy().tobytes()).hexdigest()


class RoundLog:
    """The server's log of one run."""

    def __init__(self, folder: Path, attempt: int, task: str) -> None:
        self.path, self.folder, self.attempt = folder / LOG, folder / FOLDER, attempt
        self.payloads: dict[int, bytes] = {}  # client -> its upload of this round as it came; of `SUM`: the sum
        self.folder.mkdir(exist_ok=True)
        told = {"attempt": attempt, "task": hashlib.sha256(task.encode()).hexdigest()}
        chain.append(self.path, {"time": now(), "begin": told})

    def keep(self, round: int, w: Rows, done: Iterable[Trained]) -> Iterator[Trained]:
        """What came in a round, on disk before any of it counts."""
        done = list(done)
        parts = {d.client: self.payloads.get(d.client, b"") for d in done if d.upload is not None}
        content = b"".join(parts.values())
        write_atomic(self.folder / f"round-{round:06d}.bin", content)
        told = [
            {"client": d.client, "fault": d.fault, "info": dict(d.info), "share": d.share, "wire": d.wire}
            | ({} if d.upload is None else _part(parts[d.client]))
            for d in done
        ]
        entry = {"time": now(), "round": round, "attempt": self.attempt, "w": hash_of(w), "clients": told}
        chain.append(self.path, {**entry, "file": hashlib.sha256(content).hexdigest()})
        self.payloads = {}
        return iter(done)

    def end(self, w: Rows) -> None:
        chain.append(self.path, {"time": now(), "end": hash_of(w)})


def _part(payload: bytes) -> dict[str, Any]:
    return {"bytes": len(payload), "hash": hashlib.sha256(payload).hexdigest()}
