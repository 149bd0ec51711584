"""Secure rounds at the server: in place of uploads the loop gets one, their mean (`secure`), of all that masked.

train (the answer: keys) -> share -> mask -> open, of `secagg`, each within the deadline; who misses one is left out of
the later ones. A round that is given up is tried again, with new keys; after three times it is lost: w stays as it is,
and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from qupel.engine.rounds import Failed
from qupel.engine.shard import SUM, Trained
from qupel.engine.sound import screen
from qupel.flower import boundary
from qupel.flower.boundary import printable
from qupel.flower.health import ABSENT, LONELY
from qupel.flower.post import Bodies, hear, wait_for
from qupel.flower.secure import codec_of, mean_of, rules_of
from qupel.parts.base import Rows, vector
from qupel.parts.codecs.fixed import Integers
from qupel.run.sections import SecureConfig

if TYPE_CHECKING:
    from qupel.flower.server import Fleet

TRIES = 3  # of a round
MOST_LOST = 5  # rounds in a row
Done = dict[int, Trained]


class Summing:
    """The secure rounds of one run."""

    def __init__(self, fleet: Fleet, secure: SecureConfig) -> None:
        self.fleet, self.secure, self.codec = fleet, secure, codec_of(secure)
        self.lost = 0  # rounds in a row

    def train(self, round: int, w: Rows, clients: Sequence[int]) -> Iterator[Trained]:
        from qupel.flower.secagg import LEAST, GivenUp

        fleet, why = self.fleet, ""
        least = max(LEAST, min(fleet.terms.minimum, len(clients)))
        for attempt in range(TRIES):
            asked = wait_for(fleet.post, clients, least, fleet.terms.patience)
            done = {client: Trained(client, None, fault=ABSENT) for client in clients}
            session = f"{fleet.task.job}/{round}/{fleet.attempt}.{attempt}"
            one = OneSum(fleet, round, session, done, least, self.secure.neighbours)
            try:
                total = one.run(w, asked)
                upload = mean_of(self.codec, total, len(one.sums.masked), w)
                if fault := screen(upload, w):
                    raise GivenUp(fault)
            except GivenUp as e:
                why = str(e)
                continue
            self.lost = 0
            if fleet.log:
                fleet.log.payloads[SUM] = total.astype("<i8").tobytes()
            summed = Trained(SUM, upload, wire=max(one.sent.values()), share=float(len(one.sums.masked)))
            return iter([*one.closed, *done.values(), summed])
        self.lost += 1
        if self.lost > MOST_LOST:
            raise Failed(f"round {round + 1}: {self.lost} rounds in a row were given up ({why})")
        given_up = Trained(SUM, None, fault=f"round {round + 1} is given up, w stays: {why}")
        return iter(
            [*one.closed, *done.values(), given_up, Trained(SUM, None)]
        )  # the last: the run goes on, whoever was refused


class OneSum:
    """One attempt at a round. done: what becomes of each client; sent: bytes that it sent; closed: who is in the sum
    and did not help to open it."""

    def __init__(self, fleet: Fleet, round: int, session: str, done: Done, least: int, neighbours: int) -> None:
        from qupel.flower.secagg import Sums

        self.fleet, self.round, self.session, self.done, self.sent = fleet, round, session, done, dict[int, int]()
        self.closed: list[Trained] = []
        count = fleet.job.rows_of(fleet.job.locate(round)[0])
        numbers = count * (fleet.size + 1)
        self.sums = Sums(rules_of(fleet.task, session, numbers), least, neighbours)

    def run(self, w: Rows, asked: Sequence[int]) -> Integers:
        """The sum; raises `GivenUp`."""
        from qupel.flower.peers import verifier
        from qupel.flower.secagg import is_signed, is_usable, pack, unpack

        verify = verifier(self.fleet.peers) if self.fleet.peers else None
        adverts = {}
        for client, body, heard in self._stage("train", vector(w).numpy().tobytes(), asked):
            if not isinstance(heard, boundary.PrivateUpdate):
                continue
            if verify and not is_signed(client, body, self.sums.rules, verify):  # the others would refuse, unnamed
                self._fault(client, "its keys are not signed with its key of the federation")
                continue
            if not is_usable(body):  # the others could not answer
                self._fault(client, "its keys cannot be used")
                continue
            self.done[client] = Trained(client, None, self.fleet.told(heard))
            adverts[client] = body
        told = self.sums.introduce(adverts)
        sealed = {}
        for client, body, _ in self._stage("share", packed(told), sorted(told)):
            try:
                sealed[client] = unpack(body)
            except ValueError as e:
                self._fault(client, printable(e))
        boxes = self.sums.relay(sealed)
        for client in sealed.keys() - boxes.keys():
            self._fault(client, LONELY)
        for client, body, _ in self._stage("mask", packed(boxes), sorted(boxes)):
            try:
                self.sums.add(client, body)
            except ValueError as e:
                self._fault(client, printable(e))
        questions = {i: pack(dict.fromkeys(members, b"")) for i, members in self.sums.ask().items()}
        here = {i: self.done[i] for i in questions}
        opened = {}
        for client, body, _ in self._stage("open", questions, sorted(questions)):
            try:
                opened[client] = unpack(body)
            except ValueError as e:
                self._fault(client, printable(e))
        self.closed = [self.done[i] for i in questions if self.done[i].fault]
        self.done.update(here)  # who has masked is in the sum, whatever became of it since
        return self.sums.finish(opened)

    def _stage(self, kind: str, bodies: Bodies, clients: Sequence[int]) -> Iterator[tuple[int, bytes, boundary.Answer]]:
        """Sound answers; who gives none is named."""
        waiting = set(clients)
        for reply in self.fleet.ask(kind, self.round, bodies, clients, session=self.session):
            waiting.discard(reply.client)
            heard = hear(kind, reply, round=self.round, job=self.fleet.task.job)
            if isinstance(heard, str):
                self._fault(reply.client, heard)
                continue
            self.sent[reply.client] = self.sent.get(reply.client, 0) + len(reply.body)
            yield reply.client, reply.body, heard
        for client in waiting:
            self._fault(client, f"no answer before the deadline ({kind})")

    def _fault(self, client: int, why: str) -> None:
        self.done[client] = Trained(client, None, fault=why)


def packed(tables: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
    from qupel.flower.secagg import pack

    return {client: pack(table) for client, table in tables.items()}
