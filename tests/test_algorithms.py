"""One step of every method against its formula, written out a second time in plain Python on a quadratic loss."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qupel.algorithms import BinaryRelax, FedAvg, FineTune, Local, PostTraining, ProxQuant, Quantizer, QuPeL, State
from qupel.algorithms.base import mean
from qupel.codebook import Codebook
from qupel.flat import Layout, Slot
from qupel.optim import SGD, Adam
from qupel.quantize import init_centers
from qupel.schedule import Clock, Follow, Schedule

# A model of 8 numbers; 1..6 are the quantized layer "q". f(v) = sum_k a_k (v_k - b_k)^2 / 2 - everything in float64.
LAYER = Slot("q", (6,), 1, 7)
LAYOUT = Layout((Slot("first", (1,), 0, 1), LAYER, Slot("last", (1,), 7, 8)), ("first", "q", "last"))
A = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.25, 2.0]).double()
B = torch.tensor([0.5, -1.0, 0.25, 1.0, 0.0, -0.5, 2.0, 1.0]).double()
X = torch.tensor([0.1, -0.9, 0.3, 0.8, 0.05, -0.4, 1.4, -0.2]).double()
W = torch.tensor([0.0, -1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 0.0]).double()
C = torch.tensor([-0.8, 0.1, 1.0]).double()
CLOCK = Clock(7, 40, 4)  # epoch 2
QUANTIZED = range(1, 7)


def gradient(v, batch=None, slots=None, of=None):
    return A * (v - B)


def state(x=X, w=W, c=C, memory=()):
    return State(x.clone(), w.clone(), Codebook((LAYER,), (c.clone(),)) if c is not None else Codebook(), memory)


def close(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


# --- the formulas once more, number by number ---


def nearest(v, c):
    return min(range(len(c)), key=lambda j: (abs(v - c[j]), j))


def prox_weight(y, c, t):
    q = c[nearest(y, c)]
    return q + math.copysign(max(abs(y - q) - t / 2, 0.0), y - q)


def exact_center(mu, xs, kappa):
    n = len(xs)
    return statistics.median([*xs, *(mu + kappa * (n - 2 * k) for k in range(n + 1))])


def first_order_center(mu, c, xs, kappa, sign=1):
    return mu + sign * kappa * (sum(x > c for x in xs) - sum(x < c for x in xs))


def algorithm(x, w, c, *, eta1, eta2, lam, lam_c, lambda_p, eta3, rule="exact", decay=0.0, ascent=False):
    """Algorithm 2 (1 with lambda_p = 0), hard mode, SGD."""
    a, b = A.tolist(), B.tolist()
    g = [a[k] * (x[k] - b[k]) + lambda_p * (x[k] - w[k]) + decay * x[k] for k in range(8)]
    x = [x[k] - eta1 * g[k] for k in range(8)]
    x = [prox_weight(x[k], c, eta1 * lam) if k in QUANTIZED else x[k] for k in range(8)]
    owner = {k: nearest(x[k], c) for k in QUANTIZED}
    new = []
    for j in range(len(c)):
        mine = [k for k in QUANTIZED if owner[k] == j]
        mu = c[j] - eta2 * sum(a[k] * (c[j] - b[k]) for k in mine)  # df/dQ at Q_c(x), over the weights of c_j
        xs, kappa = [x[k] for k in mine], eta2 * lam_c / 2
        if rule == "exact":
            new.append(exact_center(mu, xs, kappa))
        else:
            new.append(first_order_center(mu, c[j], xs, kappa, 1 if rule == "first_order" else -1))
    sign = -1 if ascent else 1
    w = [w[k] + sign * eta3 * lambda_p * (x[k] - w[k]) for k in range(8)]
    return x, w, sorted(new)


@pytest.mark.parametrize("rule", ["exact", "first_order", "paper"])
@pytest.mark.parametrize("ascent", [False, True])
def test_qupel_is_algorithm_2(rule, ascent):
    method = QuPeL(
        eta1=Schedule(growth=0.05),  # 0.1 in epoch 2
        eta3=Schedule(2.0),
        lambda_p=Schedule(0.25),
        optimizer=SGD(weight_decay=0.01),
        quantizer=Quantizer(eta2=Schedule(0.02), lam=Schedule(growth=0.15), lam_c=Schedule(growth=0.4), rule=rule),
        as_printed=ascent,
    )
    s, (x, w, c) = state(), (X.tolist(), W.tolist(), C.tolist())
    for _ in range(20):
        s = method.step(s, gradient, None, CLOCK)
        x, w, c = algorithm(
            x, w, c, eta1=0.1, eta2=0.02, lam=0.3, lam_c=0.8, lambda_p=0.25, eta3=2.0, rule=rule, decay=0.01,
            ascent=ascent,
        )  # fmt: skip
        close(s.x, x)
        close(s.w, w)
        close(s.codebook.centers[0], c)
    assert (s.x - X).abs().max() > 0.1
    assert (s.codebook.centers[0] - C).abs().max() > 0.01


@pytest.mark.parametrize("make", [QuPeL, FineTune])
@pytest.mark.parametrize("lambda_p", [0.25, 0.0])
def test_coupling_stands_for_eta3_lambda_p(make, lambda_p):
    """x is pulled by lambda_p; w takes its share of x whatever lambda_p is. Not given, the share is eta3 lambda_p."""
    common = {"eta1": Schedule(0.1), "lambda_p": Schedule(lambda_p)}
    start = state(c=None)
    given = make(**common, coupling=0.3, eta3=Schedule(99.0)).step(start, gradient, None, CLOCK)
    x = X - 0.1 * (gradient(X) + lambda_p * (X - W))
    close(given.x, x)
    close(given.w, W + 0.3 * (x - W))
    none = make(**common, eta3=Schedule(2.0)).step(start, gradient, None, CLOCK)
    close(none.w, W + 2.0 * lambda_p * (x - W))


def test_one_qupel_step_in_numbers():
    """Two quantized weights, one center each, everything done by hand."""
    layer = Slot("q", (2,), 0, 2)
    book = Codebook((layer,), (torch.tensor([0.0, 1.0]).double(),))
    s = State(torch.tensor([0.25, 0.75, 2.0]).double(), torch.tensor([0.0, 1.0, 1.0]).double(), book)
    method = QuPeL(
        eta1=Schedule(0.5),
        eta3=Schedule(1.0),
        lambda_p=Schedule(0.5),
        quantizer=Quantizer(eta2=Schedule(0.5), lam=Schedule(0.25), lam_c=Schedule(0.25)),
    )
    after = method.step(s, lambda v, *_: v - 1.0, None, Clock(0, 1, 1))  # f = |v - 1|^2 / 2
    # g = (-0.75, -0.25, 1) + 0.5 (0.25, -0.25, 1) = (-0.625, -0.375, 1.5);  y = x - 0.5 g = (0.5625, 0.9375, 1.25)
    # prox moves each quantized weight by 0.5 * 0.25 / 2 = 0.0625 to the nearest center (1): (0.625, 1)
    close(after.x, [0.625, 1.0, 1.25])
    # both weights belong to center 1; h = sum of (1 - 1) = 0; mu = (0, 1), center 0 is empty and stays
    # center 1, kappa = 0.0625: the weight 0.625 pulls, the one on it holds: median(0.625, 1, 1.125, 1, 0.875)
    close(after.codebook.centers[0], [0.0, 1.0])
    # w + 0.5 (x - w)
    close(after.w, [0.3125, 1.0, 1.125])


def test_local_is_algorithm_1():
    method = Local(
        eta1=Schedule(0.1), quantizer=Quantizer(eta2=Schedule(0.05), lam=Schedule(growth=0.1))
    )  # lam_c None: the same lambda
    s, (x, c) = state(), (X.tolist(), C.tolist())
    for _ in range(20):
        s = method.step(s, gradient, None, CLOCK)
        x, _, c = algorithm(x, W.tolist(), c, eta1=0.1, eta2=0.05, lam=0.2, lam_c=0.2, lambda_p=0, eta3=0)
        close(s.x, x)
        close(s.codebook.centers[0], c)
    assert torch.equal(s.w, W)
    assert method.upload(s) is None


def test_the_prox_takes_the_scalar_learning_rate_after_any_optimizer():
    """Adam makes the step; the prox moves by eta1 lambda / 2 all the same."""
    method = Local(
        eta1=Schedule(0.1),
        optimizer=Adam(),
        quantizer=Quantizer(eta2=Schedule(0.0), lam=Schedule(0.3)),
    )
    parameter = torch.nn.Parameter(X.clone())
    torch_adam = torch.optim.Adam([parameter], 0.1)
    parameter.grad = gradient(X)
    torch_adam.step()
    y = parameter.detach().tolist()
    s = method.step(state(memory=Adam().memory(X)), gradient, None, CLOCK)
    close(s.x, [prox_weight(y[k], C.tolist(), 0.1 * 0.3) if k in QUANTIZED else y[k] for k in range(8)])


# --- center gradients ---


def center_step(**settings):
    """Centers after one step that leaves x alone (eta1 = 0) and has no center prox."""
    q = Quantizer(eta2=Schedule(0.1), lam=Schedule(0.0), lam_c=Schedule(0.0), **settings)
    return Local(eta1=Schedule(0.0), quantizer=q).step(state(), gradient, None, CLOCK).codebook.centers[0]


def test_sum_mean_and_clip():
    x, a, b, c = X.tolist(), A.tolist(), B.tolist(), C.tolist()
    owned = [[k for k in QUANTIZED if nearest(x[k], c) == j] for j in range(3)]
    h = [sum(a[k] * (c[j] - b[k]) for k in owned[j]) for j in range(3)]
    n = [len(o) for o in owned]
    assert n == [2, 2, 2]
    close(center_step(), [c[j] - 0.1 * h[j] for j in range(3)])
    close(center_step(gradient="mean"), [c[j] - 0.1 * h[j] / n[j] for j in range(3)])
    bound = 0.2
    assert any(abs(v) > bound for v in h)
    assert any(abs(v) < bound for v in h)
    close(center_step(clip=bound), [c[j] - 0.1 * min(max(h[j], -bound), bound) for j in range(3)])


def test_a_dead_center_stays_where_it_is():
    c = torch.tensor([-50.0, -0.8, 0.1, 1.0, 60.0]).double()
    for rule in ("exact", "first_order"):
        q = Quantizer(eta2=Schedule(0.1), lam=Schedule(1.0), lam_c=Schedule(1.0), gradient="mean", rule=rule)
        s = Local(quantizer=q).step(state(c=c), gradient, None, CLOCK)
        assert s.codebook.centers[0][[0, 4]].tolist() == [-50, 60]
        assert not torch.equal(s.codebook.centers[0][1:4], c[1:4])


def test_centers_are_sorted_after_every_step():
    """A step so long that two centers change places."""
    c = torch.tensor([-0.1, 0.0, 0.1]).double()
    q = Quantizer(eta2=Schedule(5.0), lam=Schedule(0.0), lam_c=Schedule(0.0))
    s = state(c=c)
    crossed = False
    for _ in range(3):
        before = s.codebook.centers[0]
        x, a, b = s.x.tolist(), A.tolist(), B.tolist()
        centers = before.tolist()
        h = [sum(a[k] * (centers[j] - b[k]) for k in QUANTIZED if nearest(x[k], centers) == j) for j in range(3)]
        raw = [centers[j] - 5.0 * h[j] for j in range(3)]
        crossed |= raw != sorted(raw)
        s = Local(eta1=Schedule(0.0), quantizer=q).step(s, gradient, None, CLOCK)
        close(s.codebook.centers[0], sorted(raw))
    assert crossed


def test_carry_moves_the_weights_that_sit_on_a_center():
    x = X.clone()
    x[1], x[2], x[3] = C[0], C[1], C[1]  # on their centers
    q = Quantizer(eta2=Schedule(0.1), lam=Schedule(0.0), lam_c=Schedule(0.5), carry=True)
    method = Local(eta1=Schedule(0.0), quantizer=q)
    s = method.step(state(x=x), gradient, None, CLOCK)
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

    def push(v, *_):
        return torch.full((8,), 0.125).double()

    frozen = Quantizer(eta2=Schedule(0.1), lam=Schedule(0.0), lam_c=Schedule(1.0))
    s = Local(eta1=Schedule(0.0), quantizer=frozen).step(state(x=x, c=c), push, None, CLOCK)
    assert s.codebook.centers[0].tolist() == [0, 10]
    s = Local(eta1=Schedule(0.0), quantizer=replace(frozen, carry=True)).step(state(x=x, c=c), push, None, CLOCK)
    close(s.codebook.centers[0], [-0.075, 10])
    close(s.x[1:7], [-0.075] * 6)


def test_follow_and_travel_are_used_per_layer():
    """Follow: 1 half-gap for a center with an average share of the weights; here all six above their center."""
    c = torch.tensor([-2.0, 0.0, 2.0]).double()
    x = torch.tensor([0.0, -1.5, -1.5, 0.5, 0.5, 2.5, 2.5, 0.0]).double()
    q = Quantizer(eta2=Schedule(1e-9), lam=Schedule(0.0), lam_c=Follow(0.25))
    s = Local(eta1=Schedule(0.0), quantizer=q).step(state(x=x, c=c), gradient, None, CLOCK)
    torch.testing.assert_close(s.codebook.centers[0], c + 0.25, rtol=0, atol=1e-6)


# --- soft mode ---


def soft(x, c, P):
    """Q~ as MATH.md prints it."""
    q = c[0] + 0 * x
    for j in range(1, len(c)):
        q = q + (c[j] - c[j - 1]) * torch.sigmoid(P * (x - (c[j] + c[j - 1]) / 2))
    return q


def loss(v):
    return (A * (v - B) ** 2).sum() / 2 + torch.sin(v).sum()  # not separable from its gradient by luck


def loss_gradient(v, batch=None, slots=None):
    v = v.clone().requires_grad_()
    loss(v).backward()
    return v.grad


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=8, max_size=8),
    st.lists(st.floats(-2, 2, width=16), min_size=2, max_size=4, unique=True).map(sorted),
    st.floats(1, 20),
)
def test_soft_mode_descends_the_objective(values, centers, sharpness):
    """x step: the gradient of f(x) + f(Q~_c(x)); then the c step: that of f(Q~_c(x)) at the new x, by autograd."""
    x, c = torch.tensor(values).double(), torch.tensor(centers).double()
    P = float(sharpness * (len(c) - 1) / (c[-1] - c[0]))
    eta1, eta2 = 0.1, 0.01
    q = Quantizer(eta2=Schedule(eta2), lam=Schedule(0.0), lam_c=Schedule(0.0), mode="soft", sharpness=sharpness)
    s = Local(eta1=Schedule(eta1), quantizer=q).step(state(x=x, c=c), loss_gradient, None, CLOCK)

    def quantized(x, c):
        return torch.cat([x[:1], soft(x[1:7], c, P), x[7:]])

    leaf = x.clone().requires_grad_()
    (loss(leaf) + loss(quantized(leaf, c))).backward()
    new = x - eta1 * leaf.grad
    torch.testing.assert_close(s.x, new, rtol=1e-9, atol=1e-9)
    leaf = c.clone().requires_grad_()
    loss(quantized(new, leaf)).backward()
    torch.testing.assert_close(s.codebook.centers[0], (c - eta2 * leaf.grad).sort().values, rtol=1e-8, atol=1e-8)


def test_soft_qupel_adds_the_pull():
    q = Quantizer(eta2=Schedule(0.0), lam=Schedule(0.0), lam_c=Schedule(0.0), mode="soft")
    common = {"eta1": Schedule(0.1), "quantizer": q}
    alone = Local(**common).step(state(), loss_gradient, None, CLOCK)
    pulled = QuPeL(**common, lambda_p=Schedule(0.5), eta3=Schedule(0.0)).step(state(), loss_gradient, None, CLOCK)
    close(pulled.x, alone.x - 0.1 * 0.5 * (X - W))


# --- fine-tuning ---


def test_finetune_by_formula():
    method = FineTune(eta1=Schedule(0.1), eta2=Schedule(0.05), eta3=Schedule(2.0), lambda_p=Schedule(0.25))
    s = method.start(state(), {}, LAYOUT)
    codes = [nearest(v, C.tolist()) for v in X[1:7].tolist()]
    close(s.x, [X[0], *(C[j] for j in codes), X[7]])
    x, w, c = s.x.tolist(), W.tolist(), C.tolist()
    a, b = A.tolist(), B.tolist()
    for _ in range(30):
        s = method.step(s, gradient, None, CLOCK)
        g = [a[k] * (x[k] - b[k]) for k in range(8)]
        c = [c[j] - 0.05 * sum(g[k + 1] for k in range(6) if codes[k] == j) for j in range(3)]
        free = {k: x[k] - 0.1 * (g[k] + 0.25 * (x[k] - w[k])) for k in (0, 7)}
        x = [free[0], *(c[j] for j in codes), free[7]]
        w = [w[k] + (2.0 * 0.25 * (x[k] - w[k]) if k in free else 0.0) for k in range(8)]
        close(s.x, x)
        close(s.w, w)
        close(s.codebook.centers[0], sorted(c))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["sum", "mean"]), st.booleans())
def test_finetune_freezes_every_assignment(seed, kind, adam):
    """Weights that share a center share it for ever, also when centers cross, and sit on it exactly."""
    torch.manual_seed(seed)
    optimizer = Adam() if adam else SGD(momentum=0.9)
    method = FineTune(eta2=Schedule(0.3), gradient=kind, optimizer=optimizer)
    s = method.start(
        State(torch.randn(8), torch.zeros(8), Codebook((LAYER,), (torch.randn(4).sort().values,))), {}, LAYOUT
    )
    before = s.codebook.assign(s.x)[0]
    for _ in range(10):
        push = torch.randn(8)
        s = method.step(s, lambda v, *_, push=push: push, None, CLOCK)
        assert torch.isin(s.x[1:7], s.codebook.centers[0]).all()
        assert torch.equal(s.codebook.centers[0], s.codebook.centers[0].sort().values)
        together = before[:, None] == before
        now = s.codebook.assign(s.x)[0]
        assert torch.equal(now[:, None] == now, together)
        assert torch.equal(method.deployed(s).x, s.x)


def test_finetune_divides_by_the_number_of_weights_of_a_center():
    """gradient = "mean": three weights at one center, two at another, one at the third, each by hand."""
    method = FineTune(eta1=Schedule(0.1), eta2=Schedule(0.5), gradient="mean")
    c = torch.tensor([-1.0, 0.0, 2.0]).double()
    x = torch.tensor([0.5, -1.0, -1.0, -1.0, 0.0, 0.0, 2.0, 0.7]).double()
    s = method.start(State(x, W, Codebook((LAYER,), (c,))), {}, LAYOUT)
    push = torch.tensor([1.0, 0.1, 0.2, 0.6, -0.4, 0.2, 0.25, 1.0], dtype=torch.float64)
    moved = method.step(s, lambda v, *_: push, None, CLOCK)
    close(moved.codebook.centers[0], [-1.0 - 0.5 * 0.9 / 3, 0.0 + 0.5 * 0.2 / 2, 2.0 - 0.5 * 0.25])


def test_finetune_sends_and_pulls_only_what_is_not_quantized():
    method = FineTune(eta1=Schedule(0.1), eta2=Schedule(0.05), eta3=Schedule(2.0), lambda_p=Schedule(0.25))
    s = method.start(state(), {}, LAYOUT)
    moved = method.step(s, gradient, None, CLOCK)
    upload = method.upload(moved)
    assert torch.equal(upload[1:7], W[1:7])
    assert (upload[[0, 7]] != W[[0, 7]]).all()
    far = method.step(replace(s, w=W + 5), gradient, None, CLOCK)  # another w moves the free coordinates only
    assert torch.equal(far.x[1:7], moved.x[1:7])
    assert (far.x[[0, 7]] != moved.x[[0, 7]]).all()
    assert method.receive(s, W + 5).w.tolist() == (W + 5).tolist()
    alone = FineTune(eta1=Schedule(0.1))
    assert alone.upload(alone.step(s, gradient, None, CLOCK)) is None
    assert alone.aggregate(W, []) is W


def test_finetune_clip():
    method = FineTune(eta1=Schedule(0.0), eta2=Schedule(1.0), clip=0.01)
    s = method.start(state(), {}, LAYOUT)
    moved = method.step(s, gradient, None, CLOCK)
    assert (moved.codebook.centers[0] - C).abs().max() <= 0.01 + 1e-12
    assert (moved.codebook.centers[0] - C).abs().max() > 0.009


def test_finetune_without_codebook_is_full_precision():
    method = FineTune(eta1=Schedule(0.1), eta3=Schedule(2.0), lambda_p=Schedule(0.25))
    s = method.step(state(c=None), gradient, None, CLOCK)
    x = X - 0.1 * (gradient(X) + 0.25 * (X - W))
    close(s.x, x)
    close(s.w, W + 0.5 * (x - W))


# --- competitors ---


def test_proxquant_scales_its_signs():
    before = state(c=None)
    s = ProxQuant().start(before, {"q": 2}, LAYOUT)
    scale = sum(abs(v) for v in X[1:7].tolist()) / 6
    close(s.codebook.centers[0], [-scale, scale])
    assert ProxQuant(scale="one").start(before, {"q": 2}, LAYOUT).codebook.centers[0].tolist() == [-1, 1]
    four = ProxQuant(init="range").start(before, {"q": 4}, LAYOUT).codebook.centers[0]
    torch.testing.assert_close(four, torch.linspace(-0.9, 1.4, 4).double())


def test_proxquant_by_formula():
    method = ProxQuant(eta1=Schedule(0.1), lam=Schedule(growth=0.4))
    s = method.start(state(c=None), {"q": 2}, LAYOUT)
    c = s.codebook.centers[0].tolist()
    x = X.tolist()
    for _ in range(15):
        s = method.step(s, gradient, None, CLOCK)
        y = [x[k] - 0.1 * float(A[k]) * (x[k] - float(B[k])) for k in range(8)]
        x = [prox_weight(y[k], c, 0.1 * 0.8) if k in QUANTIZED else y[k] for k in range(8)]
        close(s.x, x)
    assert s.codebook.centers[0].tolist() == c


@pytest.mark.parametrize("lam", [0.0, 0.7, math.inf])
def test_binaryrelax_by_formula(lam):
    """lam = 0: plain SGD on y; lam = inf: the gradient at Q(y); between: at (y + lam Q(y)) / (1 + lam)."""
    method = BinaryRelax(eta1=Schedule(0.1), lam=Schedule(lam))
    s = method.start(state(c=None), {"q": 2}, LAYOUT)
    y = X.tolist()
    for _ in range(15):
        scale = sum(abs(v) for v in y[1:7]) / 6
        q = [math.copysign(scale, y[k]) if k in QUANTIZED else y[k] for k in range(8)]
        x = q if math.isinf(lam) else [(y[k] + lam * q[k]) / (1 + lam) for k in range(8)]
        close(s.codebook.centers[0], [-scale, scale])
        close(method.deployed(s).x, q)
        s = method.step(s, gradient, None, CLOCK)
        y = [y[k] - 0.1 * float(A[k]) * (x[k] - float(B[k])) for k in range(8)]
        close(s.x, y)


def test_binaryrelax_grows_geometrically():
    assert BinaryRelax().lam(3) == pytest.approx(1.02**2)


def test_binaryrelax_with_more_bits_takes_a_lloyd_step():
    method = BinaryRelax(eta1=Schedule(0.1), lam=Schedule(0.5))
    s = method.start(state(c=None), {"q": 3}, LAYOUT)
    after = method.step(s, gradient, None, CLOCK)
    old, y = s.codebook.centers[0].tolist(), after.x[1:7].tolist()
    groups = [[v for v in y if nearest(v, old) == j] for j in range(3)]
    close(after.codebook.centers[0], sorted(statistics.fmean(g) if g else old[j] for j, g in enumerate(groups)))


@pytest.mark.parametrize("init", ["kmeans", "range"])
def test_posttraining_trains_plainly_and_places_centers_at_the_end(init):
    method = PostTraining(eta1=Schedule(0.1), init=init)
    s, x = method.start(state(c=None), {"q": 3}, LAYOUT), X
    for _ in range(10):
        s = method.step(s, gradient, None, CLOCK)
        x = x - 0.1 * A * (x - B)
        close(s.x, x)
    placed = init_centers(x[1:7], how=init, levels=3)
    model = method.deployed(s)
    close(model.codebook.centers[0], placed)
    assert not torch.equal(model.codebook.centers[0], s.codebook.centers[0])
    close(model.x, [x[0], *(placed[nearest(v, placed.tolist())] for v in x[1:7].tolist()), x[7]])
    if init == "range":
        close(placed[[0, -1]], [x[1:7].min(), x[1:7].max()])


def test_fedavg_by_formula():
    method = FedAvg(eta1=Schedule(0.1), optimizer=SGD(momentum=0.5))
    s = method.receive(method.start(state(), {"q": 2}, LAYOUT), W)
    assert not s.codebook
    x, v = W, torch.zeros(8).double()
    for _ in range(3):
        s = method.step(s, gradient, None, CLOCK)
        v = 0.5 * v + gradient(x)
        x = x - 0.1 * v
        close(s.x, x)
    assert torch.equal(method.upload(s), s.x)
    fresh = method.receive(s, X)  # the optimizer starts afresh every round
    assert torch.equal(fresh.x, X)
    assert torch.equal(fresh.memory[0], torch.zeros(8).double())
    assert torch.equal(method.deployed(fresh).x, X)
    assert torch.equal(method.deployed(State(X, W)).x, W)  # the average, not a client's own steps


# --- the server ---


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 1000), st.booleans())
def test_mean_equals_numpy_in_float64(n, seed, weighted):
    torch.manual_seed(seed)
    uploads = [torch.randn(30) * 10.0 ** float(torch.randint(-3, 4, ())) for _ in range(n)]
    shares = [float(torch.randint(1, 100, ())) if weighted else 1.0 for _ in range(n)]
    expected = torch.zeros(30).double()
    for u, share in zip(uploads, shares, strict=True):
        expected += u.double() * share
    expected /= sum(shares)
    got = mean(zip(uploads, shares, strict=True))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected.float(), rtol=1e-7, atol=0)


def test_weighted_mean_by_hand():
    got = mean([(torch.tensor([1.0, 0.0]), 3.0), (torch.tensor([4.0, 8.0]), 1.0)])
    assert got.tolist() == [1.75, 2.0]


def test_a_codebook_of_the_phase_before_is_kept_if_it_fits_the_plan():
    q = Quantizer(init="range")
    book = Codebook((LAYER,), (C,))
    assert q.start(book, X, {"q": 3}, LAYOUT) is book
    assert len(q.start(book, X, {"q": 4}, LAYOUT).centers[0]) == 4
    assert not q.start(book, X, {}, LAYOUT)


@pytest.mark.parametrize(
    "method",
    [
        QuPeL(quantizer=Quantizer(carry=True, lam=Schedule(0.1))),
        Local(optimizer=SGD(momentum=0.9), quantizer=Quantizer(mode="soft")),
        FineTune(lambda_p=Schedule(0.1), optimizer=Adam()),
        ProxQuant(lam=Schedule(0.5)),
        BinaryRelax(),
        PostTraining(),
        FedAvg(optimizer=SGD(momentum=0.9)),
    ],
    ids=lambda m: m.method,
)
def test_a_step_changes_no_state_but_returns_a_new_one(method):
    """The engine keeps the old state of a client whose round fails."""
    s = method.step(method.receive(method.start(state(), {"q": 3}, LAYOUT), W), gradient, None, CLOCK)
    tensors = [s.x, s.w, *s.codebook.centers, *s.memory]
    copies = [t.clone() for t in tensors]
    after = method.step(s, gradient, None, CLOCK)
    assert all(torch.equal(t, copy) for t, copy in zip(tensors, copies, strict=True))
    assert not torch.equal(after.x, s.x)


def test_a_full_precision_warm_up_leaves_the_centers_to_the_next_phase():
    """Local(quantize=False) is plain training whatever the plan; the phase after it places centers on the trained x."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    layout = Layout.of(module)
    x = torch.linspace(-1, 1, layout.size)
    plan = {"1.weight": 4}
    warm = Local(quantize=False, eta1=Schedule(0.5)).start(State(x, x), plan, layout)
    assert len(warm.codebook) == 0
    trained = Local(quantize=False, eta1=Schedule(0.5)).step(warm, lambda v, *_: 3 * v, None, Clock(0, 1, 1))
    assert torch.equal(trained.x, x - 0.5 * (3 * x))
    begun = Local(quantizer=Quantizer(init="kmeans")).start(trained, plan, layout)
    expected = init_centers(trained.x[layout["1.weight"].slice], 2, "kmeans")
    assert torch.equal(begun.codebook.centers[0], expected)
