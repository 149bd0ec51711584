"""One step of every quantizer against its formula, in plain Python or by autograd, per layer and per channel."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel.core.codebook import Codebook, Plan, start_codebook
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Adam
from qupel.core.quantize import init_centers
from qupel.core.schedule import Clock, Follow, Schedule
from qupel.parts.base import State
from qupel.parts.methods.local import Local
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.lsq import LSQ
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.tasks.task import ModuleTask, Problem
from test_methods import exact_center, prox_weight
from toy import (
    BATCH,
    CHANNELS,
    CLOCK,
    LAYER,
    LAYOUT,
    QUADRATIC,
    QUANTIZED,
    A,
    B,
    C,
    W,
    X,
    close,
    every,
    gradient,
    name,
    nearest,
    problem,
    quadratic,
    state,
    stepped,
    wavy,
)

STILL = {"lam": Schedule(0.0), "lam_c": Schedule(0.0)}  # no prox
S = torch.tensor([0.5, 2.0]).double()  # scales of the two channels
WIDE = S.repeat_interleave(3)  # of each weight (6,)


def local(quantizer, **settings):
    return Local(**{"eta1": Schedule(0.1)} | settings, quantizer=quantizer)


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
    """In units of the channel's scale: weights go t/2 to their center, centers take the gradients of s c and are pulled."""
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


# --- competitors ---


def test_proxquant_scales_its_signs():
    before = state(c=None)

    def centers(quantizer, levels):
        return local(quantizer).start(before, Plan({"q": levels}), QUADRATIC).codebook.centers[0]

    scale = sum(abs(v) for v in X[1:7].tolist()) / 6
    close(centers(ProxQuant(), 2), [-scale, scale])
    assert centers(ProxQuant(scale="one"), 2).tolist() == [-1, 1]
    torch.testing.assert_close(centers(ProxQuant(init="range"), 4), torch.linspace(-0.9, 1.4, 4).double())


def test_proxquant_by_formula():
    method = local(ProxQuant(lam=Schedule(growth=0.4)))
    s = method.start(state(c=None), Plan({"q": 2}), QUADRATIC)
    c = s.codebook.centers[0].tolist()
    x = X.tolist()
    for _ in range(15):
        s = stepped(method, s)
        y = [x[k] - 0.1 * float(A[k]) * (x[k] - float(B[k])) for k in range(8)]
        x = [prox_weight(y[k], c, 0.1 * 0.8) if k in QUANTIZED else y[k] for k in range(8)]
        close(s.x, x)
    assert s.codebook.centers[0].tolist() == c


@pytest.mark.parametrize("lam", [0.0, 0.7, math.inf])
def test_binaryrelax_by_formula(lam):
    """lam = 0: plain SGD on y; lam = inf: the gradient at Q(y); between: at (y + lam Q(y)) / (1 + lam)."""
    method = local(BinaryRelax(lam=Schedule(lam)))
    s = method.start(state(c=None), Plan({"q": 2}), QUADRATIC)
    y = X.tolist()
    for _ in range(15):
        scale = sum(abs(v) for v in y[1:7]) / 6
        q = [math.copysign(scale, y[k]) if k in QUANTIZED else y[k] for k in range(8)]
        x = q if math.isinf(lam) else [(y[k] + lam * q[k]) / (1 + lam) for k in range(8)]
        close(s.codebook.centers[0], [-scale, scale])
        close(method.deployed(s).x, q)
        s = stepped(method, s)
        y = [y[k] - 0.1 * float(A[k]) * (x[k] - float(B[k])) for k in range(8)]
        close(s.x, y)


def test_binaryrelax_grows_geometrically():
    assert BinaryRelax().lam(3) == pytest.approx(1.02**2)


def test_binaryrelax_with_more_bits_takes_a_lloyd_step():
    method = local(BinaryRelax(lam=Schedule(0.5)))
    s = method.start(state(c=None), Plan({"q": 3}), QUADRATIC)
    after = stepped(method, s)
    old, y = s.codebook.centers[0].tolist(), after.x[1:7].tolist()
    groups = [[v for v in y if nearest(v, old) == j] for j in range(3)]
    close(after.codebook.centers[0], sorted(statistics.fmean(g) if g else old[j] for j, g in enumerate(groups)))


