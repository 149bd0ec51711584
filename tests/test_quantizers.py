"""The paper's quantizer and its fine-tuning against their formulas, in plain Python or by autograd, per layer and per
channel."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Follow, Schedule
from qupel.parts.base import State
from qupel.parts.methods.local import Local
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from toy import (
    CHANNELS,
    LAYER,
    LAYOUT,
    QUADRATIC,
    QUANTIZED,
    STILL,
    WIDE,
    A,
    B,
    C,
    S,
    W,
    X,
    close,
    every,
    exact_center,
    gradient,
    local,
    name,
    nearest,
    problem,
    prox_weight,
    quadratic,
    state,
    stepped,
    wavy,
)


def by_channel(c=C, x=X) -> State:
    return State(x.clone(), W.clone(), Codebook((LAYER,), (c.clone(),), (S.clone(),)))


# --- prox: center gradients ---


def center_step(**settings):
    """Centers after one step that leaves x alone (eta1 = 0) and has no center prox."""
    method = local(Prox(eta2=Schedule(0.1), **STILL, **settings), eta1=Schedule(0.0))
    return stepped(method, state()).codebook.centers[0]


def test_sum_mean_and_clip():
    x, a, b, c = X.tolist(), A.tolist(), B.tolist(), C.tolist()
    owned = [[k for k in QUANTIZED if nearest(x[k], c) == j] for j in range(3)]
    h = [sum(a[k] * (c[j] - b[k]) for k in owned[j]) for j in range(3)]
    n = [len(o) for o in owned]
    assert n == [2, 2, 2]
    close(center_step(), [c[j] - 0.1 * h[j] for j in range(3)])
    close(center_step(center_gradient="mean"), [c[j] - 0.1 * h[j] / n[j] for j in range(3)])
    bound = 0.2
    assert any(abs(v) > bound for v in h)
    assert any(abs(v) < bound for v in h)
    close(center_step(clip=bound), [c[j] - 0.1 * min(max(h[j], -bound), bound) for j in range(3)])


def test_a_dead_center_stays_where_it_is():
    c = torch.tensor([-50.0, -0.8, 0.1, 1.0, 60.0]).double()
    for rule in ("exact", "first_order"):
        q = Prox(eta2=Schedule(0.1), lam=Schedule(1.0), lam_c=Schedule(1.0), center_gradient="mean", rule=rule)
        s = stepped(local(q), state(c=c))
        assert s.codebook.centers[0][[0, 4]].tolist() == [-50, 60]
        assert not torch.equal(s.codebook.centers[0][1:4], c[1:4])


def test_centers_are_sorted_after_every_step():
    """A step so long that two centers change places."""
    c = torch.tensor([-0.1, 0.0, 0.1]).double()
    method = local(Prox(eta2=Schedule(5.0), **STILL), eta1=Schedule(0.0))
    s = state(c=c)
    crossed = False
    for _ in range(3):
        before = s.codebook.centers[0]
        x, a, b = s.x.tolist(), A.tolist(), B.tolist()
        centers = before.tolist()
        h = [sum(a[k] * (centers[j] - b[k]) for k in QUANTIZED if nearest(x[k], centers) == j) for j in range(3)]
        raw = [centers[j] - 5.0 * h[j] for j in range(3)]
        crossed |= raw != sorted(raw)
        s = stepped(method, s)
        close(s.codebook.centers[0], sorted(raw))
    assert crossed


def test_carry_moves_the_weights_that_sit_on_a_center():
    x = X.clone()
    x[1], x[2], x[3] = C[0], C[1], C[1]  # on their centers
    q = Prox(eta2=Schedule(0.1), lam=Schedule(0.0), lam_c=Schedule(0.5), carry=True)
    s = stepped(local(q, eta1=Schedule(0.0)), state(x=x))
    c, moved = C.tolist(), s.codebook.centers[0]
    a, b = A.tolist(), B.tolist()
    expected = []
    for j in range(3):
        mine = [k for k in QUANTIZED if nearest(float(x[k]), c) == j]
        mu = c[j] - 0.1 * sum(a[k] * (c[j] - b[k]) for k in mine)
        expected.append(exact_center(mu, [float(x[k]) for k in mine if float(x[k]) != c[j]], 0.1 * 0.5 / 2))
    close(moved, expected)
    assert not torch.equal(moved, C)
    assert [s.x[1], s.x[2], s.x[3]] == [moved[0], moved[1], moved[1]]
    rest = [0, 4, 5, 6, 7]
    assert torch.equal(s.x[rest], x[rest])


def test_without_carry_a_center_can_freeze_under_its_weights_and_carry_frees_it():
    """All weights on one center: a gradient below n lambda / 2 cannot move it; with carry it can."""
    c = torch.tensor([0.0, 10.0]).double()
    x = torch.zeros(8).double()
    push = problem(lambda v: 0.125 * v.sum(-1))
    frozen = Prox(eta2=Schedule(0.1), lam=Schedule(0.0), lam_c=Schedule(1.0))
    s = stepped(local(frozen, eta1=Schedule(0.0)), state(x=x, c=c), push)
    assert s.codebook.centers[0].tolist() == [0, 10]
    s = stepped(local(replace(frozen, carry=True), eta1=Schedule(0.0)), state(x=x, c=c), push)
    close(s.codebook.centers[0], [-0.075, 10])
    close(s.x[1:7], [-0.075] * 6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_carry_moves_the_weights_that_sit_on_a_level_of_their_channel(seed):
    """float32: x / s is rounded, yet what sits on its level is known for it and goes along."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, generator=g)
    book = start_codebook(LAYOUT, x, CHANNELS, "range")
    x = book.hard(x)
    x[3] += 0.01
    method = local(Prox(eta2=Schedule(0.1), lam=Schedule(0.0), lam_c=Schedule(0.0), carry=True), eta1=Schedule(0.0))
    s = stepped(method, State(x, x, book), problem(lambda v: (v * torch.arange(8)).sum(-1) / 9))
    assert not torch.equal(s.codebook.centers[0], book.centers[0])
    on = torch.arange(8) != 3
    if bool((s.codebook.centers[0].diff() > 0.05).all()):  # else centers have crossed
        assert torch.equal(s.x[on], s.codebook.hard(s.x)[on])
    assert bool((s.x != x)[[1, 2, 4, 5, 6]].any())
    torch.testing.assert_close(s.x[3], x[3], rtol=1e-6, atol=0)


