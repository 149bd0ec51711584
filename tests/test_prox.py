"""Proximal maps against brute force minimization of what they are said to minimize."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qupel.core.prox import distance, prox_centers, prox_weights
from qupel.core.quantize import assign, hard

coarse = st.integers(-16, 16).map(lambda k: k / 8)  # ties, duplicates and weights on centers are common
fine = st.floats(-4, 4).filter(lambda v: v == 0 or abs(v) > 1e-30)
number = st.one_of(coarse, fine)
steps = st.one_of(st.floats(1e-4, 10), st.sampled_from([0.0, 0.125, 0.25, 1.0, 1_000.0]))


@st.composite
def layers(draw):
    """(mu, centers, x) of a small layer, some weights exactly on a center."""
    m = draw(st.integers(1, 5))
    centers = sorted(draw(st.lists(number, min_size=m, max_size=m)))
    mu = draw(st.lists(number, min_size=m, max_size=m))
    x = draw(st.lists(st.one_of(number, st.sampled_from(centers)), min_size=1, max_size=20))
    return tuple(torch.tensor(v, dtype=torch.float64) for v in (mu, centers, x))


def center_objective(c: Tensor, mu: Tensor, x: Tensor, kappa: float) -> Tensor:
    """(c - mu)^2/2 + kappa sum_k |c - x_k| at every candidate c (k,)."""
    return (c - mu) ** 2 / 2 + kappa * (c[:, None] - x).abs().sum(1)


def candidates(mu: Tensor, x: Tensor, kappa: float) -> Tensor:
    """Every place where the minimizer can be: the weights, and mu + kappa (n - 2k), k = 0..n. (2n+1,)"""
    return torch.cat([x, mu + kappa * (len(x) - 2 * torch.arange(len(x) + 1, dtype=torch.float64))])


# --- R and the weights ---


def test_by_hand():
    c, x = torch.tensor([0.0, 1.0]), torch.tensor([-0.5, 0.0, 0.5, 0.75, 2.0])
    assert distance(x, c).item() == (0.5 + 0 + 0.5 + 0.25 + 1) / 2
    assert prox_weights(x, c, 0.5).tolist() == [-0.25, 0, 0.25, 1, 1.75]
    assert prox_weights(x, c, 100.0).tolist() == [0, 0, 0, 1, 1]


@settings(max_examples=200, deadline=None)
@given(layers())
def test_distance_is_half_the_way_to_the_nearest(layer):
    _, c, x = layer
    torch.testing.assert_close(distance(x, c), (x[:, None] - c).abs().min(1).values.sum() / 2)


@settings(max_examples=200, deadline=None)
@given(layers(), steps)
def test_prox_weights_minimizes(layer, t):
    _, c, y = layer
    new = prox_weights(y, c, t)

    def objective(x: Tensor) -> Tensor:  # (n, k) -> (n, k)
        return (x - y[:, None]) ** 2 / 2 + t / 2 * (x[..., None] - c).abs().min(-1).values

    grid = torch.linspace(-5, 5, 401, dtype=torch.float64).expand(len(y), -1)
    places = [grid, c.expand(len(y), -1), (y - t / 2)[:, None], (y + t / 2)[:, None], y[:, None]]
    best = objective(torch.cat(places, 1)).min(1).values
    assert bool((objective(new[:, None])[:, 0] <= best + 1e-9).all())
    assert torch.equal(prox_weights(y, c, t, q=hard(y, c)), new)


@settings(max_examples=100, deadline=None)
@given(layers(), steps)
def test_prox_weights_ends_on_the_center_exactly(layer, t):
    _, c, y = layer
    y, c = y.float(), c.float()
    new, q = prox_weights(y, c, t), hard(y, c)
    near = (y - q).abs() <= t / 2
    assert torch.equal(new[near & (t > 0)], q[near & (t > 0)])
    assert bool(((new - q).abs() <= (y - q).abs() + 1e-6).all())
    assert torch.equal(prox_weights(y, c, 0.0), y)


def test_the_codes_of_the_weights_are_those_of_the_result():
    y = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    c = torch.tensor([-1.0, -0.2, 0.3, 1.5])
    assert torch.equal(assign(prox_weights(y, c, 0.1), c), assign(y, c))


@settings(max_examples=100, deadline=None)
@given(layers(), steps, st.sampled_from([0.25, 2.0, 8.0]))
def test_both_maps_scale_with_the_layer(layer, t, s):
    mu, c, x = layer
    assert torch.equal(prox_weights(s * x, s * c, s * t), s * prox_weights(x, c, t))
    for rule in ("exact", "first_order", "paper"):
        assert torch.equal(prox_centers(s * mu, s * c, s * x, s * t, rule), s * prox_centers(mu, c, x, t, rule))


@settings(max_examples=100, deadline=None)
@given(layers(), steps, coarse)
def test_both_maps_move_with_the_layer(layer, t, shift):
    mu, c, x = ((8 * v).round() / 8 for v in layer)  # so that the shift is exact
    torch.testing.assert_close(prox_weights(x + shift, c + shift, t), prox_weights(x, c, t) + shift)
    for rule in ("exact", "first_order", "paper"):
        moved = prox_centers(mu + shift, c + shift, x + shift, t, rule)
        torch.testing.assert_close(moved, prox_centers(mu, c, x, t, rule) + shift)


# --- the centers ---


@settings(max_examples=500, deadline=None)
@given(layers(), steps)
def test_exact_minimizes_and_is_the_median(layer, t):
    mu, c, x = layer
    codes, kappa = assign(x, c), t / 2
    expected = []
    for j in range(len(c)):
        cluster = x[codes == j]
        places = candidates(mu[j], cluster, kappa)
        median = places.median()  # of an odd number
        lowest = center_objective(places, mu[j], cluster, kappa).min()
        assert center_objective(median[None], mu[j], cluster, kappa) <= lowest * (1 + 1e-12) + 1e-12
        expected.append(median)
    torch.testing.assert_close(prox_centers(mu, c, x, t), torch.stack(expected).sort().values, rtol=1e-12, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(layers(), steps)
def test_exact_never_raises_the_true_objective(layer, t):
    """Fixed assignments majorize R: |c - mu|^2/2 + t R(x, c) at the new centers is no more than at the old ones."""
    mu, c, x = layer
    mu = mu.sort().values

    def objective(at: Tensor) -> float:
        return (((at - mu) ** 2).sum() / 2 + t * distance(x, at)).item()

    assert objective(prox_centers(mu, c, x, t)) <= objective(c) * (1 + 1e-12) + 1e-12


def test_first_order_can_overshoot_and_exact_cannot():
    c, x = torch.tensor([0.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    kappa = 10.0
    exact, first_order = (prox_centers(c, c, x, 2 * kappa, rule) for rule in ("exact", "first_order"))
    assert (exact.item(), first_order.item()) == (1, 10)
    before = center_objective(c, c, x, kappa)
    assert center_objective(exact, c, x, kappa) < before < center_objective(first_order, c, x, kappa)


def test_first_order_and_paper_by_hand():
    c, mu = torch.tensor([0.0, 4.0]), torch.tensor([0.25, 4.5])
    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.5, 4.0, 5.0])  # 3 above and 1 below 0, 1 above 4
    assert prox_centers(mu, c, x, 0.25, "first_order").tolist() == [0.25 + 0.125 * 2, 4.5 + 0.125]
    assert prox_centers(mu, c, x, 0.25, "paper").tolist() == [0.25 - 0.125 * 2, 4.5 - 0.125]
    assert torch.equal(prox_centers(mu, c, x, 0.25, "paper", codes=assign(x, c)), prox_centers(mu, c, x, 0.25, "paper"))


@pytest.mark.parametrize("rule", ["exact", "first_order", "paper"])
def test_a_center_without_weights_keeps_mu_and_the_result_is_sorted(rule):
    c = torch.tensor([-9.0, 0.0, 9.0])
    mu = torch.tensor([5.0, 0.0, -5.0])
    assert prox_centers(mu, c, torch.zeros(4), 0.5, rule).tolist() == [-5, 0, 5]
    assert prox_centers(mu, c, torch.ones(4), 0.0, rule).tolist() == [-5, 0, 5]
    assert prox_centers(mu, c, torch.zeros(0), 0.5, rule).tolist() == [-5, 0, 5]


def test_a_pile_on_the_center_holds_it_until_the_gradient_outweighs_it():
    c, x = torch.tensor([0.5], dtype=torch.float64), torch.full((100,), 0.5, dtype=torch.float64)
    assert prox_centers(c + 0.9, c, x, 0.02).item() == 0.5  # kappa n = 1 swallows a step of 0.9
    assert prox_centers(c + 1.5, c, x, 0.02).item() == pytest.approx(1.0)
    assert prox_centers(c - 1.5, c, x, 0.02).item() == pytest.approx(0.0)


@pytest.mark.parametrize("t", [1e-9, 1e-7, 1e-5, 1.0])
@pytest.mark.parametrize("piled", [0.0, 0.9])
def test_a_million_weights(t, piled):
    """0 lies in the subdifferential: [c - mu + kappa (#< - #>=), c - mu + kappa (#<= - #>)]; float32 agrees."""
    g = torch.Generator().manual_seed(0)
    x = (0.05 * torch.randn(1_000_000, generator=g)).double()
    c = torch.tensor([-0.1, -0.03, 0.02, 0.09]).double()
    x = torch.where(torch.rand(len(x), generator=g) < piled, hard(x, c), x)
    mu = c + torch.tensor([0.01, -0.002, 0.02, -0.03], dtype=torch.float64)
    new, codes, kappa = prox_centers(mu, c, x, t), assign(x, c), t / 2
    assert bool((new.diff() > 0).all())  # so that sorting has not changed who is who
    for j in range(4):
        cluster, at = x[codes == j], new[j]
        below, upto = (cluster < at).sum(), (cluster <= at).sum()
        tolerance = 1e-15 * len(cluster)
        assert at - mu[j] + kappa * (2 * below - len(cluster)).double() <= tolerance
        assert at - mu[j] + kappa * (2 * upto - len(cluster)).double() >= -tolerance
    single = prox_centers(mu.float(), c.float(), x.float(), t)
    torch.testing.assert_close(single.double(), new, rtol=0, atol=1e-7)


def test_plus_brings_centers_to_their_weights_and_the_printed_minus_drives_them_away():
    x = 0.05 * torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.tensor([-0.06, 0.06], dtype=torch.float64)
    end = {}
    for rule in ("exact", "first_order", "paper"):
        c = start
        for _ in range(400):
            c = prox_centers(c, c, x, 1e-7, rule)
        end[rule] = distance(x, c).item()
    assert end["exact"] < end["first_order"] * 1.001
    assert end["first_order"] < 0.8 * distance(x, start).item()
    assert end["paper"] > 2 * distance(x, start).item()


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule must be one of exact, first_order, paper, not 'mean'"):
        prox_centers(torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0, "mean")


@pytest.mark.parametrize("pull", [math.inf, math.nan, 1e39])
def test_a_pull_beyond_all_numbers_does_not_raise(pull):
    """Of centers that run away: all weights at their centers, or no numbers at all; one client as in a stack."""
    y, c = torch.tensor([-3.0, 0.2, 5.0]), torch.tensor([-1.0, 1.0])
    found = prox_weights(y, c, pull)
    expected = torch.full((3,), math.nan) if math.isnan(pull) else torch.tensor([-1.0, 1.0, 1.0])
    torch.testing.assert_close(found, expected, equal_nan=True)
    stacked = prox_weights(y[None], c[None], torch.tensor([[pull]], dtype=torch.float64))
    torch.testing.assert_close(stacked[0], expected, equal_nan=True)
    assert torch.equal(torch.isnan(prox_weights(y, c, pull, out=y)), torch.isnan(expected))
