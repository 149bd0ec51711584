"""Secure rounds at a client: its upload stays here, and leaves as a masked vector of integers only (`secagg`).

Keys and seeds of a sum are in the worker's memory alone: one that dies within a sum is a client that dropped out. Of
each round a client helps to open one sum: two sums that differ by one client would tell that client's upload. STATE/
<job>/opened.json has the last such round; it is on disk before the answer leaves. A job that has it is never answered
without masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qupel.flower import boundary
from qupel.flower.policy import refuse
from qupel.flower.secure import codec_of, integers, rules_of
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_json

if TYPE_CHECKING:
    from qupel.flower.secagg import Party
    from qupel.flower.task import ClientConfig, Task

OPENED = "opened.json"  # in a job's folder


class Masking:
    """This client's part in the secure rounds of one job."""

    def __init__(self, own: ClientConfig, task: Task, folder: Path) -> None:
        self.own, self.task, self.path = own, task, folder / OPENED
        self.party: Party | None = None  # of the newest sum
        self.session, self.round = "", -1

    def check(self, round: int) -> None:
        """Raises where this client has helped to open a sum of this round, or keeps no secrets from message to
        message."""
        if not self.own.resident:
            raise UserError(boundary.NOT_RESIDENT)
        if self.path.exists() and round <= int(read_json(self.path)["round"]):
            raise UserError(boundary.OPENED)

    def enter(self, round: int) -> None:
        """Before anything of a secure round is kept here."""
        self.check(round)
        if not self.path.exists():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self.path, {"round": -1})

    def begin(self, round: int, session: str, payload: bytes, rows: int) -> bytes:
        """New keys for a sum that this upload is to be part of."""
        from qupel.flower.peers import signer, verifier
        from qupel.flower.secagg import Party

        self.check(round)
        if not session.startswith(f"{self.task.job}/{round}/"):
            raise ValueError(f"{session!r:.60} names another job or round")
        assert self.task.secure is not None
        self.vector = integers(codec_of(self.task.secure), payload, rows)
        rules = rules_of(self.task, session, len(self.vector))
        sign, verify = signer(self.own.keys), verifier(self.own.keys)
        self.party = Party(rules, self.own.client, sign, verify, self.own.policy.least)
        self.session, self.round = session, round
        return self.party.advertise()

    def stage(self, kind: str, round: int, session: str, body: bytes) -> bytes:
        """share, mask or open; what does not belong to the newest sum is refused."""
        from qupel.flower.secagg import Refused, TooFew, pack, unpack

        if self.party is None or (session, round) != (self.session, self.round):
            raise UserError(boundary.NO_SUM)
        party, self.party = self.party, None  # where a stage fails, this sum goes on without this client
        try:
            given = unpack(body)
            if kind == "open":
                self.check(round)
                answer = pack(party.open(given))
                write_json(self.path, {"round": round})
                return answer
            answer = pack(party.share(given)) if kind == "share" else party.mask(self.vector, given)
        except Refused as e:
            raise refuse("least" if isinstance(e, TooFew) else "sum", str(e)) from None
        self.party = party
        return answer
