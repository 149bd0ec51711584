"""A run is a list of phases: a method with its server for a number of rounds. The next phase's `start` converts the
clients' states: FedAvg -> QuPeL -> fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qupel.parts.methods import Method, methods
from qupel.parts.servers import Server, servers
from qupel.parts.servers.mean import Mean
from qupel.util.errors import UserError


@dataclass(frozen=True)
class Phase:
    """prior: pseudo-counts of the client's own label prior (`parts.prior`), by which it sees shared models in this
    phase; 0: as they are. held: the share of a client's samples that its steps do not see in this phase, so that the
    method can choose by them at its end (`data.batches.held_back`)."""

    method: Method
    rounds: int
    server: Server = Mean()
    prior: float = 0.0
    held: float = 0.0

    def table(self) -> dict[str, Any]:
        """As a config has it, and `from_table` reads it: {rounds, method = "qupel", its settings, server}."""
        described = methods.describe(self.method)
        server = {} if self.server == Mean() else {"server": servers.describe(self.server)}
        prior = {"prior": self.prior} if self.prior else {}
        held = {"held": self.held} if self.held else {}
        return {"rounds": self.rounds, "method": described.pop("name"), **described, **server, **prior, **held}


def phase_from(table: Any, where: str) -> Phase:
    """A phase from its table in a config; a number stands for a constant schedule."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: a table is needed, not {table!r}")
    rest = dict(table)
    rounds, name, server = rest.pop("rounds", None), rest.pop("method", None), rest.pop("server", "mean")
    if type(rounds) is not int or rounds < 0:
        raise UserError(f"{where}.rounds: a whole number from 0 on is needed, not {rounds!r}")
    prior = rest.pop("prior", 0.0)
    if isinstance(prior, bool) or not isinstance(prior, int | float) or not 0 <= prior < math.inf:
        raise UserError(f"{where}.prior: a number from 0 on is needed, not {prior!r}")
    held = rest.pop("held", 0.0)
    if isinstance(held, bool) or not isinstance(held, int | float) or not 0 <= held < 1:
        raise UserError(f"{where}.held: a share from 0 on and below 1 is needed, not {held!r}")
    method = methods.build({**rest, "name": name} if name is not None else rest, where)
    return Phase(method, rounds, servers.build(server, f"{where}.server"), float(prior), float(held))
