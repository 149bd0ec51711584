"""Every constant against finite differences, every step size against gradients, every bound against its derivation."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qupel.core.codebook import Codebook
from qupel.core.quantize import soft_at
from qupel.core.schedule import Clock, Schedule, Travel
from qupel.paper.convergence.config import ProblemConfig
from qupel.paper.convergence.problem import build
from qupel.paper.diagnostics import NO_BATCH
from qupel.paper.theory import (
    LossConstants,
    Steps,
    curvature,
    estimate_constants,
    regression_constants,
    soft_constants,
    theorem1_bound,
    theorem1_sharp,
    theorem1_steps,
    theorem2_bound,
    theorem2_sharp,
    theorem2_steps,
)
from qupel.parts.base import Info
from qupel.parts.quantizers.prox import Prox
from qupel.util.errors import UserError

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int):
    """(P, sorted centers (m,), weights (n,)): weights around the centers, where Q~ bends."""
    rng = torch.Generator().manual_seed(seed)
    m = int(torch.randint(2, 6, (), generator=rng))
    c = torch.randn(m, generator=rng, dtype=torch.float64).sort().values
    P = float(torch.empty((), dtype=torch.float64).uniform_(0.2, 12, generator=rng))
    x = 1.5 * torch.randn(7, generator=rng, dtype=torch.float64)
    return P, c, x, rng


def span(c: torch.Tensor) -> float:
    return float(c[-1] - c[0])


# --- the soft quantizer ---


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_constants_in_x_bound_finite_differences(seed):
    P, c, x, rng = drawn(seed)
    s = soft_constants(P, span(c), [len(x)])
    y = x + 0.3 * torch.randn(x.shape, generator=rng, dtype=x.dtype)
    assert (soft_at(x, c, P) - soft_at(y, c, P)).norm() <= s.l_Q1 * (x - y).norm() + 1e-12

    def jacobian(v):  # diagonal (n,)
        return (soft_at(v + 1e-6, c, P) - soft_at(v - 1e-6, c, P)) / 2e-6

    assert (jacobian(x) - jacobian(y)).norm() <= s.L_Q1 * (x - y).norm() + 1e-6
    assert jacobian(x).abs().max() <= s.G_Q1 + 1e-6
    assert jacobian(x).norm() <= soft_constants(P, span(c), [len(x)], frobenius=True).G_Q1 + 1e-6


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_constants_in_c_bound_finite_differences(seed):
    P, c, x, rng = drawn(seed)
    d = (c + 0.3 * torch.randn(c.shape, generator=rng, dtype=c.dtype)).sort().values
    s = soft_constants(P, max(span(c), span(d)), [len(x)])
    assert (soft_at(x, c, P) - soft_at(x, d, P)).norm() <= s.l_Q2 * (c - d).norm() + 1e-12

    def jacobian(e):  # (n, m)
        moves = 1e-6 * torch.eye(len(e), dtype=e.dtype)
        return torch.stack([(soft_at(x, e + v, P) - soft_at(x, e - v, P)) / 2e-6 for v in moves], 1)

    change = jacobian(c) - jacobian(d)
    assert torch.linalg.matrix_norm(change) <= s.L_Q2 * (c - d).norm() + 1e-6  # Frobenius, hence spectral
    assert torch.linalg.matrix_norm(jacobian(c)) <= s.G_Q2 + 1e-6


@pytest.mark.parametrize("P", [0.5, 3.0, 40.0])
def test_constants_in_x_are_reached_with_two_centers(P):
    """No smaller ones would do: at the midpoint and where the sigmoid bends most."""
    c = torch.tensor([-0.4, 0.9], dtype=torch.float64)
    x = torch.linspace(-4, 5, 200_001, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(soft_at(x, c, P).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    s = soft_constants(P, 1.3, [1])
    assert float(slope.detach().max()) == pytest.approx(s.l_Q1, rel=1e-4)
    assert float(bend.abs().max()) == pytest.approx(s.L_Q1, rel=1e-4)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_constants_of_two_layers_and_free_coordinates_bound_differences(seed):
    P, c, x, rng = drawn(seed)
    layers = ((slice(0, 3), c), (slice(3, 5), c + 0.7), (slice(5, 7), None))  # the last two weights are free

    def Q(v, moves):  # moves of the centers of both layers (2, m)
        parts = [
            v[s] if k is None else soft_at(v[s], (k + moves[i]).sort().values, P) for i, (s, k) in enumerate(layers)
        ]
        return torch.cat(parts)

    y = x + 0.3 * torch.randn(x.shape, generator=rng, dtype=x.dtype)
    none, moves = torch.zeros(2, len(c), dtype=x.dtype), 0.01 * torch.randn(2, len(c), generator=rng, dtype=x.dtype)
    s = soft_constants(P, span(c) + 0.2, [3, 2], free=2)
    assert (Q(x, none) - Q(y, none)).norm() <= s.l_Q1 * (x - y).norm() + 1e-12
    assert (Q(x, none) - Q(x, moves)).norm() <= s.l_Q2 * moves.norm() + 1e-12


def test_layers_and_free_coordinates():
    """Layers do not meet: the largest counts. A coordinate that is not quantized has slope 1."""
    one, both = soft_constants(2.0, 1.0, [90]), soft_constants(2.0, 1.0, [90, 10], free=5)
    assert (one.l_Q2, one.L_Q2) == (both.l_Q2, both.L_Q2)
    assert (one.l_Q1, both.l_Q1) == (0.5, 1.0)
    frobenius = soft_constants(2.0, 1.0, [90, 10], free=5, frobenius=True)
    norms = [frobenius.G_Q1, frobenius.G_Q2]
    assert norms == pytest.approx([math.sqrt(100 * 0.25 + 5), math.sqrt(100 * 1.25)])


# --- losses ---


def regression(classes: int, mu: float, seed: int = 0):
    """(inputs (N, p), gradient of the regularized mean cross entropy in [W, b])."""
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(30, 4, generator=rng, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.3, 0.1])
    labels = torch.randint(0, max(classes, 2), (30,), generator=rng)

    def gradient(x):
        x = x.detach().requires_grad_()
        W, b = x[: 4 * classes].view(classes, 4), x[4 * classes :]
        out = a @ W.T + b
        loss = (
            F.cross_entropy(out, labels)
            if classes > 1
            else F.binary_cross_entropy_with_logits(out[:, 0], labels.double())
        )
        (g,) = torch.autograd.grad(loss + mu / 2 * x @ x, x)
        return g

    return a, gradient


@pytest.mark.parametrize(("kind", "classes"), [("softmax", 2), ("softmax", 5), ("logistic", 1)])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_regression_constants_bound_curvature_and_gradient(kind, classes, mu):
    a, gradient = regression(classes, mu)
    found = regression_constants(a, kind, mu, bound=0.7, classes=classes)
    rng = torch.Generator().manual_seed(1)
    for scale in (0.0, 0.1, 1.0, 10.0):
        x = scale * torch.randn(5 * classes, generator=rng, dtype=torch.float64)
        x[: 4 * classes] = x[: 4 * classes].clamp(-0.7, 0.7)
        assert curvature(gradient, x, rng) <= found.L * (1 + 1e-6)
        assert gradient(x)[: 4 * classes].norm() <= found.G
        y = x + torch.randn(x.shape, generator=rng, dtype=x.dtype)
        assert (gradient(x) - gradient(y)).norm() <= found.L * (x - y).norm()
    if classes <= 2:  # reached where all classes are equally likely
        at_zero = curvature(gradient, torch.zeros(5 * classes, dtype=torch.float64), rng, 200)
        assert at_zero == pytest.approx(found.L, rel=1e-4)


def test_power_iteration_finds_the_largest_curvature():
    values = torch.tensor([-9.0, 1.0, 5.0], dtype=torch.float64)
    found = curvature(lambda x: values * x, torch.zeros(3, dtype=torch.float64), torch.Generator().manual_seed(0), 60)
    assert found == pytest.approx(9.0, rel=1e-6)
    estimate = estimate_constants(lambda x: values * x, [torch.ones(3, dtype=torch.float64)], safety=3.0)
    both = [estimate.L, estimate.G]
    assert both == pytest.approx([27.0, 3 * float(values.norm())], rel=1e-3)
    with pytest.raises(UserError, match="at least one"):
        estimate_constants(lambda x: x, [])


# --- step sizes ---

QUANTIZER = Prox(lam=Schedule(0.02), mode="soft", P=3.0)
LOSS = LossConstants(0.7, 4.0)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_steps_come_from_constants_that_bound_the_change_of_gradients(seed):
    """L_x and L_c of softmax regression against differences of the very gradients that the algorithms use."""
    problem = build(ProblemConfig(P=3.0, lam=0.02, mu=0.1, center_bound=0.8, samples=20, features=4, bits=2))
    steps = theorem1_steps(problem.constants, problem.quantizer(), problem.sizes, problem.span, problem.free)
    assert (steps.eta1, steps.eta2) == (1 / (2 * steps.L_x), 1 / (2 * steps.L_c))
    q, f, clock = replace(problem.quantizer(), eta2=Schedule(1.0)), problem.losses[0], Clock(0, 1, 1)
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(problem.x.shape, generator=rng, dtype=torch.float64) for _ in range(2))
    y = x + 0.1 * (y - x)
    slots = tuple(problem.layout[name] for name in problem.plan)
    c, d = (
        Codebook(slots, ((1.6 * torch.rand(4, generator=rng, dtype=torch.float64) - 0.8).sort().values,))
        for _ in range(2)
    )
    in_x = [q.gradient(v, c, f, NO_BATCH, clock).gradient for v in (x, y)]
    assert (in_x[0] - in_x[1]).norm() <= steps.L_x * (x - y).norm()
    in_c = [q.center_gradients(x, book, book.nearest(x), f, NO_BATCH, clock, Info())[0][0] for book in (c, d)]
    assert (in_c[0] - in_c[1]).norm() <= steps.L_c * (c.centers[0] - d.centers[0]).norm()


def test_theorem2_steps():
    s = theorem2_steps(LOSS, QUANTIZER, [32], 1.6, 4, lambda_p=0.5, T=100, tau=10)
    first = theorem1_steps(LOSS, QUANTIZER, [32], 1.6, 4)
    assert (s.L_x, s.L_c, s.eta2) == (first.L_x, first.L_c, first.eta2)
    assert s.eta1 == 1 / (2 * (2 * 0.5 + s.L_x))
    assert s.eta3 == 1 / (4 * 0.5 * 10)
    larger = theorem2_steps(LOSS, QUANTIZER, [32], 1.6, 4, lambda_p=0.5, T=100, tau=10, frobenius=True)
    assert larger.L_x > s.L_x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "hard"}, "hard"),
        ({"P": None}, "sharpness"),
        ({"P": math.inf}, "infinity"),
        ({"rule": "first_order"}, "proximal map"),
        ({"rule": "paper"}, "proximal map"),
        ({"lam": Travel(1.0)}, "one constant"),
        ({"lam": Schedule(growth=1.0)}, "one constant"),
        ({"lam_c": Schedule(1.0)}, "one constant"),
        ({"center_gradient": "mean"}, "center step"),
        ({"carry": True}, "center step"),
        ({"clip": 10.0}, "center step"),
    ],
)
def test_quantizers_outside_the_theorems_are_refused(change, reason):
    with pytest.raises(UserError, match=reason):
        theorem1_steps(LOSS, replace(QUANTIZER, **change), [32], 1.6)
    with pytest.raises(UserError, match=reason):
        theorem2_steps(LOSS, replace(QUANTIZER, **change), [32], 1.6, lambda_p=1.0, T=100, tau=2)


@pytest.mark.parametrize(
    ("loss", "width", "reason"),
    [
        (LossConstants(0.7, 4.0, lower=-math.inf), 1.6, "A.1"),
        (LossConstants(math.inf, 4.0), 1.6, "A.2"),
        (LossConstants(0.7, math.inf), 1.6, "A.3"),
        (regression_constants(torch.ones(3, 2), "softmax", mu=0.1), 1.6, "A.3"),  # weight decay, centers anywhere
        (LOSS, math.inf, "bounded set"),
    ],
)
def test_losses_outside_the_theorems_are_refused(loss, width, reason):
    with pytest.raises(UserError, match=reason):
        theorem1_steps(loss, QUANTIZER, [32], width)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tau": 11}, "sqrt"),
        ({"tau": 0}, "tau"),
        ({"lambda_p": 0.0}, "lambda_p"),
        ({"lambda_p": 1e-5}, "eta3 too large"),
    ],
)
def test_federations_outside_theorem_2_are_refused(change, reason):
    with pytest.raises(UserError, match=reason):
        theorem2_steps(LOSS, QUANTIZER, [32], 1.6, **{"lambda_p": 1.0, "T": 100, "tau": 10} | change)


# --- bounds ---


@settings(max_examples=100, deadline=None)
@given(*[st.floats(0.01, 100.0)] * 5, st.integers(1, 8), st.integers(64, 10**6))
def test_theorem2_bound_is_what_the_proof_ends_with(L_x, L_c, p, kappa, decrease, tau, T):
    """36 L^2/L_min [(eta3 + 2 p eta3^2)(36 p^2 tau^2 eta3^2 kappa + 3 kappa) + (1/2 + eta3 p + 2 p^2 eta3^2) p gamma +
    Delta_F/T] + 2 p^2 gamma with gamma = 6 tau^2 eta3^2 kappa and L_min = eta3/2; the sharper one never exceeds it."""
    eta3 = 1 / (4 * p * math.sqrt(T))
    s = Steps(L_x, L_c, p, eta3, tau)
    gamma, L = 6 * tau**2 * eta3**2 * kappa, max(1.0, L_c, 5 / 3 * p + L_x)
    inner = (eta3 + 2 * p * eta3**2) * (6 * p**2 * gamma + 3 * kappa)
    inner += (0.5 + eta3 * p + 2 * p**2 * eta3**2) * p * gamma + decrease / T
    expected = 36 * L**2 / (eta3 / 2) * inner + 2 * p**2 * gamma
    assert theorem2_bound(s, T, decrease, kappa) == pytest.approx(expected, rel=1e-9)
    if eta3 / 2 <= min(2 * p + L_x, L_c):
        assert theorem2_sharp(s, T, decrease, kappa) <= expected * (1 + 1e-9)


def test_the_sharper_floor_tends_to_kappa():
    p, T = 0.5, 10**14
    s = Steps(7.0, 200.0, p, 1 / (4 * p * math.sqrt(T)), 4)
    assert theorem2_sharp(s, T, 1.0, 2.5) == pytest.approx(2.5, rel=1e-5)


def test_theorem1_bounds():
    s = Steps(2.0, 8.0)
    assert theorem1_bound(s, 10, 0.5) == 18 * 64 / 2 * 0.5 / 10
    assert theorem1_sharp(s, 10, 0.5) == 18 * 8 * 0.5 / 10
