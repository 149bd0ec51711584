"""Uniform grids, BinaryConnect, TTQ, DSQ, Quantization Networks and PARQ: against their formulas, autograd and brute
force, by layer and by channel; where they become one another or hard."""

import math
import statistics
from itertools import pairwise

import pytest
import torch

from qupel.core.codebook import Codebook, Plan
from qupel.core.quantize import hard, init_centers
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import State
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryconnect import BinaryConnect
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.dsq import DSQ, staircase
from qupel.parts.quantizers.parq import PARQ, affine_prox
from qupel.parts.quantizers.quantnet import QuantNet
from qupel.parts.quantizers.ste import StraightThrough
from qupel.parts.quantizers.ttq import TTQ
from qupel.parts.quantizers.uniform import Uniform
from toy import (
    BATCH,
    CHANNELS,
    CLOCK,
    LAYER,
    LAYOUT,
    QUADRATIC,
    WIDE,
    A,
    B,
    S,
    W,
    X,
    close,
    local,
    nearest,
    problem,
    quadratic,
    state,
    stepped,
    wavy,
)

UNITS = pytest.mark.parametrize("unit", [torch.ones(6).double(), WIDE], ids=["layers", "channels"])


def begun(x, centers, unit):
    """A client with these levels; `unit`: the scale of each weight's channel."""
    scales = () if bool((unit == 1).all()) else (S.clone(),)
    return State(x.clone(), W.clone(), Codebook((LAYER,), (centers.clone(),), scales))


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def put(x, layer):
    """x with another quantized layer."""
    return torch.cat([x[:1], layer, x[7:]])


# --- uniform, BinaryConnect ---


def test_uniform_by_formula():
    """A min-max grid that stays where it was; the gradient at Q(x) moves x as it is."""
    method = local(Uniform())
    s = method.start(state(c=None), Plan({"q": 4}), QUADRATIC)
    c, x = torch.linspace(-0.9, 1.4, 4).double(), X
    for _ in range(6):
        s = stepped(method, s)
        q = put(x, torch.stack([c[nearest(float(v), c.tolist())] for v in x[1:7]]))
        x = x - 0.1 * A * (q - B)
        close(s.x, x)
        torch.testing.assert_close(s.codebook.centers[0], c)
    close(method.deployed(s).x, put(x, torch.stack([c[nearest(float(v), c.tolist())] for v in x[1:7]])))


def test_straight_through_whose_levels_rest_is_uniform():
    """To the bit."""
    one, other = local(Uniform()), local(StraightThrough(eta2=Schedule(0.0), lloyd=0, init="range"))
    a, b = (m.start(state(c=None), Plan({"q": 4}), QUADRATIC) for m in (one, other))
    for _ in range(5):
        a, b = stepped(one, a), stepped(other, b)
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.codebook.centers[0], b.codebook.centers[0])


@pytest.mark.parametrize(("scale", "expected"), [("layer", float(X[1:7].abs().mean())), ("one", 1.0)])
def test_binaryconnect_by_formula(scale, expected):
    """Signs times s in every pass, and a real model that never leaves -s .. s."""
    method = local(BinaryConnect(scale))
    s = method.start(state(c=None), Plan({"q": 2}), QUADRATIC)
    x = put(X, X[1:7].clamp(-expected, expected))
    for _ in range(12):
        close(s.x, x)
        close(s.codebook.centers[0], [-expected, expected])
        close(method.deployed(s).x, put(x, expected * torch.sign(x[1:7])))
        s = stepped(method, s)
        y = x - 0.1 * A * (put(x, expected * torch.sign(x[1:7])) - B)
        x = put(y, y[1:7].clamp(-expected, expected))
    assert bool((x[1:7].abs() == expected).any())


def test_binaryconnect_with_more_levels_is_an_even_grid_to_the_largest_weight():
    _, book = BinaryConnect().start(state(c=None), Plan({"q": 4}), LAYOUT)
    torch.testing.assert_close(book.centers[0], torch.linspace(-1.4, 1.4, 4).double())
    x, wide = BinaryConnect().start(state(c=None), CHANNELS, LAYOUT)
    torch.testing.assert_close(x, X)
    close(wide.centers[0][-1], (X[1:7] / wide.scales[0].repeat_interleave(3)).abs().max())


# --- TTQ ---


