"""Per-FedAvg, APFL, L2GD, FedRep, FedPer, FedBN and FedDyn against their formulas on quadratics, what they reduce to,
and which model each method ships."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from qupel.core.codebook import Plan
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Clock, Schedule
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.parts.layers import head, named_layers, norms
from qupel.parts.methods import methods
from qupel.parts.methods.apfl import APFL
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.fedbn import FedBN
from qupel.parts.methods.feddyn import FedDyn
from qupel.parts.methods.fedper import FedPer
from qupel.parts.methods.fedrep import FedRep
from qupel.parts.methods.l2gd import L2GD
from qupel.parts.methods.local import Local
from qupel.parts.methods.perfedavg import PerFedAvg
from qupel.parts.phase import Phase
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.tasks.task import ModuleTask
from qupel.util.errors import UserError
from tiny import make_job, mlp, norm_net, run_inline, same
from toy import (
    BATCH,
    CLOCK,
    QUADRATIC,
    A,
    B,
    W,
    X,
    close,
    entered,
    federated,
    gradient,
    problem,
    shifted,
    state,
    stepped,
)

NONE, FLOAT = Plan(), {"eta1": Schedule(0.1), "quantizer": NoQuantizer()}
OPTIMIZERS = pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()], ids=["momentum", "adam"])


def rows_of(seen):
    return [t for rows in seen for t in rows]


# --- Per-FedAvg ---


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("kind", ["first-order", "hessian-free"])
def test_perfedavg_by_formula(kind, inner):
    """The gradient of f(x - a grad f(x)) in x is (I - a H) grad f(there); on a quadratic H is diag(A)."""
    method = PerFedAvg(**FLOAT, alpha=0.2, inner=inner, kind=kind)
    s, x = entered(method, NONE), W
    for _ in range(4):
        s = stepped(method, s)
        there = x
        for _ in range(inner):
            there = there - 0.2 * gradient(there)
        factor = (1 - 0.2 * A) ** inner if kind == "hessian-free" else 1.0
        x = x - 0.1 * factor * gradient(there)
        torch.testing.assert_close(s.x, x, rtol=1e-9, atol=1e-9)
    assert torch.equal(method.upload(s).rows[0], s.x)


def test_the_hessian_free_gradient_is_autograds_of_the_adapted_loss():
    """On a loss that is no quadratic, by differences of length delta."""
    method = PerFedAvg(**FLOAT, alpha=0.2, kind="hessian-free", delta=1e-4)

    def wavy(v):
        return (A * (v - B) ** 2).sum(-1) / 2 + torch.sin(3 * v).sum(-1) + v.prod(-1)

    after = stepped(method, entered(method, NONE, f=problem(wavy)), problem(wavy))
    leaf = W.clone().requires_grad_()
    (g,) = torch.autograd.grad(wavy(leaf), leaf, create_graph=True)
    wavy(leaf - 0.2 * g).backward()
    torch.testing.assert_close(after.x, W - 0.1 * leaf.grad, rtol=1e-7, atol=1e-7)


@OPTIMIZERS
def test_perfedavg_without_inner_steps_is_fedavg(optimizer):
    common = {**FLOAT, "optimizer": optimizer}
    ours, states = federated(PerFedAvg(**common, inner=0), 3, 4)
    plain, _ = federated(FedAvg(**common), 3, 4)
    assert same(rows_of(ours), rows_of(plain))
    adapted = PerFedAvg(**common, inner=0).adapt(states[0], shifted(0), iter([BATCH] * 9), CLOCK)
    assert torch.equal(adapted.x, plain[-1][0])


def test_perfedavg_ships_w_after_its_inner_steps_on_the_clients_batches():
    """Through the engine: the batches that would come next, and whatever is judged in between, nothing is kept."""
    method = PerFedAvg(eta1=Schedule(0.1), alpha=0.3, inner=2)
    job = make_job([Phase(method, 3)], sizes=(12, 12), bits=(32,), evaluate_every=1)
    with Inline(job) as engine:
        finished = run(job, engine)
        shard, task = engine.shard, ModuleTask(mlp(), job.loss)
        for client in (0, 1):
            x = finished.w[0]
            for step, picked in zip((9, 10), shard.steps.rows(client, 3, 0), strict=False):
                x = x - 0.3 * task.gradient(x, shard.steps.batch(client, step, picked)).gradient
            got = engine.deployed(2, finished.w, client).x
            assert torch.equal(got, x)
            assert (got - finished.w[0]).abs().max() > 1e-3
    rarely, _ = run_inline(replace(job, evaluate_every=3))
    assert same(finished.w, rarely.w)


# --- APFL ---


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_by_formula(adaptive):
    method = APFL(**FLOAT, alpha=0.3, adaptive=adaptive)
    s = method.start(state(c=None), NONE, QUADRATIC)
    v, a, seen = X, 0.3, []
    for came in (W, W / 3):
        s, w = method.receive(s, (came,)), came
        for _ in range(3):
            x = a * v + (1 - a) * w
            close(s.x, x)
            g, slope = gradient(x), float(gradient(x) @ (v - w))
            v, w = v - 0.1 * a * g, w - 0.1 * gradient(w)
            a = min(max(a - 0.1 * slope, 0.0), 1.0) if adaptive else a
            seen.append(a)
            s = stepped(method, s)
            close(s.v, v)
            close(s.w, w)
            close(s.alpha, [a])
        assert torch.equal(method.upload(s).rows[0], s.w)
        close(method.deployed(s).x, a * v + (1 - a) * w)
    assert (len(set(seen)) > 2) == adaptive


@OPTIMIZERS
def test_apfl_is_local_with_alpha_one_and_fedavg_with_zero(optimizer):
    """To the bit; and with alpha = 1 its w is FedAvg's all the same."""
    common = {**FLOAT, "optimizer": optimizer}
    ours, own = federated(APFL(**common, alpha=1.0, adaptive=False), 3, 4)
    shared, mixed = federated(APFL(**common, alpha=0.0, adaptive=False), 3, 4)
    plain, _ = federated(FedAvg(**common), 3, 4)
    _, alone = federated(Local(**common), 3, 4)
    assert same(rows_of(ours), rows_of(plain))
    assert same(rows_of(shared), rows_of(plain))
    assert same([APFL().deployed(replace(s)).x for s in own], [s.x for s in alone])
    assert all(torch.equal(APFL(**common).deployed(s).x, plain[-1][0]) for s in mixed)


