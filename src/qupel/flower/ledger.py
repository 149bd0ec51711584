"""What a private client has given away: its own count, on its own disk, across jobs, attempts and servers.

STATE/_privacy.json   rounds T answered, sums of epsilon, delta and 1 / z^2, and the last round answered of each job

T answers with (epsilon, delta) each are (T epsilon, T delta) in all, also if every question depends on the answers
before it (basic composition: Dwork and Roth, 2014, appendix B): what the caps are for. And answers with noise of z_t
sensitivities are together one with noise of 1 / sqrt(sum 1 / z_t^2), which costs much less (`Spent.told`).

A round is paid for before its answer leaves, and once: asked for again, it gets the kept answer or none. No job can
have the file's name: those begin with a letter or digit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from qupel.engine.accounting import Release, epsilon
from qupel.flower.boundary import REFUSALS
from qupel.flower.task import Privacy
from qupel.flower.wire import noise_deviation
from qupel.run.config import Strict
from qupel.util.errors import UserError
from qupel.util.files import write_atomic

LEDGER = "_privacy.json"


class Refused(UserError):
    """Why a private client does not answer: one of a closed list, the same text whatever its data are."""

    def __init__(self, code: Literal["round-answered", "budget-spent", "ledger-damaged"]) -> None:
        super().__init__(f"{code}: {REFUSALS[code]}")
        self.code = code


class Spent(Strict):
    rounds: int = Field(0, ge=0)
    epsilon: float = Field(0.0, ge=0, allow_inf_nan=False)
    delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    squares: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="sum of 1 / z^2; none: not all are known"
    )
    jobs: dict[str, int] = Field({}, description="job -> its last round answered")

    def told(self) -> str:
        """For the client's owner: what all answers cost together, at the sum of their deltas."""
        added = f"{self.rounds} rounds answered with noise; added up epsilon {self.epsilon:.3g}, delta {self.delta:.3g}"
        if not self.squares:
            return added
        try:
            together = epsilon({Release(self.squares**-0.5): 1}, self.delta)
        except UserError:  # dp-accounting is not installed
            return added
        return f"{added}; together, at that delta, epsilon {together:.3g}"


def spent(state: Path) -> Spent:
    try:
        return Spent.model_validate_json((state / LEDGER).read_bytes())
    except FileNotFoundError:
        return Spent()
    except (ValidationError, OSError):
        raise Refused("ledger-damaged") from None


class Ledger:
    """One client's; nothing of it is kept in memory."""

    def __init__(self, state: Path, privacy: Privacy) -> None:
        self.path, self.privacy = state / LEDGER, privacy

    def spent(self) -> Spent:
        return spent(self.path.parent)

    def check(self, job: str, round: int) -> None:
        """Raises unless this round of a job was never answered and can be paid for."""
        spent = self.spent()
        if round <= spent.jobs.get(job, -1):
            raise Refused("round-answered")
        self._with(spent, job, round)

    def pay(self, job: str, round: int) -> None:
        """To be called before the answer of a round leaves; durable when it returns. A round is paid for once."""
        spent = self.spent()
        if round > spent.jobs.get(job, -1):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self.path, self._with(spent, job, round).model_dump_json(indent=1) + "\n")

    def _with(self, spent: Spent, job: str, round: int) -> Spent:
        own = self.privacy
        squares = 0.0 if spent.rounds == 0 else spent.squares
        after = Spent(
            squares=None if squares is None else squares + noise_deviation(own.epsilon, own.delta, 1.0) ** -2,
            rounds=spent.rounds + 1,
            epsilon=spent.epsilon + own.epsilon,
            delta=spent.delta + own.delta,
            jobs={**spent.jobs, job: round},
        )
        told, caps = (after.rounds, after.epsilon, after.delta), (own.max_rounds, own.max_epsilon, own.max_delta)
        if any(value > cap * (1 + 1e-9) for value, cap in zip(told, caps, strict=True)):  # sums of 0.1 are not exact
            raise Refused("budget-spent")
        return after