@UNITS
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_ttq_by_formula(unit, how):
    """Zhu et al., eq. 6 to 8, weight by weight: levels by thresholds, the gradients of both levels, the scaled one."""
    method = local(TTQ(threshold=0.3, eta2=Schedule(0.02), center_gradient=how))
    centers = torch.tensor([-0.7, 0.0, 0.4], dtype=torch.float64)
    s, x, (n, p), f = begun(X, centers, unit), X.clone(), (0.7, 0.4), problem(wavy)
    for _ in range(5):
        u = (x[1:7] / unit).tolist()
        D = 0.3 * max(map(abs, u))
        side = [1 if v > D else -1 if v < -D else 0 for v in u]
        level = torch.tensor([{1: p, 0: 0.0, -1: -n}[k] for k in side], dtype=torch.float64)
        leaf = put(x, unit * level).requires_grad_()
        wavy(leaf).backward()
        g = leaf.grad[1:7] * unit  # in units of the channel
        factor = torch.tensor([{1: p, 0: 1.0, -1: n}[k] for k in side], dtype=torch.float64)
        s, info = method.step(s, f, BATCH, CLOCK)
        x = x - 0.1 * put(leaf.grad, g * factor / unit)
        up, down = ([float(v) for v, k in zip(g, side, strict=True) if k == j] for j in (1, -1))
        many = sum if how == "sum" else statistics.fmean
        p, n = p - 0.02 * (many(up) if up else 0.0), n + 0.02 * (many(down) if down else 0.0)
        close(s.x, x)
        close(s.codebook.centers[0], [-n, 0.0, p])
        assert info.quantized_loss == pytest.approx(float(wavy(leaf.detach())))
    assert len(set(side)) == 3


def test_ttq_has_three_levels_at_most_and_starts_at_their_means():
    x = X[1:7].tolist()
    D = 0.05 * 1.4
    for levels in (4, 8):
        _, book = TTQ().start(state(c=None), Plan({"q": levels}), LAYOUT)
        above, below = ([v for v in x if v > D], [v for v in x if v < -D])
        close(book.centers[0], [statistics.fmean(below), 0.0, statistics.fmean(above)])
    _, two = TTQ().start(state(c=None), Plan({"q": 2}), LAYOUT)
    close(two.centers[0], [statistics.fmean(v for v in x if v < 0), statistics.fmean(v for v in x if v > 0)])


def test_ttq_ships_what_it_was_trained_on_and_not_the_nearest_level():
    method, s = local(TTQ(threshold=0.3)), begun(X, torch.tensor([-5.0, 0.0, 5.0]).double(), torch.ones(6).double())
    model = method.deployed(s)
    assert model.x[1:7].tolist() == [-5, 0, 5, 0, 0, 5]  # |x| above 0.42
    assert torch.equal(model.codebook.hard(model.x), model.x)
    assert not torch.equal(s.codebook.hard(s.x), model.x)


def test_ttq_levels_never_change_sides():
    method = local(TTQ(eta2=Schedule(100.0), center_gradient="sum"))
    s = method.start(state(c=None), Plan({"q": 4}), QUADRATIC)
    for _ in range(3):
        s = stepped(method, s)
        low, zero, high = s.codebook.centers[0].tolist()
        assert low < 0 == zero < high


# --- DSQ ---


def soft_staircase(x, low, high, m, alpha):
    """Gong et al., eq. 3 to 8, for autograd: k from alpha, the piece x is in, tanh within it."""
    d = (high - low) / (m - 1)
    k = math.log(2 / alpha - 1) / d
    s = 1 / torch.tanh(0.5 * k * d)
    clipped = torch.minimum(torch.maximum(x, low), high)
    i = ((clipped - low) / d).detach().floor().clamp(0, m - 2)
    phi = s * torch.tanh(k * (clipped - (low + (i + 0.5) * d)))
    return low + d * (i + (phi + 1) / 2)


@UNITS
@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_dsq_is_autograd_through_the_soft_staircase_at_the_hard_levels(m, unit, seed):
    x = 1.5 * drawn(seed, 8)
    ends = torch.tensor([-1.1, 0.9]).double()
    c = ends[0] + (ends[1] - ends[0]) * torch.arange(m).double() / (m - 1)
    s = begun(x, c, unit)
    at_q = s.codebook.hard(x).requires_grad_()
    value = wavy(at_q)
    value.backward()
    leaf, low, high = x.clone().requires_grad_(), *(e.clone().requires_grad_() for e in ends)
    q = put(leaf, unit * soft_staircase(leaf[1:7] / unit, low, high, m, 0.3))
    q.backward(at_q.grad)
    after, info = local(DSQ(Schedule(0.3)), eta1=Schedule(0.02)).step(s, problem(wavy), BATCH, CLOCK)
    close(after.x, x - 0.02 * leaf.grad)
    root = math.sqrt(6 * (m - 1))
    close(after.codebook.centers[0][[0, -1]], ends - 0.02 * torch.stack([low.grad, high.grad]) / root)
    torch.testing.assert_close(after.codebook.centers[0].diff(), after.codebook.centers[0].diff().mean().expand(m - 1))
    assert info.quantized_loss == pytest.approx(value.item())