# --- L2GD ---


def test_l2gd_by_formula():
    method = L2GD(**FLOAT, pull=0.25)
    seen, states = federated(method, 3, 2)
    x, w = [W, W, W], W
    for (got,) in seen:
        x = [v + 0.25 * (w - v) for v in x]
        for _ in range(2):
            x = [v - 0.1 * A * (v - B - k) for k, v in enumerate(x)]
        w = sum(x) / 3
        close(got, w)
    for k, s in enumerate(states):
        close(method.deployed(s).x, x[k] + 0.25 * (w - x[k]))


@OPTIMIZERS
def test_l2gd_is_local_without_pull_and_fedavg_with_all_of_it(optimizer):
    """To the bit; FedAvg's optimizer begins anew every round, so there it has no memory."""
    common = {**FLOAT, "optimizer": optimizer}
    _, ours = federated(L2GD(**common, pull=0.0), 3, 4)
    _, alone = federated(Local(**common), 3, 4)
    assert same([s.x for s in ours], [s.x for s in alone])
    seen, states = federated(L2GD(**FLOAT, pull=1.0), 3, 4)
    plain, _ = federated(FedAvg(**FLOAT), 3, 4)
    assert same(rows_of(seen), rows_of(plain))
    assert all(torch.equal(L2GD().deployed(replace(s)).x, plain[-1][0]) for s in states)


def test_l2gd_finds_the_minimum_of_its_objective():
    """mean f_i(x_i) + (lambda/2)|x_i - mean x|^2 with pull = eta1 lambda tau: x_i = (A b_i + lambda mean b) / (A +
    lambda), but for an error of order eta1."""
    eta, tau, lam = 0.01, 2, 1.5
    method = L2GD(Schedule(eta), pull=eta * lam * tau, quantizer=NoQuantizer())
    _, states = federated(method, 250, tau, w=B + 1)  # the mean is there already
    for k, s in enumerate(states):
        torch.testing.assert_close(s.x, (A * (B + k) + lam * (B + 1)) / (A + lam), rtol=0, atol=0.02)


# --- FedPer, FedRep, FedBN ---


def test_fedper_by_formula():
    """The last number is each client's own: it is neither sent nor received."""
    method = FedPer(**FLOAT)
    seen, states = federated(method, 3, 2)
    x, w = [W, W, W], W
    for (got,) in seen:
        x = [torch.cat([w[:7], v[7:]]) for v in x]
        for _ in range(2):
            x = [v - 0.1 * A * (v - B - k) for k, v in enumerate(x)]
        w = torch.cat([(sum(x) / 3)[:7], W[7:]])
        close(got, w)
    for k, s in enumerate(states):
        close(method.deployed(s).x, torch.cat([w[:7], x[k][7:]]))
    assert (states[0].x[7] - states[2].x[7]).abs() > 0.1


