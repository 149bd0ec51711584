"""Algorithms 1 and 2 as the theorems want them, full batch and with their step sizes, and what is measured on the way.
The steps themselves are those of `algorithms`; F, G and the sufficient decrease are those of `diagnostics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from qupel.algorithms import Local, QuPeL, State
from qupel.convergence.config import Rule
from qupel.convergence.problem import Problem
from qupel.diagnostics import NO_BATCH, Gradients, decrease, from_mean, gradients, lambda_p, objective
from qupel.schedule import Clock, Schedule
from qupel.theory import Steps, theorem1_steps, theorem2_steps

TOLERANCE = 1e-12  # of |F^0|: a larger increase is a violation, a smaller one is rounding in float64
Tell = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Measured:
    """One run of T steps. Means over clients; arrays are by step."""

    steps: Steps
    objective: np.ndarray  # F^0 .. F^T; between them only for Theorem 1 (T+1,)
    G2: np.ndarray  # |G^t|^2 (T,)
    needed: np.ndarray  # what each step must take off F at least (T,)
    kappa: np.ndarray  # of each client at each step: lambda_p^2 |x_i - mean x|^2 (T, clients)
    slope_x: float  # largest |change of gradient| / |step| seen; L_x bounds it
    slope_c: float
    largest_center: float

    @property
    def average(self) -> np.ndarray:
        """(1/T) sum_{t < T} |G^t|^2 for every T (T,)."""
        return np.cumsum(self.G2) / np.arange(1, len(self.G2) + 1)

    @property
    def increases(self) -> np.ndarray:
        """F^{t+1} - F^t where it is more than rounding, else 0 (T,)."""
        return self._beyond_rounding(np.diff(self.objective))

    @property
    def missing(self) -> np.ndarray:
        """What a step lacks of the sufficient decrease, where it is more than rounding, else 0 (T,)."""
        return self._beyond_rounding(np.diff(self.objective) + self.needed)

    def held(self, center_bound: float) -> bool:
        """Were L_x, L_c and the bound on the centers, which the step sizes come from, true of this run?"""
        smooth = self.slope_x <= self.steps.L_x and self.slope_c <= self.steps.L_c
        return smooth and self.largest_center <= center_bound

    def _beyond_rounding(self, values: np.ndarray) -> np.ndarray:
        return np.where(values > TOLERANCE * abs(self.objective[0]), values, 0.0)


def run_theorem1(problem: Problem, T: int, rule: Rule, tell: Tell = lambda t: None) -> Measured:
    q = problem.quantizer()
    steps = theorem1_steps(problem.constants, q, problem.sizes, problem.span, problem.free)
    q = replace(q, eta2=Schedule(steps.eta2), rule=rule)
    return _run(problem, Local(eta1=Schedule(steps.eta1), quantizer=q), steps, T, tell)


def run_theorem2(problem: Problem, T: int, tau: int, lambda_p: float, tell: Tell = lambda t: None) -> Measured:
    q = problem.quantizer()
    sizes, span, free = problem.sizes, problem.span, problem.free
    steps = theorem2_steps(problem.constants, q, sizes, span, free, lambda_p=lambda_p, T=T, tau=tau)
    method = QuPeL(
        eta1=Schedule(steps.eta1),
        eta3=Schedule(steps.eta3),
        lambda_p=Schedule(lambda_p),
        quantizer=replace(q, eta2=Schedule(steps.eta2)),
    )
    return _run(problem, method, steps, T, tell)


def _run(problem: Problem, method: Local | QuPeL, steps: Steps, T: int, tell: Tell) -> Measured:
    """T steps of every client, synchronized after every tau of them."""
    states = [method.start(problem.start(), problem.plan, problem.layout) for _ in problem.losses]
    w, n = problem.x, len(states)
    F, G2, needed = np.full(T + 1, np.nan), np.empty(T), np.empty(T)
    kappa, slopes, largest = np.zeros((T, n)), np.zeros(2), 0.0
    F[0] = _objective(problem, method, states, w)
    for t in range(T):
        clock = Clock(t, T, T)
        after = [method.step(s, f, NO_BATCH, clock) for s, f in zip(states, problem.losses, strict=True)]
        made = zip(states, after, problem.losses, strict=True)
        G = [gradients(method, before, new, w, f, clock) for before, new, f in made]
        G2[t] = sum(g.total for g in G) / n
        slopes = np.maximum(slopes, _slopes(G))
        needed[t] = sum(decrease(method, a, b, clock) for a, b in zip(states, after, strict=True)) / n
        largest = max(largest, *(float(c.abs().max()) for s in after for c in s.codebook.centers))
        kappa[t] = lambda_p(method, clock) ** 2 * from_mean(np.stack([s.x.numpy() for s in after]))
        uploads = [u for s in after if (u := method.upload(s)) is not None]
        w = method.aggregate(w, ((u, 1.0) for u in uploads)) if uploads else w  # the mean of the w_i, at every step
        if (t + 1) % steps.tau == 0:
            after = [method.receive(s, w) for s in after]
        states = after
        if isinstance(method, Local) or t + 1 == T:  # Theorem 2 asks for the ends only
            F[t + 1] = _objective(problem, method, states, w)
        tell(t + 1)
    return Measured(steps, F, G2, needed, kappa, float(slopes[0]), float(slopes[1]), largest)


def _objective(problem: Problem, method: Local | QuPeL, states: Sequence[State], w: Tensor) -> float:
    """(1/n) sum_i F_i(x_i, c_i, w)."""
    lam = [problem.config.lam] * len(problem.plan)
    tie = lambda_p(method, Clock(0, 1, 1))
    pairs = zip(states, problem.losses, strict=True)
    return sum(objective(method.quantizer, s.x, s.codebook, f, lam, tie, w) for s, f in pairs) / len(states)


def _slopes(G: Sequence[Gradients]) -> np.ndarray:
    return np.array([max(g.slope_x for g in G), max(g.slope_c for g in G)])