def test_follow_and_travel_are_used_per_layer():
    """Follow: 1 half-gap for a center with an average share of the weights; here all six above their center."""
    c = torch.tensor([-2.0, 0.0, 2.0]).double()
    x = torch.tensor([0.0, -1.5, -1.5, 0.5, 0.5, 2.5, 2.5, 0.0]).double()
    q = Prox(eta2=Schedule(1e-9), lam=Schedule(0.0), lam_c=Follow(0.25))
    s = stepped(local(q, eta1=Schedule(0.0)), state(x=x, c=c))
    torch.testing.assert_close(s.codebook.centers[0], c + 0.25, rtol=0, atol=1e-6)


def test_a_codebook_of_the_phase_before_is_kept_if_it_fits_the_plan():
    q = Prox(init="range")
    before = state()
    book = before.codebook
    assert q.start(before, Plan({"q": 3}), LAYOUT)[1] is book
    assert len(q.start(before, Plan({"q": 4}), LAYOUT)[1].centers[0]) == 4
    assert not q.start(before, Plan(), LAYOUT)[1]
    scaled = q.start(before, Plan({"q": 3}, channels=True), LAYOUT)[1]  # the same levels, but no scales
    assert len(scaled.scales) == 1
    assert q.start(replace(before, codebook=scaled), Plan({"q": 3}, channels=True), LAYOUT)[1] is scaled
    assert not q.start(replace(before, codebook=scaled), Plan({"q": 3}), LAYOUT)[1].scales


# --- prox: soft mode ---


def soft(x, c, P):
    """Q~ as MATH.md prints it."""
    q = c[0] + 0 * x
    for j in range(1, len(c)):
        q = q + (c[j] - c[j - 1]) * torch.sigmoid(P * (x - (c[j] + c[j - 1]) / 2))
    return q


@pytest.mark.parametrize("scales", [None, S], ids=["layers", "channels"])
@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-2, 2), min_size=8, max_size=8),
    centers=st.lists(st.floats(-2, 2, width=16), min_size=2, max_size=4, unique=True).map(sorted),
    sharpness=st.floats(1, 20),
)
def test_soft_mode_descends_the_objective(scales, values, centers, sharpness):
    """x step: the gradient of f(x) + f(Q~_c(x)); then the c step: that of f(Q~_c(x)) at the new x, by autograd. With
    channels Q~(x) = s Q~_c(x / s)."""
    x, c = torch.tensor(values, dtype=torch.float64), torch.tensor(centers, dtype=torch.float64)
    P = float(sharpness * (len(c) - 1) / (c[-1] - c[0]))
    eta1, eta2 = 0.1, 0.01
    q = Prox(eta2=Schedule(eta2), **STILL, mode="soft", sharpness=sharpness)
    before = state(x=x, c=c) if scales is None else by_channel(c, x)
    s = stepped(local(q, eta1=Schedule(eta1)), before, problem(wavy))
    unit = torch.ones(6).double() if scales is None else WIDE

    def quantized(x, c):
        return torch.cat([x[:1], unit * soft(x[1:7] / unit, c, P), x[7:]])

    leaf = x.clone().requires_grad_()
    (wavy(leaf) + wavy(quantized(leaf, c))).backward()
    new = x - eta1 * leaf.grad
    torch.testing.assert_close(s.x, new, rtol=1e-9, atol=1e-9)
    leaf = c.clone().requires_grad_()
    wavy(quantized(new, leaf)).backward()
    torch.testing.assert_close(s.codebook.centers[0], (c - eta2 * leaf.grad).sort().values, rtol=1e-8, atol=1e-8)


def test_a_given_P_is_the_steepness_whatever_the_centers():
    q = Prox(mode="soft", P=3.0, sharpness=99.0)
    expected = [X[0], *soft(X[1:7], C, 3.0), X[7]]
    close(q.quantized(X, state().codebook), expected)


