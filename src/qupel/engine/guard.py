"""What the server believes: uploads not too far from w, a new w that did not explode; and who sits out after it did.

Uploads come one at a time and are not kept, so an upload is held against the rounds before it: |upload - w| may be
`bound` times the median over clients, of the last few rounds of the phase. In a phase's first round there is none: then
|w| stands for it, and when all norms are known the round's own median decides whether its mean is taken at all. All of
it is computed from uploads in client order, so every engine refuses the same; where nothing is refused no bit changes.

What is small enough for the bound can still ruin w in some rounds. Then the clients' losses explode, or none can be
computed, and the loop goes back to a good checkpoint and on without those who moved farthest, for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from qupel.engine.shard import Trained
from qupel.engine.sound import all_finite
from qupel.parts.base import vector

RECENT = 5  # rounds whose medians say what is usual
FLOOR = 1e-3  # of |w|: what is usual is never taken to be less
FIRST = 3  # rounds of the run whose losses say what is high; those of a phase's first round do, too
HIGH = 10.0  # times the highest of these: the loss has exploded
SUSPECT = 3.0  # times the median of its round: an upload that may have ruined w
NAMED = 20  # suspects that are remembered at most
REST = 10  # rounds that a suspect sits out; twice as many each time


@dataclass
class Known:
    """What the guard keeps from round to round; part of a checkpoint."""

    phase: int = -1
    medians: list[float] = field(default_factory=list)  # of |upload - w| in the last rounds of the phase
    losses: list[float] = field(default_factory=list)  # means of the first rounds of the run and of its phases
    far: list[dict[str, float]] = field(default_factory=lambda: [{}])  # suspects between checkpoints, the newest last
    back: dict[str, int] = field(default_factory=dict)  # client -> round (from 0) in which it takes part again
    rests: dict[str, int] = field(default_factory=dict)  # client -> how often it had to sit out
    returned: int | None = None  # rounds of the checkpoint last gone back to, until there is a newer one


class Guard:
    """bound: 0 for none. keep: checkpoints one can go back to."""

    def __init__(self, bound: float, clients: int, keep: int, known: dict[str, Any] | None = None) -> None:
        self.bound = bound if bound and clients > 1 else math.inf
        self.clients, self.keep = clients, keep
        self.known = Known(**known) if known else Known()

    def save(self, due: bool = True) -> dict[str, Any]:
        """Its memory, for the checkpoint that is being made; `due`: one that can be gone back to."""
        if due:
            self.known.returned = None
            self.known.far = [*self.known.far[-self.keep + 1 :], {}] if self.keep > 1 else [{}]
        return asdict(self.known)

    # --- one round ---

    def begin(self, round: int, phase: int, w: Tensor) -> None:
        self.new = phase != self.known.phase  # other samples, another quantizer: losses may begin anywhere
        if self.new:
            self.known.phase, self.known.medians = phase, []
        self.round, self.w = round, w
        self.size = float(torch.linalg.vector_norm(w)) if self.bound < math.inf else 0.0
        self.norms: dict[int, float] = {}  # of the uploads that are averaged
        self.refused: list[float] = []  # of those that are not
        self.usual = max(median(self.known.medians), FLOOR * self.size) if self.known.medians else None
        first = max(self.size, math.sqrt(len(w)))
        self.limit = self.bound * (first if self.usual is None else self.usual)

    def present(self, cohort: Sequence[int]) -> list[int]:
        """The clients of a cohort that do not sit out."""
        here = [i for i in cohort if self.known.back.get(str(i), 0) <= self.round]
        self.asked = len(here)
        return here

    def screen(self, done: Trained) -> Trained:
        """A client's round, without its upload where that is too far from w."""
        if done.upload is None or self.bound == math.inf:
            return done
        norm = float(torch.dist(vector(done.upload.rows), self.w))
        if norm <= self.limit:
            if done.upload.shares is None or bool(done.upload.shares.any()):  # no share: it moves nothing, usual or not
                self.norms[done.client] = norm
            return done
        self.refused.append(norm)
        if self.usual is None:
            why = f"more than the {self.limit:.3g} that a first round may be"
        else:
            why = f"over {self.bound:g} times the usual {self.usual:.3g}"
        return replace(done, upload=None, fault=f"round {self.round + 1}: upload is {norm:.3g} from w, {why}")

    def too_far(self, new: Tensor, name: Callable[[int], str]) -> str | None:
        """Why the mean of a round is not taken as the new w, None if it is; learns what is usual."""
        if not all_finite(new):
            return "it holds values that are not finite"
        if self.bound == math.inf or not (norms := sorted([*self.norms.values(), *self.refused])):
            return None
        middle = median(norms)
        self.known.medians = [*self.known.medians, middle][-RECENT:] if math.isfinite(middle) else self.known.medians
        usual = max(middle, FLOOR * self.size)
        worst = max(self.norms, key=lambda i: self.norms[i], default=None)
        if self.usual is None and worst is not None and self.norms[worst] > self.bound * usual:
            return f"{name(worst)} is {self.norms[worst]:.3g} from w, over {self.bound:g} times the median {middle:.3g}"
        moved = float(torch.dist(new, self.w))
        if not moved <= self.bound * max(usual, self.usual or 0.0):
            return f"it is {moved:.3g} from the old one, over {self.bound:g} times the median {middle:.3g}"
        far = self.known.far[-1]
        for client, norm in self.norms.items():
            if norm >= SUSPECT * middle > 0:
                far[str(client)] = max(far.get(str(client), 0.0), norm / middle)
        self.known.far[-1] = dict(sorted(far.items(), key=lambda item: -item[1])[:NAMED])
        return None

    @property
    def outdated(self) -> bool:
        """Most uploads of the round are far: then it is the usual that has changed."""
        return len(self.refused) > len(self.norms)

    # --- over rounds ---

    def exploded(self, told: Mapping[str, float]) -> str | None:
        """Why w looks ruined, None if it does not. A client whose loss is not finite is refused before; of clients that
        tell none, as private ones do, nothing can be said."""
        loss = told.get("loss", told.get("loss_quantized", math.nan))
        if self.bound == math.inf or not self.asked:
            return None
        if (self.new or len(self.known.losses) < FIRST) and math.isfinite(loss):
            self.known.losses.append(loss)
        high = max(self.known.losses, default=math.inf)
        if loss > HIGH * high:
            return f"the clients' mean loss is {loss:.3g}, over {HIGH:g} times the {high:.3g} of the first rounds"
        return None

    def suspects(self) -> list[int]:
        """Who moved farthest, as a multiple of the others, since the oldest checkpoint; fewer than half of all."""
        far: dict[str, float] = {}
        for part in self.known.far:
            far |= {client: max(ratio, far.get(client, 0.0)) for client, ratio in part.items()}
        most = max(far.values(), default=0.0)
        named = sorted((c for c, ratio in far.items() if ratio >= most / SUSPECT), key=lambda c: (-far[c], int(c)))
        return sorted(int(c) for c in named[: max(1, (self.clients - 1) // 2)])

    def send_to_rest(self, suspects: Sequence[int]) -> int:
        """Let them sit out; the first round (from 0) in which all of them take part again."""
        for client in map(str, suspects):
            times = self.known.rests[client] = self.known.rests.get(client, 0) + 1
            self.known.back[client] = self.round + 1 + REST * 2 ** (times - 1)
        self.known.far, self.known.medians = [{}], []
        return max(self.known.back[str(c)] for c in suspects)
