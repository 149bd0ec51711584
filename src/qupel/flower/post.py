"""Between the server and its clients: who carries what, and what of it is believed.

No field of an answer is believed: `hear` is the one door, and whatever it finds leaves out one client, named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qupel.engine.rounds import Failed
from qupel.flower import boundary
from qupel.flower.boundary import Answer, printable
from qupel.flower.frames import Header

Bodies = bytes | Mapping[int, bytes]  # the same for all, or client -> its own


@dataclass(frozen=True)
class Reply:
    """What came back from a client: anything. `header` has an "error" where there was one."""

    client: int
    header: Header
    body: bytes = b""


class Post(Protocol):
    """Carries questions to clients and their answers back."""

    def present(self) -> list[int]:
        """The clients that are connected, by number."""

    def ask(self, header: Header, body: Bodies, clients: Sequence[int], seconds: float) -> Iterator[Reply]:
        """Ask these clients; answers as they come, until all have answered or time is over."""


def body_for(client: int, body: Bodies) -> bytes:
    return body if isinstance(body, bytes) else body[client]


def hear(kind: str, reply: Reply, round: int | None = None, job: str | None = None) -> Answer | str:
    """What a client says, every field within its bounds, about the round and job asked for; or why it does not count.
    Whatever a client sends, this raises nothing."""
    try:
        if "error" in reply.header:
            return printable(reply.header["error"]) or "an error"
        heard = boundary.heard(kind, reply.header)
        number, at, of = (getattr(heard, name, None) for name in ("client", "round", "job"))
        if number != reply.client:
            return f"says it is client {number}"
        if round is not None and at != round:
            return f"answered round {int(at or 0) + 1} when asked for round {round + 1}"
        if job is not None and of != job:
            return f"answered job {of!r:.40}"
        return heard
    except Exception as e:
        return f"an answer that cannot be read: {printable(e, 200)}"


def wait_for(post: Post, clients: Sequence[int], least: int, patience: float) -> list[int]:
    """Those of the clients that are connected, as soon as at least so many are."""
    limit = time.monotonic() + patience
    while True:
        here = set(post.present())
        found = [client for client in clients if client in here]
        if len(found) >= least:
            return found
        if time.monotonic() > limit:
            raise Failed(f"{len(found)} of {len(clients)} clients are connected, {least} are needed")
        time.sleep(0.5)
