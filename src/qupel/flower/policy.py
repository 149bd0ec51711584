"""What a client does at all: its own policy, in client.toml, whatever a server asks for.

A job outside of it is refused before anything is trained; the server is told which key of the policy it was, in a
sentence of `boundary`, and the client's own log (`audit`) has the rest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pydantic import Field

from qupel.flower.boundary import POLICY
from qupel.parts.methods.base import methods
from qupel.run.config import Strict
from qupel.util.errors import UserError

if TYPE_CHECKING:
    from qupel.flower.task import Privacy, Task, Wanted


class Policy(Strict):
    """Which jobs a client takes part in. What is not given is not limited, but a secure sum has at least 3 clients."""

    methods: tuple[str, ...] | None = Field(None, description='that a job may have, by name, e.g. ["qupel", "fedavg"]')
    networks: tuple[str, ...] | None = Field(None, description="that a job may train: names, or hashes of layouts")
    rounds: int | None = Field(None, ge=1, description="most rounds of a job")
    secure: bool = Field(False, description="only jobs with secure aggregation")
    least: int = Field(3, ge=3, description="fewest clients in a sum, itself included, of those it is masked with")
    epsilon: float | None = Field(None, gt=0, description="most that a round may cost: [privacy] at least so strong")

    def check_network(self, wanted: Wanted, layout: str | None) -> None:
        """Raises unless a network may be trained here, by its name or by its layout."""
        if self.networks is not None and not {wanted.model, layout} & set(self.networks):
            raise refuse("networks", f"network {wanted.model!r}, layout {layout}")

    def check(self, task: Task, privacy: Privacy | None) -> None:
        """Raises unless a job may run here."""
        self.check_network(task, task.layout)
        named = sorted({methods.name_of(phase.method) for phase in task.phases})
        if self.methods is not None and (other := set(named) - set(self.methods)):
            raise refuse("methods", ", ".join(sorted(other)))
        total = sum(phase.rounds for phase in task.phases)
        if self.rounds is not None and total > self.rounds:
            raise refuse("rounds", f"{total} rounds")
        if self.secure and task.secure is None:
            raise refuse("secure", "a job without secure aggregation")
        if task.secure is not None and task.clients < self.least:
            raise refuse("least", f"a sum of {task.clients} clients; at least {self.least} are needed")
        if self.epsilon is not None and (privacy is None or privacy.epsilon > self.epsilon):
            has = "none" if privacy is None else f"epsilon {privacy.epsilon:g} a round"
            raise refuse("epsilon", f"[privacy] is {has}")


class Outside(UserError):
    """A job, or a sum, that a client's policy does not allow; `details` are for its own log."""

    def __init__(self, key: str, details: str) -> None:
        super().__init__(POLICY[key])
        self.details = details


def refuse(key: str, details: str) -> Outside:
    print(f"{POLICY[key]}: {details}", file=sys.stderr, flush=True)  # for this client's own eyes
    return Outside(key, details)
