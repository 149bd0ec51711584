"""What the theorems speak of, measured in a run: the objective F, the gradients G, whether a step decreases F, the
clients' spread. It reads states and changes none: a run with diagnostics ends with the same bits. docs/theory.md
explains every number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qupel.core.codebook import Codebook
from qupel.core.layout import Slot
from qupel.core.optim import SGD
from qupel.core.prox import distance
from qupel.core.schedule import Clock, Schedule, half_gap, travelled
from qupel.paper.theory import Steps, outside, theorem1_sharp, theorem2_sharp
from qupel.parts.base import Info, State
from qupel.parts.methods import Method
from qupel.parts.methods.base import tie as pull_of
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Batch, Diverged, Evaluated, Loss, Pass, Problem, Task, Value
from qupel.tasks.trees import Tree, length

TOLERANCE = 1e-6  # of |F|, below which an increase is rounding: losses are computed in float32
_REMEMBERED = 4
SKETCH = 512

# --- F and G ---


class ClientLoss:
    """A task: f over fixed batches plus (mu/2) |x|^2, its gradient, whatever batch a method hands it, and its value.

    The last few points are remembered: a step, the next one and what is measured between them ask for the same.
    seed: dropout draws the same mask at every call.
    """

    def __init__(self, task: Task, batches: Sequence[Batch], mu: float = 0.0, seed: int | None = None) -> None:
        self.task, self.batches, self.mu, self.seed = task, batches, mu, seed
        self.layout = task.layout
        self.samples = sum(length(batch[1]) for batch in batches)
        self.known: list[tuple[Tensor, Tensor, float]] = []  # x, gradient, value

    def gradient(
        self,
        x: Tensor,
        batch: Batch,
        slots: Sequence[Slot] | None = None,
        *,
        loss: Loss | None = None,
        given: Sequence[Tensor] = (),
    ) -> Evaluated:
        gradient, value = self._at(x)
        return Evaluated(gradient.clone(), value, x[:0])  # methods write into it

    @property
    def loss(self) -> Loss:
        return self.task.loss

    def forward(self, x: Tensor, inputs: Tree) -> Pass:
        return self.task.forward(x, inputs)

    def outputs(self, x: Tensor, inputs: Tree) -> Tree:
        return self.task.outputs(x, inputs)

    def loss_of(self, outputs: Tree, batch: Batch) -> Value:
        return self.task.loss_of(outputs, batch)

    def at(self, x: Tensor) -> Tensor:
        """The gradient at x (d,)."""
        return self._at(x)[0].clone()

    def value(self, x: Tensor, batch: Batch | None = None) -> float:
        return self._at(x)[1]

    def _at(self, x: Tensor) -> tuple[Tensor, float]:
        for point, gradient, value in self.known:
            if torch.equal(point, x):
                return gradient, value
        if self.seed is not None:
            torch.manual_seed(self.seed)
        gradient, value = self.mu * x, self.mu / 2 * float(x @ x)
        for batch in self.batches:
            share = length(batch[1]) / self.samples
            found = self.task.gradient(x, batch)
            gradient.add_(found.gradient, alpha=share)
            value += share * float(found.loss)
        self.known = [(x.clone(), gradient, value), *self.known[: _REMEMBERED - 1]]
        return gradient, value


def objective(
    q: Prox, x: Tensor, codebook: Codebook, f: ClientLoss, lam: Sequence[float], tie: float, w: Tensor
) -> float:
    """F(x, c, w) = f(x) + f(Q~_c(x)) + sum of lambda R over layers + (lambda_p/2) |x - w|^2, tie = lambda_p."""
    value = f.value(x) + tie / 2 * float((x - w).square().sum())
    if codebook:
        value += f.value(q.quantized(x, codebook))
    return value + sum(v * float(distance(x[slot.slice], c)) for v, (slot, c) in zip(lam, codebook, strict=True))


@dataclass(frozen=True)
class Gradients:
    """|grad_x F(x+, c, w)|^2, |grad_c F(x+, c+, w)|^2, |grad_w F(x+, c+, w)|^2 of a step from (x, c) to (x+, c+);
    and how fast the gradients of its smooth part changed: |change in x| / |x+ - x|, which L_x bounds, and so in c."""

    x: float
    c: float
    w: float
    slope_x: float
    slope_c: float

    @property
    def total(self) -> float:
        return self.x + self.c + self.w


def gradients(method: Studied, s: State, after: State, w: Tensor, f: ClientLoss, clock: Clock) -> Gradients:
    """G^t of the theorems for a plain step s -> after, w the mean of all w_i. R enters with the subgradients that the
    optimality conditions of the two proximal steps single out (of the centers: with the weights assigned as before):

        G_x = (x - x+)/eta1 + grad f~(x+) - grad f~(x) + lambda_p (x+ - x) + lambda_p (w_i - w),  f~ = f + f(Q~_c)
        G_c = (c - c+)/eta2 + grad_c f(Q~_c+(x+)) - grad_c f(Q~_c(x+))
        G_w = lambda_p (w - x+)
    """
    q, tie = prox_of(method), lambda_p(method, clock)
    eta1, eta2 = method.eta1(clock.time), q.eta2(clock.time)
    old, new = (q.gradient(x, s.codebook, f, NO_BATCH, clock).gradient for x in (s.x, after.x))
    step_x = after.x - s.x  # (d,)
    G_x = new - old - step_x / eta1 + tie * (step_x + s.w - w)
    G_w = tie * (w - after.x)
    slope_x = float((new - old).norm()) / max(float(step_x.norm()), TINY)
    if not s.codebook or eta2 == 0:
        return Gradients(_square(G_x), 0.0, _square(G_w), slope_x, 0.0)
    codes = s.codebook.assign(after.x)
    old, new = (
        torch.cat([*q.center_gradients(after.x, book, book.nearest(after.x, codes), f, NO_BATCH, clock, Info())[0]])
        for book in (s.codebook, after.codebook)
    )
    step_c = torch.cat(after.codebook.centers) - torch.cat(s.codebook.centers)  # all centers in a row
    slope_c = float((new - old).norm()) / max(float(step_c.norm()), TINY)
    return Gradients(_square(G_x), _square(new - old - step_c / eta2), _square(G_w), slope_x, slope_c)


def _square(v: Tensor) -> float:
    return float(v @ v)


NO_BATCH = Batch(torch.empty(0), torch.empty(0))  # a ClientLoss has its own
TINY = 1e-7  # a step so short that the change of a gradient along it is rounding


def lambda_p(method: Method, clock: Clock) -> float:
    return pull_of(method, clock.time)


Studied = Local | QuPeL  # with the quantizer `prox`, or none: what the theorems speak of


def studied(method: Method) -> TypeGuard[Studied]:
    """Whether a method is Algorithm 1 or 2."""
    return isinstance(method, Studied) and isinstance(method.quantizer, Prox | NoQuantizer)


def prox_of(method: Studied) -> Prox:
    """At full precision it has nothing to do."""
    return method.quantizer if isinstance(method.quantizer, Prox) else Prox()


# --- one client ---


Seen = dict[str, float | list[float]]  # what one client tells: numbers, and `sketch` for the spread of all of them


@dataclass(frozen=True)
class Diagnostics:
    """`engine.job.Diagnostics`: looks at clients one after the other, w being the server's newest model."""

    mode: str

    def look(
        self,
        method: Method,
        state: State,
        w: Tensor,
        clock: Clock,
        task: Task,
        batches: Sequence[Batch],
        made: np.ndarray | None = None,
    ) -> Seen:
        w = w.double()
        told: Seen = {**nearness(method, state, clock, made)}
        if len(state.x) == len(w):
            told["sketch"] = sketch(state.x.double() - w)
        if studied(method) and method.eta1(clock.time) > 0:
            with suppress(Diverged):  # where the loss is not finite there is nothing to tell
                told |= probe(method, state, w, ClientLoss(task, batches, seed=0), clock)
        return told

    def apart(self, upload: Tensor, w: Tensor) -> float:
        return apart(upload, w)

    def summary(
        self,
        method: Method,
        clock: Clock,
        tau: int,
        seen: Sequence[Mapping[str, Any]],
        moved: tuple[Sequence[tuple[float, float]], Tensor, Tensor],
        before: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        shares, w, new = moved
        return summary(method, clock, self.mode, tau, seen, drift(shares, w, new) if shares else None, before)


def sketch(v: Tensor) -> list[float]:
    """A linear map to at most 512 numbers that keeps |v|^2: v (d,) itself if it is so short, else its coordinates added
    up with random signs in random places (count sketch). Then E |sketch|^2 = |v|^2, with a standard deviation of
    sqrt(2/512) = 6 % that falls with the number of clients; the spread of clients needs no more of them."""
    if len(v) <= SKETCH:
        return v.tolist()
    rng = np.random.default_rng(len(v))
    place = torch.from_numpy(rng.integers(0, SKETCH, len(v)))
    sign = torch.from_numpy(rng.choice([-1.0, 1.0], len(v)))
    return torch.zeros(SKETCH, dtype=v.dtype).index_add_(0, place, sign * v.cpu()).tolist()


def from_mean(models: np.ndarray) -> np.ndarray:
    """|x_i - mean x|^2 of every client: (n, d) -> (n,)."""
    return ((models - models.mean(0)) ** 2).sum(1)


def spread(sketches: Sequence[list[float]]) -> float:
    """mean |x_i - mean x|^2."""
    return float(from_mean(np.array(sketches)).mean())


def nearness(method: Method, state: State, clock: Clock, made: np.ndarray | None = None) -> dict[str, float]:
    """distance: mean |x_k - Q_c(x)_k|; travel: the prox travel so far; both in half-gaps of the layer, over quantized
    weights."""
    layers = [(slot, c, float(half_gap(c))) for slot, c in state.codebook]
    weights = sum(slot.size for slot, _, gap in layers if gap > 0)
    if not weights:
        return {}
    apart = sum(2 * float(distance(state.x[slot.slice], c)) / gap for slot, c, gap in layers if gap > 0)
    told = {"distance": apart / weights}
    if studied(method):
        lam, eta1 = prox_of(method).lam, method.eta1
        travel = [travelled(lam, eta1, clock, c, made) * s.size for s, c, gap in layers if gap > 0]
        told["travel"] = sum(travel) / weights
    return told


def probe(method: Studied, state: State, w: Tensor, f: ClientLoss, clock: Clock) -> dict[str, float]:
    """Make the plain step that the theorems speak of from here, in float64, and forget it: F before it, G of it, and by
    how much it misses F(x+, c+) + |x+ - x|^2/(4 eta1) + |c+ - c|^2/(4 eta2) <= F(x, c)."""
    plain, q = replace(method, optimizer=SGD()), prox_of(method)
    centers = state.codebook.to(torch.float64)
    s = State(state.x.double(), state.w.double(), centers)
    after, _ = plain.step(s, Problem(f, f), NO_BATCH, clock)
    G = gradients(plain, s, after, w, f, clock)
    lam, tie = [float(q.strength(c, method.eta1, clock)) for c in s.codebook.centers], lambda_p(method, clock)
    F, F_after = (objective(q, a.x, a.codebook, f, lam, tie, w) for a in (s, after))
    missing = F_after + decrease(method, s, after, clock) - F
    return {
        "G_x": G.x,
        "G_c": G.c,
        "G_w": G.w,
        "objective": F,
        "excess": max(missing, 0.0) if missing > TOLERANCE * abs(F) else 0.0,
    }


def decrease(method: Studied, s: State, after: State, clock: Clock) -> float:
    """What a step must take off F at least: |x+ - x|^2/(4 eta1) + |c+ - c|^2/(4 eta2)."""
    eta1, eta2 = method.eta1(clock.time), prox_of(method).eta2(clock.time)
    moved = float((after.x - s.x).square().sum()) / (4 * eta1)
    if eta2 > 0:
        pairs = zip(s.codebook.centers, after.codebook.centers, strict=True)
        moved += sum(float((b - a).square().sum()) for a, b in pairs) / (4 * eta2)
    return moved


# --- all clients ---


def apart(u: Tensor, w: Tensor) -> float:
    return float((u.double() - w).square().sum())


def drift(moved: Sequence[tuple[float, float]], w: Tensor, new: Tensor) -> float:
    """Root mean square of |w_i - mean w_i| where the clients' copies of w meet again: of (share, |w_i - w|^2) for each
    of them, w before and after."""
    total = sum(share for share, _ in moved)
    return math.sqrt(max(sum(share * square for share, square in moved) / total - apart(new, w), 0.0))


def summary(
    method: Method,
    clock: Clock,
    mode: str,
    tau: int,
    seen: Sequence[Mapping[str, Any]],
    drift: float | None,
    before: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What a line of metrics tells under `diagnostics`. `before`: the same of the phase's earlier lines."""
    told: dict[str, Any] = {"mode": mode, "step": clock.step + 1}

    def values(name: str) -> list[float]:
        return [v for s in seen if isinstance(v := s.get(name), float)]

    def mean(name: str) -> float | None:
        return sum(values(name)) / len(values(name)) if values(name) else None

    squares = {name: v for name in ("G_x", "G_c", "G_w") if (v := mean(name)) is not None}
    told |= {name: math.sqrt(v) for name, v in squares.items()}
    if squares:
        told["G2"] = sum(squares.values())
        told["G2_average"] = (told["G2"] + sum(b["G2"] for b in before if "G2" in b)) / (
            1 + sum("G2" in b for b in before)
        )
        missed = values("excess")
        told |= {"objective": mean("objective"), "violations": sum(e > 0 for e in missed) / len(missed)}
        told["excess"] = max(missed)
    told |= {name: v for name in ("distance", "travel") if (v := mean(name)) is not None}
    if drift is not None:
        told["drift"] = drift
    if sketches := [row for s in seen if isinstance(row := s.get("sketch"), list)]:
        found = spread(sketches)
        told |= {"spread": math.sqrt(found), "kappa": lambda_p(method, clock) ** 2 * found}
    if (known := bound(method, clock, tau, told, before)) is not None:
        told["G2_bound"] = known
    return {k: v if isinstance(v, str | int) else float(f"{v:.9g}") for k, v in told.items() if v is not None}


def bound(
    method: Method, clock: Clock, tau: int, now: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
) -> float | None:
    """The theorems' bound on the average of G2 since the phase's first line, if the run is one that they speak of and
    its steps are as small as they ask: L_x and L_c are read off eta1 and eta2. None where they say nothing."""
    if now["mode"] != "full" or not studied(method) or "objective" not in now or not before:
        return None
    steps = implied(method, clock, tau)
    if steps is None or "objective" not in before[0]:
        return None
    T, fallen = now["step"] - before[0]["step"], before[0]["objective"] - now["objective"]
    if isinstance(method, Local):
        return theorem1_sharp(steps, T, fallen)
    return theorem2_sharp(steps, T, fallen, max(line["kappa"] for line in (*before, now)))


def implied(method: Studied, clock: Clock, tau: int) -> Steps | None:
    """The constants that a method's step sizes would be right for; None if it is outside the theorems."""
    q, tie = prox_of(method), lambda_p(method, clock)
    rates = [method.eta1, q.eta2] + ([method.eta3, method.lambda_p] if isinstance(method, QuPeL) else [])
    if outside(q) or method.optimizer != SGD() or any(r != Schedule(r.start) or r.start <= 0 for r in rates):
        return None
    L_x, L_c = 1 / (2 * method.eta1.start) - 2 * tie, 1 / (2 * q.eta2.start)
    if isinstance(method, Local):
        return Steps(L_x, L_c)
    sound = method.coupling is None and not method.as_printed and L_x > 0 and 2 * tie * method.eta3.start < 1
    return Steps(L_x, L_c, tie, method.eta3.start, tau) if sound else None