# --- prox: channels ---


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_hard_prox_by_channel(lam):
    """In units of the channel's scale: weights go t/2 to their center, centers take the gradients of s c."""
    q = Prox(eta2=Schedule(0.05), lam=Schedule(lam), lam_c=Schedule(0.4))
    s = stepped(local(q), by_channel())
    c, unit, a, b = C.tolist(), [1.0, *WIDE.tolist(), 1.0], A.tolist(), B.tolist()
    y = [X[k].item() - 0.1 * a[k] * (X[k].item() - b[k]) for k in range(8)]
    u = [prox_weight(y[k] / unit[k], c, 0.1 * lam) if k in QUANTIZED else y[k] for k in range(8)]
    close(s.x, [u[k] * unit[k] for k in range(8)])
    owner = {k: nearest(u[k], c) for k in QUANTIZED}
    new = []
    for j in range(3):
        mine = [k for k in QUANTIZED if owner[k] == j]
        h = sum(unit[k] * a[k] * (unit[k] * c[j] - b[k]) for k in mine)  # d f(s c) / dc
        new.append(exact_center(c[j] - 0.05 * h, [u[k] for k in mine], 0.05 * 0.4 / 2))
    close(s.codebook.centers[0], sorted(new))
    assert torch.equal(s.codebook.scales[0], S)


@pytest.mark.parametrize("quantizer", every(quantizers), ids=name)
def test_channels_of_scale_one_are_no_channels(quantizer):
    """Same bits after five steps."""
    plain = state()
    ones = replace(plain, codebook=Codebook((LAYER,), (C.clone(),), (torch.ones(2).double(),)))
    method = local(quantizer)
    for _ in range(5):
        plain, ones = stepped(method, plain), stepped(method, ones)
        assert torch.equal(plain.x, ones.x)
        assert torch.equal(plain.codebook.centers[0], ones.codebook.centers[0])
    assert torch.equal(method.deployed(plain).x, method.deployed(ones).x)


# --- frozen assignments ---


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["sum", "mean"]), st.booleans(), st.booleans())
def test_frozen_freezes_every_assignment(seed, kind, adam, channels):
    """Weights that share a center share it for ever, also when centers cross, and sit on it exactly."""
    g = torch.Generator().manual_seed(seed)
    method = Local(
        optimizer=Adam() if adam else SGD(momentum=0.9), quantizer=Frozen(eta2=Schedule(0.3), center_gradient=kind)
    )
    scales = (torch.tensor([0.3, 1.7]),) if channels else ()
    book = Codebook((LAYER,), (torch.randn(4, generator=g).sort().values,), scales)
    s = method.start(State(torch.randn(8, generator=g), torch.zeros(8), book), Plan(), QUADRATIC)
    before = s.codebook.assign(s.x)[0]
    for _ in range(10):
        push = torch.randn(8, generator=g)
        s = stepped(method, s, problem(lambda v, push=push: (push * v).sum(-1)))
        on = s.codebook.centers[0][:, None] * (scales[0].repeat_interleave(3) if channels else torch.ones(6))
        assert bool((s.x[1:7] == on).any(0).all())
        assert torch.equal(s.codebook.centers[0], s.codebook.centers[0].sort().values)
        now = s.codebook.assign(s.x)[0]
        assert torch.equal(now[:, None] == now, before[:, None] == before)
        assert torch.equal(method.deployed(s).x, s.x)


def test_frozen_mean_and_clip():
    for settings_, most in (({"clip": 0.01}, 0.01), ({"center_gradient": "mean", "clip": 0.01}, 0.01)):
        method = local(Frozen(eta2=Schedule(1.0), **settings_), eta1=Schedule(0.0))
        s = method.start(state(), Plan(), QUADRATIC)
        moved = stepped(method, s)
        assert (moved.codebook.centers[0] - C).abs().max() <= most + 1e-12
        assert (moved.codebook.centers[0] - C).abs().max() > 0.9 * most
    method = local(Frozen(eta2=Schedule(0.05), center_gradient="mean"))
    s = method.start(state(), Plan(), QUADRATIC)
    g, codes = gradient(s.x)[1:7], s.codebook.assign(s.x)[0]
    means = [g[codes == j].mean() for j in range(3)]
    close(stepped(method, s).codebook.centers[0], [C[j] - 0.05 * means[j] for j in range(3)])


def test_frozen_by_channel_takes_the_gradients_of_s_c():
    method = local(Frozen(eta2=Schedule(0.05)))
    s = method.start(by_channel(), Plan(), QUADRATIC)
    codes = s.codebook.assign(X)[0]
    close(s.x[1:7], WIDE * C[codes])
    leaf = C.clone().requires_grad_()
    quadratic(torch.cat([s.x[:1], WIDE * leaf[codes], s.x[7:]])).backward()
    moved = stepped(method, s)
    close(moved.codebook.centers[0], C - 0.05 * leaf.grad)
    close(moved.x[1:7], WIDE * (C - 0.05 * leaf.grad)[codes])
    close(moved.x[[0, 7]], (X - 0.1 * gradient(s.x))[[0, 7]])