@pytest.mark.parametrize("init", ["kmeans", "range"])
def test_afterwards_trains_plainly_and_places_centers_at_the_end(init):
    method = local(Afterwards(init))
    s, x = method.start(state(c=None), Plan({"q": 3}), QUADRATIC), X
    for _ in range(10):
        s = stepped(method, s)
        x = x - 0.1 * A * (x - B)
        close(s.x, x)
    placed = init_centers(x[1:7], how=init, levels=3)
    model = method.deployed(s)
    close(model.codebook.centers[0], placed)
    assert not torch.equal(model.codebook.centers[0], s.codebook.centers[0])
    close(model.x, [x[0], *(placed[nearest(v, placed.tolist())] for v in x[1:7].tolist()), x[7]])
    if init == "range":
        close(placed[[0, -1]], [x[1:7].min(), x[1:7].max()])


def test_a_full_precision_warm_up_leaves_the_centers_to_the_next_phase():
    """No quantizer is plain training whatever the plan; the phase after it places centers on the trained x."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    layout = Layout.of(module)
    x = torch.linspace(-1, 1, layout.size)
    plan = Plan({"1.weight": 4})
    task = problem(lambda v: 1.5 * (v**2).sum(-1), layout)
    method = local(NoQuantizer(), eta1=Schedule(0.5))
    warm = method.start(State(x, x), plan, task)
    assert len(warm.codebook) == 0
    trained = stepped(method, warm, task, Clock(0, 1, 1))
    assert torch.equal(trained.x, x - 0.5 * (3 * x))
    assert torch.equal(method.deployed(trained).x, trained.x)
    begun = local(Prox(init="kmeans")).start(trained, plan, task)
    expected = init_centers(trained.x[layout["1.weight"].slice], 2, "kmeans")
    assert torch.equal(begun.codebook.centers[0], expected)


# --- LSQ ---


def fake_quantized(x, s, low, high, straight):
    """Esser et al., eq. 1 to 5, with round straight through: autograd gives both gradients. low, high: -Q_N and Q_P.
    `straight` rounds on the way forth and is the identity on the way back."""
    return straight((x / s).clamp(low, high)) * s


@pytest.mark.parametrize("unit", [torch.ones(6).double(), WIDE], ids=["layers", "channels"])
@pytest.mark.parametrize("levels", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_lsq_is_autograd_of_the_straight_through_formula(levels, unit, seed):
    """x and the step size s after one step, in float64; some weights lie beyond the grid."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, generator=g).double() * 2
    s = 0.15 + float(torch.rand((), generator=g)) / 4
    grid = [-1.0, 1.0] if levels == 2 else [float(j) for j in range(-(levels // 2), levels - levels // 2)]
    low, high = grid[0], grid[-1]
    centers = s * torch.tensor(grid).double()
    scales = () if bool((unit == 1).all()) else (S.clone(),)
    before = State(x.clone(), W.clone(), Codebook((LAYER,), (centers,), scales))

    def straight(v):
        at = torch.tensor(grid).double()
        rounded = at[(v.detach()[:, None] - at).abs().argmin(1)]
        return v + (rounded - v).detach()

    leaf, step = x.clone().requires_grad_(), torch.tensor(s, dtype=torch.float64, requires_grad=True)
    q = torch.cat([leaf[:1], unit * fake_quantized(leaf[1:7] / unit, step, low, high, straight), leaf[7:]])
    value = wavy(q)
    value.backward()
    n, most = 6, high  # Q_P
    after, info = local(LSQ(), eta1=Schedule(0.02)).step(before, problem(wavy), BATCH, CLOCK)
    close(after.x, x - 0.02 * leaf.grad)
    close(after.codebook.centers[0], (s - 0.02 * step.grad / math.sqrt(n * most)) * torch.tensor(grid).double())
    assert info.loss is None
    assert info.quantized_loss == pytest.approx(value.item(), rel=1e-12)
    beyond = ((x[1:7] / unit / s) > high) | ((x[1:7] / unit / s) < low)
    assert torch.equal(leaf.grad[1:7] == 0, beyond)
    if levels <= 4:
        assert beyond.any()


@pytest.mark.parametrize(("levels", "most"), [(2, 1), (4, 1), (8, 3), (16, 7)])
def test_lsq_starts_at_twice_the_mean_over_the_root_of_its_largest_level(levels, most):
    x, book = LSQ().start(state(c=None), Plan({"q": levels}), LAYOUT)
    s = 2 * X[1:7].abs().mean() / math.sqrt(most)
    assert torch.equal(x, X)
    assert len(book.centers[0]) == levels
    close(book.centers[0][-1], most * s)
    if levels > 2:
        close(book.centers[0].diff(), [float(s)] * (levels - 1))
    else:
        close(book.centers[0], [-s, s])


def test_lsq_steps_never_turn_over():
    """A rate at which the step size would cross 0."""
    method = local(LSQ(), eta1=Schedule(50.0))
    s = stepped(method, method.start(state(c=None), Plan({"q": 4}), QUADRATIC))
    for _ in range(3):
        s = stepped(method, s)
        assert bool((s.codebook.centers[0].diff() > 0).all())


def test_lsq_on_a_layer_of_zeros_stays_finite():
    x = X.clone()
    x[1:7] = 0
    method = local(LSQ())
    s = method.start(state(x=x, c=None), Plan({"q": 4}), QUADRATIC)
    for _ in range(3):
        s = stepped(method, s)
    assert bool(torch.isfinite(s.x).all())
    assert bool(torch.isfinite(s.codebook.centers[0]).all())


# --- Info: which loss is which ---


def test_the_losses_of_every_quantizer_by_name():
    """f is told apart at x, at Q(x) and in between; before the step and, where centers learn, after it."""
    c = torch.tensor([-0.8, 0.1, 1.0]).double()

    def losses(quantizer, eta1=0.0):
        return local(quantizer, eta1=Schedule(eta1)).step(state(c=c), QUADRATIC, BATCH, CLOCK)

    at_x, q = quadratic(X).item(), state(c=c).codebook.hard(X)
    at_q = quadratic(q).item()
    assert at_x != at_q
    for quantizer in (NoQuantizer(), Afterwards(), ProxQuant(), Prox(eta2=Schedule(0.0))):
        _, info = losses(quantizer)
        assert (info.loss, info.quantized_loss, dict(info.more)) == (at_x, None, {})
    _, info = losses(Prox(eta2=Schedule(0.1), **STILL))
    assert (info.loss, info.quantized_loss) == (at_x, at_q)
    after, info = losses(Prox(eta2=Schedule(0.1), **STILL), eta1=0.3)  # at the new x, with the centers before
    assert info.loss == at_x
    assert info.quantized_loss == quadratic(state(c=c).codebook.hard(after.x)).item()
    assert info.quantized_loss != at_q
    softly = Prox(eta2=Schedule(0.1), **STILL, mode="soft")
    _, info = losses(softly)
    assert (info.loss, info.quantized_loss) == (at_x, quadratic(softly.quantized(X, state(c=c).codebook)).item())
    _, info = losses(BinaryRelax(Schedule(0.5)))
    assert (info.loss, info.quantized_loss) == (None, None)
    assert info.more == {"relaxed_loss": pytest.approx(quadratic((X + 0.5 * q) / 1.5).item())}
    for quantizer in (BinaryRelax(Schedule(math.inf)), LSQ()):
        _, info = losses(quantizer)
        assert (info.loss, info.quantized_loss, dict(info.more)) == (None, at_q, {})
    tuned = local(Frozen())
    s = tuned.start(state(c=c), Plan(), QUADRATIC)
    _, info = tuned.step(s, QUADRATIC, BATCH, CLOCK)
    assert (info.loss, info.quantized_loss) == (at_q, at_q)  # x = Q(x)


# --- an empty plan ---


@pytest.mark.parametrize("quantizer", every(quantizers), ids=name)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(), lambda p: torch.optim.SGD(p, 0.1)),
        (SGD(momentum=0.9, weight_decay=1e-3), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3)),
        (Adam(), lambda p: torch.optim.Adam(p, 0.1)),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_an_empty_plan_is_the_plain_optimizer(quantizer, ours, theirs):
    """Ten steps on a small network, to the bit our optimizer's, and torch's own to rounding; f(x) is the loss."""
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    task = ModuleTask(module, torch.nn.functional.cross_entropy)
    x = task.layout.flatten(module)
    batch = torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g)
    method = local(quantizer, optimizer=ours)
    s = method.start(State(x, x), Plan(channels=True), Problem(task, task))
    plain, memory, optimizer = x, ours.memory(x), theirs(module.parameters())
    for k in range(10):
        s, info = method.step(s, Problem(task, task), batch, Clock(k, 10, 5))
        found = task.gradient(plain, batch)
        assert (info.loss, info.quantized_loss) == (found.loss, None)
        plain, memory = ours.step(plain, found.gradient, memory, 0.1)
        assert torch.equal(s.x, plain)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
        optimizer.step()
    torch.testing.assert_close(s.x, task.layout.flatten(module), rtol=1e-5, atol=1e-6)
    assert (s.x - x).abs().max() > 0.05
    model = method.deployed(s)
    assert torch.equal(model.x, s.x)
    assert not model.codebook
