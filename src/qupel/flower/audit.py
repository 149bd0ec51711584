"""What left a client, as the client itself has written it down: STATE/_audit.jsonl, a chained log (`chain`).

Every question but pings (whose answer is empty) with its job and round, every refusal with its reason, and of every
answer the bytes and their hash, before it leaves. A client that cannot write its log answers nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qupel.flower import chain
from qupel.flower.frames import Header

LOG = "_audit.jsonl"  # no job can have this name


def answered(state: Path, asked: Header, got: bytes, header: Header, body: bytes, why: str = "") -> None:
    """Note a question and its answer; durable when it returns. why: what is not told to the server."""
    task = asked.get("task")
    job = task.get("job") if isinstance(task, dict) else None
    entry: dict[str, Any] = {"time": now(), "asked": _short(asked.get("kind")), "job": _short(job)}
    entry |= {"round": asked.get("round") if type(asked.get("round")) is int else None}
    entry |= {"received": len(got), "received_hash": hashlib.sha256(got).hexdigest()}
    told = json.dumps(header).encode()
    entry |= {"left": len(told) + len(body), "left_hash": hashlib.sha256(told + body).hexdigest()}
    if body:
        entry["body_hash"] = hashlib.sha256(body).hexdigest()  # of the upload as a server's log has it
    if "error" in header:
        entry["refused"] = str(header["error"])
        entry["why"] = why[:1000]
    chain.append(state / LOG, entry)


def refused_code(state: Path, run: int, fab_hash: str) -> None:
    """A server sent another bundle than the one that this client runs."""
    entry = {"time": now(), "asked": "code", "job": None, "round": None, "received": 0, "left": 0}
    chain.append(
        state / LOG, {**entry, "refused": "another app than the pinned one", "why": f"run {run}: {fab_hash[:64]}"}
    )


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _short(value: object) -> str | None:
    return None if value is None else str(value)[:100]


@dataclass
class Account:
    """Of one job: what left, and what was refused."""

    rounds: set[int] = field(default_factory=set)  # that it answered with an upload, or its part of a sum
    answers: int = 0
    left: int = 0  # bytes
    refused: dict[str, int] = field(default_factory=dict)  # reason -> how often
    first: str = ""
    last: str = ""


def accounts(lines: Iterable[chain.Line]) -> dict[str, Account]:
    """job -> what left."""
    found: dict[str, Account] = {}
    for entry in (line.entry for line in lines):
        account = found.setdefault(entry.get("job") or "", Account(first=entry["time"]))
        account.last = entry["time"]
        account.left += entry["left"]
        if "refused" in entry:
            account.refused[entry["refused"]] = account.refused.get(entry["refused"], 0) + 1
            continue
        account.answers += 1
        if "body_hash" in entry and entry["round"] is not None:
            account.rounds.add(entry["round"])
    return found
