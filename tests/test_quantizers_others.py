"""The other quantizers against their formulas; which loss each of them tells; what an empty plan is to all of them."""

import math
import statistics

import pytest
import torch

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Adam
from qupel.core.quantize import init_centers
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import State
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.lsq import LSQ
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.parts.quantizers.ste import StraightThrough
from qupel.tasks.task import ModuleTask, Problem
from toy import (
    BATCH,
    CLOCK,
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

# --- ProxQuant, BinaryRelax, afterwards, none ---


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


def test_proxquant_by_channel():
    """In units of the channel's scale a weight goes t/2 to its center."""
    book = Codebook((LAYER,), (C.clone(),), (S.clone(),))
    after = stepped(local(ProxQuant(lam=Schedule(0.8))), State(X.clone(), W.clone(), book))
    y = X - 0.1 * A * (X - B)
    u = [prox_weight(v, C.tolist(), 0.1 * 0.8) for v in (y[1:7] / WIDE).tolist()]
    close(after.x, [y[0], *(WIDE * torch.tensor(u, dtype=torch.float64)), y[7]])


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


# --- straight through ---


@pytest.mark.parametrize(("eta2", "rate"), [(None, 0.1), (Schedule(0.03), 0.03)])
def test_straight_through_by_formula(eta2, rate):
    """g at Q(x) moves x as it is; a center takes the mean of its weights' g, every third step the mean of x."""
    method = local(StraightThrough(eta2=eta2, lloyd=3))
    s, (x, c) = state(), (X.tolist(), C.tolist())
    a, b = A.tolist(), B.tolist()
    for step in range(7):
        s = stepped(method, s, clock=Clock(step, 7, 4))
        owner = {k: nearest(x[k], c) for k in QUANTIZED}
        q = [c[owner[k]] if k in QUANTIZED else x[k] for k in range(8)]
        g = [a[k] * (q[k] - b[k]) for k in range(8)]
        x = [x[k] - 0.1 * g[k] for k in range(8)]
        mine = [[g[k] for k in QUANTIZED if owner[k] == j] for j in range(3)]
        c = sorted(c[j] - rate * (statistics.fmean(mine[j]) if mine[j] else 0.0) for j in range(3))
        if step in (2, 5):
            groups = [[x[k] for k in QUANTIZED if nearest(x[k], c) == j] for j in range(3)]
            c = sorted(statistics.fmean(group) if group else c[j] for j, group in enumerate(groups))
        close(s.x, x)
        close(s.codebook.centers[0], c)


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
    for quantizer in (BinaryRelax(Schedule(math.inf)), LSQ(), StraightThrough()):
        _, info = losses(quantizer)
        assert (info.loss, info.quantized_loss, dict(info.more)) == (None, at_q, {})
    tuned = local(Frozen())
    s = tuned.start(state(c=c), Plan(), QUADRATIC)
    _, info = tuned.step(s, QUADRATIC, BATCH, CLOCK)
    assert (info.loss, info.quantized_loss) == (at_q, at_q)  # x = Q(x) but where a method has put w in its place


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