def test_fedrep_by_formula():
    """Two steps of the head, three of the body, and again; the optimizer's weight decay reaches nobody else."""
    method = FedRep(**FLOAT, head_steps=2, body_steps=3, optimizer=SGD(weight_decay=0.01))
    s, x = entered(method, NONE), torch.cat([W[:7], X[7:]])
    close(s.x, x)
    for step in range(10):
        s = stepped(method, s, clock=Clock(step, 10, 5))
        moves = torch.zeros(8).double()
        moves[slice(7, 8) if step % 5 < 2 else slice(0, 7)] = 1
        x = x - 0.1 * moves * (gradient(x) + 0.01 * x)
        close(s.x, x)
    close(method.upload(s).rows[0], torch.cat([x[:7], W[7:]]))
    close(method.deployed(s).x, torch.cat([W[:7], x[7:]]))


def test_levels_of_a_layer_that_rests_rest():
    method = FedRep(head_steps=2, body_steps=2)
    s = entered(method)
    heads = stepped(method, s, clock=Clock(0, 8, 4))
    bodies = stepped(method, s, clock=Clock(2, 8, 4))
    assert torch.equal(heads.codebook.centers[0], s.codebook.centers[0])  # the quantized layer is of the body
    assert torch.equal(heads.x[:7], s.x[:7])
    assert not torch.equal(bodies.codebook.centers[0], s.codebook.centers[0])
    assert torch.equal(bodies.x[7:], s.x[7:])


@OPTIMIZERS
@pytest.mark.parametrize("kind", [FedPer, FedRep, FedBN])
def test_no_own_layer_is_fedavg_and_all_of_them_local(kind, optimizer):
    """To the bit. FedRep has nobody to take turns with then; Local's optimizer remembers, so it has no memory there."""
    common = {**FLOAT, "optimizer": optimizer}
    ours, states = federated(kind(**common, layers=()), 3, 4)
    plain, _ = federated(FedAvg(**common), 3, 4)
    assert same(rows_of(ours), rows_of(plain))
    assert all(torch.equal(kind(**common).deployed(s).x, plain[-1][0]) for s in states)
    everything = {"layers": ("first", "q", "last")} | ({"head_steps": 9} if kind is FedRep else {})
    seen, own = federated(kind(**FLOAT, **everything), 3, 4)
    _, alone = federated(Local(**FLOAT), 3, 4)
    assert same([kind().deployed(replace(s, codebook=s.codebook)).x for s in own], [s.x for s in alone])
    assert torch.equal(seen[-1][0], W)


def test_fedbn_without_a_normalization_is_fedavg_and_with_one_keeps_it():
    common = {"eta1": Schedule(0.1), "quantizer": NoQuantizer()}
    plain, _ = run_inline(make_job([Phase(FedAvg(**common), 2)], bits=(32,)))
    ours, _ = run_inline(make_job([Phase(FedBN(**common), 2)], bits=(32,)))
    assert same(plain.w, ours.w)
    job = make_job([Phase(FedBN(**common), 2)], bits=(32,), module=norm_net())
    finished, models = run_inline(job)
    layout = Layout.of(norm_net())
    kept = {slot.name for slot in norms(layout)}
    assert kept == {"1.weight", "1.bias"}
    for slot in layout.slots:
        values = [model[slot.slice] for model in models]
        if slot.name in kept:
            assert not torch.equal(values[0], values[1])
            assert torch.equal(finished.w[0][slot.slice], layout.flatten(norm_net())[slot.slice])
        else:
            assert all(torch.equal(v, finished.w[0][slot.slice]) for v in values)