def test_dsq_becomes_straight_through_and_hard():
    """alpha to 1: the identity within the grid, slope 1; alpha to 0: the staircase."""
    z = torch.linspace(-1, 4, 201).double()
    h, slope = staircase(z, 3, 1 - 1e-9)
    torch.testing.assert_close(h, z.clamp(0, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(slope, ((z >= 0) & (z <= 3)).double(), rtol=0, atol=1e-5)
    h, _ = staircase(z, 3, 1e-12)
    away = ((z - z.floor()) - 0.5).abs() > 0.2
    torch.testing.assert_close(h[away], z[away].round().clamp(0, 3), rtol=0, atol=1e-4)
    one, other = local(DSQ(Schedule(1.0))), local(Uniform())
    a, b = (m.start(state(c=None), Plan({"q": 4}), QUADRATIC) for m in (one, other))
    torch.testing.assert_close(stepped(one, a).x, stepped(other, b).x, rtol=0, atol=1e-5)


# --- Quantization Networks ---


@UNITS
def test_quantnet_is_autograd_through_the_sum_of_sigmoids(unit):
    x, c = 1.5 * drawn(3, 8), torch.tensor([-1.0, -0.2, 0.5, 1.1]).double()
    leaf, centers = x.clone().requires_grad_(), c.clone().requires_grad_()
    gap = float(c[-1] - c[0]) / 3
    u, q = leaf[1:7] / unit, centers[0].expand(6)
    for low, high in pairwise(centers):
        q = q + (high - low) * torch.sigmoid(6.0 / gap * (u - (low + high) / 2))
    value = wavy(put(leaf, unit * q))
    value.backward()
    s = begun(x, c, unit)
    after, info = local(QuantNet(Schedule(growth=3.0)), eta1=Schedule(0.02)).step(s, problem(wavy), BATCH, CLOCK)
    close(after.x, x - 0.02 * leaf.grad)
    owners = [nearest(float(v), c.tolist()) for v in (x[1:7] / unit)]
    sizes = torch.tensor([max(owners.count(j), 1) for j in range(4)])
    close(after.codebook.centers[0], (c - 0.02 * centers.grad / sizes).sort().values)
    assert info.more == {"soft_loss": pytest.approx(value.item())}


def test_quantnet_ends_in_hard_levels():
    """As the temperature grows its loss becomes that at Q(x)."""
    s = begun(X, torch.tensor([-0.8, 0.1, 1.0]).double(), torch.ones(6).double())
    at_q = quadratic(s.codebook.hard(X)).item()
    told = [local(QuantNet(Schedule(T))).step(s, QUADRATIC, BATCH, CLOCK)[1].more["soft_loss"] for T in (4.0, 1e3, 1e6)]
    assert abs(told[0] - at_q) > 1e-3
    assert told[2] == pytest.approx(at_q, abs=1e-12)
    assert QuantNet().temperature(9) > QuantNet().temperature(1)


# --- PARQ ---


@pytest.mark.parametrize("r", [1.0, 0.6, 0.2, 0.01])
def test_the_proximal_map_of_parq_by_brute_force(r):
    """It minimizes (x - u)^2/2 + R(x) for the R whose slope at x is u - x: between two levels with middle m the map has
    x = m + (u - m)/r, so R'(x) = (1 - r)(m - x). Integrated and minimized on a grid."""
    c = torch.tensor([-1.0, 0.0, 1.5]).double()
    grid = torch.linspace(-1.0, 1.5, 5001).double()
    slopes = torch.zeros_like(grid)
    for low, high in pairwise(c.tolist()):
        inside = (grid > low) & (grid < high)
        slopes[inside] = (1 - r) * ((low + high) / 2 - grid[inside])
    penalty = torch.cat([torch.zeros(1).double(), torch.cumulative_trapezoid(slopes, grid)])
    u = torch.linspace(-1.4, 2.0, 69).double()
    best = grid[((grid[None] - u[:, None]).square() / 2 + penalty).argmin(1)]
    got = affine_prox(u, c, r)
    jumps = torch.tensor([bool((u_ - c).abs().min() < 0.02 and r < 1) for u_ in u])
    torch.testing.assert_close(got[~jumps], best[~jumps], rtol=0, atol=2e-3)


def test_parq_bends_from_the_identity_into_the_staircase():
    u, c = torch.linspace(-2, 3, 101).double(), torch.tensor([-1.0, 0.0, 1.5]).double()
    torch.testing.assert_close(affine_prox(u, c, 1.0), u.clamp(-1, 1.5))
    near = torch.stack([c[nearest(float(v), c.tolist())] for v in u])
    away = ((u[:, None] - torch.tensor([-0.5, 0.75]).double()).abs() > 0.02).all(1)
    torch.testing.assert_close(affine_prox(u, c, 1e-9)[away], near[away])
    for r in (0.9, 0.4):  # monotone, levels stay, and each piece is flat but for slope 1/r around its middle
        x = affine_prox(u, c, r)
        assert bool((x.diff() >= 0).all())
        assert torch.equal(affine_prox(c, c, r), c)
    stack = affine_prox(torch.stack([u, u / 2]), torch.stack([c, 2 * c]), 0.4)
    close(stack[0], affine_prox(u, c, 0.4))
    close(stack[1], affine_prox(u / 2, 2 * c, 0.4))


def test_parq_anneals_over_its_phase():
    q = PARQ(steepness=10.0, begin=0.2, end=0.8)
    seen = [q.inverse_slope(Clock(step, 100, 10)) for step in range(100)]
    assert seen[:21] == [1.0] * 21
    assert seen[80:] == [0.0] * 20
    assert all(a > b for a, b in pairwise(seen[20:81]))
    assert seen[50] == pytest.approx(0.5)
    for bad in ({"begin": 0.9, "end": 0.5}, {"steepness": 0.0}):
        with pytest.raises(ValueError, match="before end"):
            PARQ(**bad)


@UNITS
def test_parq_by_formula(unit):
    """The latent model takes the gradient at its proximal point; 1 bit: signs times the mean |y|."""
    method = local(PARQ(begin=0.0, end=1.0))
    s, y = begun(X, torch.tensor([-0.5, 0.5]).double(), unit), X
    c = [-0.5, 0.5]
    for step in range(8):
        clock = Clock(step, 8, 4)
        r = PARQ(begin=0.0, end=1.0).inverse_slope(clock)
        u = (y[1:7] / unit).clamp(*c)  # between the two levels; their middle is 0
        q = (u / r).clamp(*c) if r else torch.sign(u) * c[1]
        y = y - 0.1 * A * (put(y, unit * q) - B)
        s = stepped(method, s, clock=clock)
        close(s.x, y)
        scale = float((y[1:7] / unit).abs().mean())
        c = [-scale, scale]
        close(s.codebook.centers[0], c)


def test_parq_at_its_end_is_straight_through_on_signs():
    """r = 0: the gradient at Q(y), to the bit that of BinaryRelax without a bound."""
    one, other = local(PARQ(end=0.1)), local(BinaryRelax(Schedule(math.inf)))
    a, b = (m.start(state(c=None), Plan({"q": 4}), QUADRATIC) for m in (one, other))
    for step in range(5, 9):
        a, b = (stepped(m, s, clock=Clock(step, 10, 5)) for m, s in ((one, a), (other, b)))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.codebook.centers[0], b.codebook.centers[0])


def test_parq_leaves_weights_alone_until_it_begins():
    """Weights beyond the outermost levels, too: r = 1 alone would clip them."""
    method, far = local(PARQ(begin=0.5, end=1.0)), torch.tensor([-0.1, 0.1]).double()
    s = begun(X, far, torch.ones(6))
    for step, at in ((4, X), (5, put(X, X[1:7].clamp(*far.tolist())))):
        close(stepped(method, s, clock=Clock(step, 10, 5)).x, X - 0.1 * A * (at - B))


@pytest.mark.parametrize("step", [5, 10, 25, 40, 60])
def test_parq_is_torchaos(step):
    optim = pytest.importorskip("torchao.prototype.parq.optim")
    theirs, u = optim.ProxPARQ(anneal_start=5, anneal_end=50, steepness=10), drawn(0, 200).float()
    Q, ours, p = torch.tensor([-1.5, -0.4, 0.3, 1.2]), PARQ(10.0, 5 / 100, 50 / 100), u.clone()
    slope = theirs.apply_(p, None, Q, step)
    r = ours.inverse_slope(Clock(step, 100, 10))
    assert r == pytest.approx(slope)
    torch.testing.assert_close(p, affine_prox(u, Q, r) if r else hard(u, Q))


# --- ACIQ afterwards ---


def test_aciq_is_a_setting_of_afterwards():
    method = local(Afterwards("aciq"))
    s = method.start(state(c=None), Plan({"q": 4}), QUADRATIC)
    for _ in range(3):
        s = stepped(method, s)
    model = method.deployed(s)
    close(model.codebook.centers[0], init_centers(s.x[1:7], how="aciq", levels=4))
    assert set(model.x[1:7].tolist()) <= set(model.codebook.centers[0].tolist())
