"""Quantizers against brute force and autograd; first centers against their definitions."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from qupel.core import quantize

coarse = st.integers(-16, 16).map(lambda k: k / 8)  # ties and duplicates are common, arithmetic is exact
fine = st.floats(-4, 4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30)
numbers = st.one_of(st.lists(coarse, min_size=1, max_size=20), st.lists(fine, min_size=1, max_size=20))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_centers(seed: int, m: int) -> torch.Tensor:
    return drawn(seed, m).sort().values


# --- hard ---


@settings(max_examples=300, deadline=None)
@given(numbers, numbers, st.sampled_from([torch.float32, torch.float64]))
def test_assign_is_the_exact_nearest_center_and_ties_go_low(weights, centers, dtype):
    x, c = torch.tensor(weights, dtype=dtype), torch.tensor(sorted(centers), dtype=dtype)
    x = torch.cat([x, quantize.boundaries(c).nan_to_num(0, 4, -4), c])  # and the hardest places
    exact = [Fraction(v) for v in c.tolist()]
    expected = [min(range(len(c)), key=lambda j: (abs(Fraction(v) - exact[j]), j)) for v in x.tolist()]
    assert quantize.assign(x, c).tolist() == expected


def test_assign_by_hand():
    c = torch.tensor([-1.0, 0.0, 2.0])
    x = torch.tensor([-9.0, -0.5, -0.4999, 0.0, 1.0, 1.0001, 9.0])
    codes = quantize.assign(x, c)
    assert codes.tolist() == [0, 0, 1, 1, 1, 2, 2]  # -0.5 and 1 are ties
    assert codes.dtype == torch.int64
    assert quantize.hard(x, c).tolist() == [-1, -1, 0, 0, 0, 2, 2]


def test_of_equal_centers_the_first_takes_all():
    x, c = torch.tensor([0.0, 1.5, 2.0, 2.5, 9.0]), torch.tensor([1.0, 1.0, 3.0, 3.0])
    assert quantize.assign(x, c).tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("m", [1, 2, 3, 31, 32, 33, 256])
def test_both_ways_to_assign_agree(m):
    x, c = drawn(0, 5_000).float(), spread_centers(1, m).float()
    assert torch.equal(quantize.assign(x, c), torch.bucketize(x, quantize.boundaries(c)))
    assert torch.equal(quantize.assign(x, c), (x.double()[:, None] - c.double()).abs().argmin(1))


def test_no_weights():
    c = torch.tensor([0.0, 1.0])
    codes = quantize.assign(torch.zeros(0), c)
    assert codes.shape == (0,)
    assert quantize.dead_centers(codes, 2).tolist() == [0, 1]


@settings(max_examples=50, deadline=None)
@given(numbers, numbers, coarse)
def test_assign_moves_and_scales_with_weights_and_centers(weights, centers, shift):
    x = torch.tensor([round(v * 8) / 8 for v in weights])
    c = torch.tensor(sorted(round(v * 8) / 8 for v in centers))
    codes = quantize.assign(x, c)
    assert torch.equal(quantize.assign(x + shift, c + shift), codes)
    assert torch.equal(quantize.assign(4 * x, 4 * c), codes)


def test_center_gradient_is_that_of_hard():
    x, u = drawn(0, 1_000), drawn(1, 1_000)
    c = spread_centers(2, 5).requires_grad_()
    (expected,) = torch.autograd.grad(quantize.hard(x, c) @ u, c)
    codes = quantize.assign(x, c)
    torch.testing.assert_close(quantize.center_gradient(u, codes, 5), expected)
    by_hand = torch.stack([u[codes == j].sum() for j in range(5)])
    torch.testing.assert_close(quantize.center_gradient(u, codes, 5), by_hand)


def test_center_gradient_is_repeatable():
    u, codes = drawn(0, 200_000).float(), quantize.assign(drawn(1, 200_000), spread_centers(2, 4))
    first = quantize.center_gradient(u, codes, 4)
    assert all(torch.equal(quantize.center_gradient(u, codes, 4), first) for _ in range(5))


def test_counts_and_dead_centers():
    codes = torch.tensor([3, 1, 1, 3, 3])
    assert quantize.counts(codes, 5).tolist() == [0, 2, 0, 3, 0]
    assert quantize.dead_centers(codes, 5).tolist() == [0, 2, 4]


# --- soft ---


def soft(x, c, sharpness):
    """Q~_c(x) with P from the gap of the centers."""
    return quantize.soft_at(x, c, quantize.steepness(c, sharpness))


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("sharpness", [0.5, 4.0, 50.0])
def test_soft_gradient_is_autograd(m, sharpness):
    x, u = drawn(0, 200).requires_grad_(), drawn(1, 200)
    c = spread_centers(2, m).requires_grad_()
    P = quantize.steepness(c, sharpness)
    value = quantize.soft_at(x, c, P) @ u
    expected_x, expected_c = torch.autograd.grad(value, [x, c], allow_unused=True)
    grad_x, grad_c = quantize.soft_gradient(x, c, P, u)
    torch.testing.assert_close(grad_x, torch.zeros_like(x) if m == 1 else expected_x)
    torch.testing.assert_close(grad_c, expected_c)
    assert not grad_x.requires_grad
    assert not grad_c.requires_grad


@pytest.mark.parametrize("m", [1, 2, 5])
def test_soft_derivatives_sum_to_one_and_keep_their_bounds(m):
    x = drawn(0, 300)
    c = spread_centers(1, m)
    P = quantize.steepness(c, 6.0)
    bound = 1 + P * c.abs().max() / 4
    for k in range(len(x)):
        slope, by_center = quantize.soft_gradient(x[k : k + 1], c, P, torch.ones(1, dtype=torch.float64))
        assert math.isclose(slope.item() + by_center.sum().item(), 1, abs_tol=1e-12)  # moving all moves the value
        assert 0 <= slope <= P * (c[-1] - c[0]) / 4
        assert bool((by_center.abs() <= bound).all())


def test_soft_curvature_keeps_its_bound():
    c = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    x = torch.linspace(-2, 2, 4_001, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(quantize.soft_at(x, c, 3.0).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    bound = 3.0**2 * 2 / (6 * math.sqrt(3))
    assert 0.99 * bound < curvature.abs().max() <= bound


def test_soft_tends_to_hard_away_from_the_boundaries():
    x, c = drawn(0, 2_000), torch.tensor([-1.0, -0.2, 0.3, 1.5], dtype=torch.float64)
    far = ((x[:, None] - quantize.boundaries(c)).abs() > 0.05).all(1)
    errors = [(soft(x, c, s) - quantize.hard(x, c))[far].abs().max().item() for s in (10, 100, 1_000)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12


def test_sharpness_four_is_nearest_to_the_identity():
    c = torch.linspace(-1, 1, 9, dtype=torch.float64)
    x = torch.linspace(-0.8, 0.8, 1_001, dtype=torch.float64)
    error = {s: (soft(x, c, s) - x).abs().max().item() for s in (1, 2, 4, 8, 16, 50)}
    assert error[4] == min(error.values())


def test_steepness_is_per_mean_gap_and_constant():
    c = torch.tensor([0.0, 0.1, 1.0], requires_grad=True)
    assert quantize.steepness(c, 4.0).item() == pytest.approx(8)
    assert not quantize.steepness(c, 4.0).requires_grad


@pytest.mark.parametrize("centers", [[0.5], [0.5, 0.5, 0.5]])
def test_soft_without_a_gap_is_its_center(centers):
    c, x = torch.tensor(centers), torch.tensor([-1.0, 0.5, 7.0])
    assert soft(x, c, 4.0).tolist() == [0.5] * 3
    grad_x, grad_c = quantize.soft_gradient(x, c, quantize.steepness(c, 4.0), torch.ones(3))
    assert grad_x.tolist() == [0] * 3
    assert grad_c.sum().item() == 3


@pytest.mark.parametrize("sharpness", [0.0, -1.0, math.nan])
def test_sharpness_must_be_positive(sharpness):
    with pytest.raises(ValueError, match=f"sharpness must be greater than 0, not {sharpness}"):
        quantize.steepness(torch.tensor([0.0, 1.0]), sharpness)


# --- first centers ---


def test_init_by_hand():
    x = torch.tensor([-3.0, -1.0, 0.0, 2.0, 6.0])
    assert quantize.init_centers(x, 1).tolist() == [-2, 4]
    assert quantize.init_centers(x, 2).tolist() == [-3, 0, 3, 6]
    assert quantize.init_centers(x, 1, "range").tolist() == [-3, 6]
    assert quantize.init_centers(x, how="range", levels=1).tolist() == [1.5]
    assert quantize.init_centers(x, how="range", levels=3).tolist() == [-3, 1.5, 6]
    assert quantize.init_centers(x, 1, "quantile").tolist() == [-1, 2]
    assert quantize.init_centers(x, 1, "kmeans").tolist() == pytest.approx([-4 / 3, 4])
    assert quantize.init_centers(x + 4, 1, "signs").tolist() == pytest.approx([8 / 3, 8])  # one sign: split at 4.8


@pytest.mark.parametrize("how", quantize.INITS)
@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_init_is_sorted_and_finite_for_every_layer(how, bits, dtype):
    if how == "signs" and bits != 1:
        return
    for x in (drawn(0, 5_000), drawn(0, 1), drawn(0, 40).abs() + 1, torch.zeros(7), torch.full((50,), 0.3)):
        x = x.to(dtype)
        c = quantize.init_centers(x, bits, how)
        assert c.shape == (2**bits,)
        assert c.dtype == dtype
        assert bool((c.diff() >= 0).all())
        assert x.min() <= c[0]
        assert c[-1] <= x.max()
        if x.min() == x.max():
            assert bool((c == x[0]).all())


@pytest.mark.parametrize("m", [2, 4, 8, 16])
def test_aciq_clips_where_a_laplace_distribution_loses_least(m):
    """Of all even grids of cells within mean +- a it has the least error, up to the draw and the cells' own density;
    the published factors are 2.83, 3.89 and 5.03 for 2, 3 and 4 bits."""
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(1)).double() - 0.5
    x = 2 - 0.3 * uniform.sign() * torch.log1p(-2 * uniform.abs())
    c = quantize.init_centers(x, how="aciq", levels=m)
    b = (x - x.mean()).abs().mean()
    factor = float((c[-1] - c[0]) / 2 * m / (m - 1) / b)
    assert factor == pytest.approx(float(special.lambertw(3 * m**2).real))
    if m in (4, 8, 16):
        assert factor == pytest.approx({4: 2.83, 8: 3.89, 16: 5.03}[m], abs=0.01)
    cells = (2 * torch.arange(m) + 1 - m).double() / m
    errors = [squared_error(x, x.mean() + a * b * cells) for a in torch.linspace(0.5, 8, 76).tolist()]
    assert squared_error(x, c) < 1.05 * min(errors)
    if m > 2:
        assert squared_error(x, c) < 0.9 * squared_error(x, quantize.init_centers(x, how="range", levels=m))


def squared_error(x: torch.Tensor, c: torch.Tensor) -> float:
    return (x - quantize.hard(x, c)).square().sum().item()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(coarse, fine), min_size=1, max_size=9), st.integers(1, 4))
def test_kmeans_is_the_best_of_all_partitions(weights, m):
    x = torch.tensor(sorted(weights), dtype=torch.float64)
    best = math.inf
    for inner in itertools.combinations_with_replacement(range(len(x) + 1), m - 1):
        cuts = [0, *inner, len(x)]
        parts = [x[a:b] for a, b in itertools.pairwise(cuts) if b > a]
        best = min(best, sum(((p - p.mean()) ** 2).sum().item() for p in parts))
    assert squared_error(x, quantize.init_centers(x, how="kmeans", levels=m)) <= best + 1e-9


@pytest.mark.parametrize("m", [2, 4, 16])
def test_kmeans_beyond_its_bins_is_a_good_fixed_point(m):
    x = torch.cat([drawn(0, 20_000), 5 + 0.1 * drawn(1, 3_000)])
    c = quantize.init_centers(x, how="kmeans", levels=m)
    codes = quantize.assign(x, c)
    torch.testing.assert_close(torch.stack([x[codes == j].mean() for j in range(m)]), c)
    for how in ("range", "quantile"):
        other = quantize.init_centers(x, how=how, levels=m)
        for _ in range(100):  # Lloyd from elsewhere ends no better, but for what the bins lose
            codes = quantize.assign(x, other)
            sums, sizes = quantize.center_gradient(x, codes, m), quantize.counts(codes, m)
            other = torch.where(sizes > 0, sums / sizes.clamp(min=1), other).sort().values
        assert squared_error(x, c) <= 1.001 * squared_error(x, other)


@pytest.mark.parametrize("how", ["paper", "range", "kmeans", "quantile", "aciq"])
def test_init_moves_and_scales_with_the_weights(how):
    x = drawn(0, 3_000)
    c = quantize.init_centers(x, 3, how)
    torch.testing.assert_close(quantize.init_centers(2.5 * x + 3, 3, how), 2.5 * c + 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits must be a whole number from 1 to 8, not 0"),
        ({"bits": 9}, "not 9"),
        ({"bits": 1.5}, "not 1.5"),
        ({}, "not None"),
        ({"levels": 257}, "levels must be a whole number from 1 to 256, not 257"),
        ({"bits": 2, "how": "random"}, "how must be one of paper, range, signs, kmeans, quantile, aciq, not 'random'"),
        ({"bits": 2, "how": "signs"}, "2 levels, not 4"),
    ],
)
def test_init_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize.init_centers(torch.ones(3), **arguments)


@pytest.mark.parametrize("weights", [[], [1.0, math.nan], [math.inf]])
def test_init_needs_finite_weights(weights):
    with pytest.raises(ValueError, match="only finite"):
        quantize.init_centers(torch.tensor(weights), 2)