class Odd(nn.Module):
    """Layers whose parameters look like one another's."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.LayerNorm([4, 2, 2]), nn.RMSNorm(2))
        self.recurrent, self.table, self.square = nn.LSTM(4, 4), nn.Embedding(5, 4), nn.Linear(1, 1)
        self.out = nn.Linear(4, 3)


def test_which_layers_are_heads_and_normalizations():
    layout = Layout.of(Odd())
    assert [s.name for s in head(layout)] == ["out.weight", "out.bias"]
    assert [s.name for s in head(Layout.of(nn.Linear(2, 2, bias=False)))] == ["weight"]
    expected = ["body.1.weight", "body.1.bias", "body.2.weight", "body.2.bias", "body.3.weight"]
    assert [s.name for s in norms(layout)] == expected
    assert norms(Layout.of(mlp())) == ()
    chosen = named_layers(layout, ["out", "body.1", "table.weight"])
    assert [s.name for s in chosen] == ["body.1.weight", "body.1.bias", "table.weight", "out.weight", "out.bias"]
    with pytest.raises(UserError, match=r"no layer named 'tail'; this model has: body\.0\.weight"):
        named_layers(layout, ["tail"])
    with pytest.raises(UserError, match="no layer named 'las'"):
        FedPer(layers=("las",)).start(state(), NONE, QUADRATIC)


# --- FedDyn ---


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_feddyn_is_the_papers_algorithm(share):
    """With the server's h and the clients' gradients as the paper has them; `share` of the clients taking part."""
    alpha, rounds, steps = 0.4, 4, 3
    seen, states = federated(FedDyn(**FLOAT, alpha=alpha), rounds, steps, clock=replace(CLOCK, share=share))
    theta, h, g = W, torch.zeros(8).double(), [torch.zeros(8).double() for _ in range(3)]
    for rows in seen:
        own = []
        for k in range(3):
            t = theta
            for _ in range(steps):
                t = t - 0.1 * (A * (t - B - k) - g[k] + alpha * (t - theta))
            g[k] = g[k] - alpha * (t - theta)
            own.append(t)
        h = h - alpha * share * (sum(own) / 3 - theta)
        theta = sum(own) / 3 - h / alpha
        torch.testing.assert_close(rows[0], theta, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rows[1], -h / alpha, rtol=1e-9, atol=1e-9)
    for k, s in enumerate(states):
        torch.testing.assert_close(s.tilt, g[k], rtol=1e-9, atol=1e-9)
        assert torch.equal(FedDyn().deployed(s).x, seen[-1][0])


def test_feddyn_comes_to_the_minimum_of_the_mean():
    """Where clients differ in their curvature and FedAvg ends elsewhere."""
    steep = [A * (1 + k) for k in range(3)]
    problems = [problem(lambda v, a=a, k=k: (a * (v - B - k) ** 2).sum(-1) / 2) for k, a in enumerate(steep)]
    best = sum(a * (B + k) for k, a in enumerate(steep)) / sum(steep)
    method = FedDyn(Schedule(0.05), alpha=0.5)
    found = federated(method, 150, 6, problems=problems)[0][-1][0]
    torch.testing.assert_close(found, best, rtol=0, atol=1e-4)
    assert (federated(FedAvg(Schedule(0.05)), 100, 6, problems=problems)[0][-1][0] - best).abs().max() > 0.01


def test_feddyn_without_alpha_is_fedavg_with_a_nesterov_server_of_momentum_one():
    """h/alpha does not vanish with alpha: what is left of it is momentum."""
    ours, _ = federated(FedDyn(**FLOAT, alpha=0.0), 5, 3)
    plain, _ = federated(FedAvg(**FLOAT), 5, 3, server=FedAvgM(1.0, nesterov=True))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-9, atol=1e-9)


# --- which model is shipped ---

SHIPPED = {  # of a state whose vectors are all planted, and differ
    "fedavg": lambda s: s.w,
    "fedprox": lambda s: s.w,
    "scaffold": lambda s: s.w,
    "feddyn": lambda s: s.w,
    "ifca": lambda s: s.w,
    "local": lambda s: s.x,
    "qupel": lambda s: s.x,
    "ditto": lambda s: s.x,
    "pfedme": lambda s: s.x,  # the personal model, where public libraries judge w
    "l2gd": lambda s: s.x,
    "perfedavg": lambda s: s.x,  # adapted: see above
    "apfl": lambda s: s.alpha * s.v + (1 - s.alpha) * s.w,
    "fedper": lambda s: torch.cat([s.w[:7], s.x[7:]]),
    "fedrep": lambda s: torch.cat([s.w[:7], s.x[7:]]),
    "fedbn": lambda s: s.w,  # a model without normalizations
}


@pytest.mark.parametrize("method", SHIPPED)
def test_methods_ship_the_model_of_their_papers(method):
    method = methods[method](quantizer=NoQuantizer())
    s = stepped(method, entered(method, NONE))
    g = torch.Generator().manual_seed(1)
    vectors = [f.name for f in fields(s) if getattr(getattr(s, f.name), "shape", None) == (8,)]
    planted = replace(s, **{n: torch.randn(8, generator=g).double() for n in vectors})
    close(method.deployed(planted).x, SHIPPED[methods.name_of(method)](planted))
    assert {"x", "w"} <= set(vectors)
