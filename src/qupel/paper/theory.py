"""Theorems 1 and 2 as numbers: constants of the soft quantizer and of the loss, step sizes, bounds. docs/theory.md has
the derivations and says where we differ from the print.

    L_x = L + G L_Q1 + G_Q1 L l_Q1     f(x) + f(Q~_c(x)) is L_x-smooth in x
    L_c =     G L_Q2 + G_Q2 L l_Q2     f(Q~_c(x)) is L_c-smooth in c
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qupel.core.schedule import Schedule
from qupel.parts.quantizers.prox import Prox
from qupel.util.errors import UserError

# --- constants ---


@dataclass(frozen=True)
class LossConstants:
    """f >= lower (A.1), f is L-smooth (A.2), |grad f| <= G wherever Q~ can lead, in the quantized coordinates (A.3)."""

    L: float
    G: float
    lower: float = 0.0


@dataclass(frozen=True)
class SoftConstants:
    """Of Q~_c(x), in x (1) and in c (2): l Lipschitz, L smooth, G the norm of the Jacobian (A.4, A.5)."""

    l_Q1: float
    L_Q1: float
    G_Q1: float
    l_Q2: float
    L_Q2: float
    G_Q2: float


def soft_constants(
    P: float, span: float, sizes: Sequence[int], free: int = 0, *, frobenius: bool = False
) -> SoftConstants:
    """For quantized layers of these sizes whose centers lie within `span` of one another, and `free` other coordinates.

    One weight, with b = P span / 4 and h = P/4 + P^2 span / (12 sqrt 3):
        0 < dQ~/dx <= b     |d2Q~/dx2| <= P^2 span / (6 sqrt 3)     |dQ~/dc|^2 <= 1 + b^2     |d2Q~/dc2| <= h
    (dQ~/dc = p - q with p, q >= 0, where p adds up to 1 and |q| <= dQ~/dx). The Jacobian in x is diagonal, 1 where a
    coordinate is not quantized; that in c has a row a weight, which gives sqrt(n) for a layer of n weights, and layers
    do not meet. G is the spectral norm, all that the proof needs (|A u| <= |A| |u|); `frobenius` gives the paper's.
    """
    b = P * span / 4
    h = P / 4 + P**2 * span / (12 * math.sqrt(3))
    n = max(sizes)
    l_Q1, l_Q2 = max(b, 1.0) if free else b, math.sqrt(n * (1 + b**2))
    G_Q1, G_Q2 = l_Q1, l_Q2
    if frobenius:
        G_Q1, G_Q2 = math.sqrt(sum(sizes) * b**2 + free), math.sqrt(sum(sizes) * (1 + b**2))
    return SoftConstants(l_Q1, P**2 * span / (6 * math.sqrt(3)), G_Q1, l_Q2, math.sqrt(n) * h, G_Q2)


def regression_constants(
    inputs: Tensor, kind: Literal["softmax", "logistic"], mu: float = 0.0, bound: float = math.inf, classes: int = 2
) -> LossConstants:
    """Mean cross entropy of a linear model with bias on inputs (N, p), plus (mu/2) |x|^2; its weights are quantized.

    softmax (one output a class):  L = lambda_max(A'A/N)/2 + mu,  G = sqrt(2) mean |a| + mu |c|_max sqrt(weights)
    logistic (one output):         L = lambda_max(A'A/N)/4 + mu,  G = mean |a| + mu |c|_max sqrt(weights)
    with A the inputs and a column of ones: the Hessian in the outputs is at most 1/2 (1/4), their gradient at most
    sqrt(2) (1). `bound`: |c|_max; Q~ lies between the centers, so that it also bounds the gradient of mu |x|^2 / 2.
    """
    outputs = classes if kind == "softmax" else 1
    a = inputs.flatten(1).double()  # (N, p)
    A = torch.cat([a, a.new_ones(len(a), 1)], 1)  # (N, p+1)
    largest = float(torch.linalg.matrix_norm(A, 2)) ** 2 / len(a)
    curvature, slope = (0.5, math.sqrt(2)) if kind == "softmax" else (0.25, 1.0)
    decay = mu * bound * math.sqrt(outputs * a.shape[1]) if mu else 0.0
    return LossConstants(curvature * largest + mu, slope * float(a.norm(dim=1).mean()) + decay)


def estimate_constants(
    gradient: Callable[[Tensor], Tensor], points: Iterable[Tensor], safety: float = 2.0, seed: int = 0
) -> LossConstants:
    """For any other loss that is at least 0: the largest curvature and gradient at these points (d,), times `safety`.

    An estimate, not a bound: a run with it must be watched (`convergence.run.Measured.held`).
    """
    rng = torch.Generator().manual_seed(seed)
    found = [(curvature(gradient, x, rng), float(gradient(x).norm())) for x in points]
    if not found:
        raise UserError("points: at least one is needed to estimate constants")
    return LossConstants(safety * max(L for L, _ in found), safety * max(G for _, G in found))


def curvature(gradient: Callable[[Tensor], Tensor], x: Tensor, rng: torch.Generator, iterations: int = 30) -> float:
    """|Hessian| at x by power iteration; products with the Hessian by central differences of the gradient."""
    v = torch.randn(x.shape, generator=rng, dtype=x.dtype)
    size, step = 0.0, 1e-4
    for _ in range(iterations):
        v = v / v.norm()
        v = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)
        size = float(v.norm())
        if size == 0:
            break
    return size


# --- step sizes ---


@dataclass(frozen=True)
class Steps:
    """The theorems' step sizes and the constants they come from. Theorem 1: lambda_p = 0, no w step."""

    L_x: float
    L_c: float
    lambda_p: float = 0.0
    eta3: float = 0.0
    tau: int = 1

    @property
    def eta1(self) -> float:
        return 1 / (2 * (2 * self.lambda_p + self.L_x))

    @property
    def eta2(self) -> float:
        return 1 / (2 * self.L_c)


def outside(quantizer: Prox) -> str | None:
    """Why a quantizer is outside both theorems, None if it is not."""
    q = quantizer
    if q.mode == "hard":
        return "mode = 'hard': the theorems differentiate f(Q~_c(x)), in hard mode its gradient in x is taken as 0"
    if q.P is None:
        return "P is not constant: sharpness follows the moving centers; give P itself"
    if not 0 < q.P < math.inf:
        return f"P = {q.P}: the soft quantizer is smooth for 0 < P < infinity only"
    if q.rule != "exact":
        return (
            f"rule = {q.rule!r}: not the proximal map of R in the centers, so that F need not fall; allowed is 'exact'"
        )
    if not isinstance(q.lam, Schedule) or q.lam != Schedule(q.lam.start) or q.lam_c not in (None, q.lam):
        return "lambda must be one constant for weights and centers; a lambda that grows changes F itself"
    if q.center_gradient != "sum" or q.clip is not None or q.carry:
        return "center_gradient = 'mean', clip and carry: the center step is then no step along the gradient of F"
    return None


def theorem1_steps(
    loss: LossConstants,
    quantizer: Prox,
    sizes: Sequence[int],
    span: float,
    free: int = 0,
    *,
    frobenius: bool = False,
) -> Steps:
    """eta1 = 1/(2 L_x), eta2 = 1/(2 L_c). Layers, span and free coordinates as in `soft_constants`."""
    if reason := outside(quantizer):
        raise UserError(f"outside the theorems: {reason}")
    if not loss.lower > -math.inf:
        raise UserError("outside the theorems: the loss is not bounded below (A.1)")
    if not 0 < loss.L < math.inf:
        raise UserError(
            f"outside the theorems: the loss must be L-smooth with 0 < L < infinity (A.2), not L = {loss.L}"
        )
    if not 0 < loss.G < math.inf:
        raise UserError(
            f"outside the theorems: gradients must be bounded (A.3), not G = {loss.G}; squared losses and weight decay "
            "without a bound on the centers are not"
        )
    if not 0 < span < math.inf or not sizes:
        raise UserError(f"outside the theorems: centers must lie in a bounded set, not span = {span}, layers {sizes}")
    assert quantizer.P is not None
    s = soft_constants(quantizer.P, span, sizes, free, frobenius=frobenius)
    return Steps(
        L_x=loss.L + loss.G * s.L_Q1 + s.G_Q1 * loss.L * s.l_Q1,
        L_c=loss.G * s.L_Q2 + s.G_Q2 * loss.L * s.l_Q2,
    )


def theorem2_steps(
    loss: LossConstants,
    quantizer: Prox,
    sizes: Sequence[int],
    span: float,
    free: int = 0,
    *,
    lambda_p: float,
    T: int,
    tau: int,
    frobenius: bool = False,
) -> Steps:
    """eta1 = 1/(2 (2 lambda_p + L_x)), eta2 = 1/(2 L_c), eta3 = 1/(4 lambda_p sqrt T), for tau <= sqrt T."""
    if not 0 < lambda_p < math.inf:
        raise UserError(f"outside Theorem 2: lambda_p = {lambda_p}; allowed are numbers above 0")
    if tau < 1 or tau**2 > T:
        raise UserError(f"outside Theorem 2: tau = {tau} local steps with T = {T}; allowed is 1 <= tau <= sqrt(T)")
    first = theorem1_steps(loss, quantizer, sizes, span, free, frobenius=frobenius)
    least = min(2 * lambda_p + first.L_x, first.L_c)
    if (needed := (8 * lambda_p * least) ** -2) > T:  # the proof takes eta3/2 for the smallest of its constants
        raise UserError(
            f"outside Theorem 2: T = {T} makes eta3 too large for lambda_p = {lambda_p}; {needed:.0f} would do"
        )
    return Steps(first.L_x, first.L_c, lambda_p, 1 / (4 * lambda_p * math.sqrt(T)), tau)


# --- bounds on the average of |G^t|^2 over T steps ---


def theorem1_bound(s: Steps, T: int, decrease: float) -> float:
    """18 L_max^2 (F^0 - F^T) / (L_min T)."""
    return 18 * max(s.L_x, s.L_c) ** 2 / min(s.L_x, s.L_c) * decrease / T


def theorem1_sharp(s: Steps, T: int, decrease: float) -> float:
    """18 L_max (F^0 - F^T) / T: the two halves of the proof weigh steps in x and c alike, so that L_max / L_min is lost
    for nothing when they are joined."""
    return 18 * max(s.L_x, s.L_c) * decrease / T


def theorem2_bound(s: Steps, T: int, decrease: float, kappa: float) -> float:
    """Delta_F = decrease, L = max(1, L_c, 5/3 lambda_p + L_x), eta3 = 1/(4 lambda_p sqrt T):
    L^2 [54 tau^2 kappa + 108 kappa + 288 lambda_p Delta_F] / sqrt T + (189 L^2 + 3/4) tau^2 kappa / T
    + 94.5 L^2 tau^2 kappa / T^1.5 + 216 L^2 kappa."""
    L2 = max(1.0, s.L_c, 5 / 3 * s.lambda_p + s.L_x) ** 2
    moved = s.tau**2 * kappa
    return (
        L2 * (54 * moved + 108 * kappa + 288 * s.lambda_p * decrease) / math.sqrt(T)
        + (189 * L2 + 0.75) * moved / T
        + 94.5 * L2 * moved / T**1.5
        + 216 * L2 * kappa
    )


def theorem2_sharp(s: Steps, T: int, decrease: float, kappa: float) -> float:
    """The same proof for any eta3 < 1/(2 lambda_p), without its losses:
    rho [(eta3/2 + lambda_p eta3^2) kappa + (lambda_p/2) gamma + Delta_F / T] + 2 lambda_p^2 gamma, with
    gamma = (tau - 1)^2 eta3^2 kappa >= mean |w_i - w|^2 and
    rho = max(4 (5 lambda_p + 3 L_x)^2 / (2 lambda_p + L_x), 18 L_c, 2 / (eta3 - 2 lambda_p eta3^2)).
    At eta3 = 1/(4 lambda_p sqrt T) it tends to kappa, which no average of |G_w|^2 can be below."""
    p, eta3 = s.lambda_p, s.eta3
    gamma = (s.tau - 1) ** 2 * eta3**2 * kappa
    rho = max(4 * (5 * p + 3 * s.L_x) ** 2 / (2 * p + s.L_x), 18 * s.L_c, 2 / (eta3 - 2 * p * eta3**2))
    return rho * ((eta3 / 2 + p * eta3**2) * kappa + p / 2 * gamma + decrease / T) + 2 * p**2 * gamma
