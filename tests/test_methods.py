"""One step of the paper's methods and of Ditto against their formulas, written out a second time in plain Python on a
quadratic loss."""

from dataclasses import replace

import pytest
import torch

from qupel.core.codebook import Codebook
from qupel.core.layout import Slot
from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Clock, Schedule
from qupel.parts.base import State
from qupel.parts.methods.base import any_network, keeps_state, state_of, tie
from qupel.parts.methods.ditto import Ditto
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from toy import (
    QUADRATIC,
    QUANTIZED,
    A,
    B,
    C,
    W,
    X,
    close,
    entered,
    every,
    exact_center,
    gradient,
    name,
    nearest,
    problem,
    prox_weight,
    state,
    stepped,
    tensors,
)

# --- the formulas once more, number by number ---


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


# --- QuPeL ---


@pytest.mark.parametrize("rule", ["exact", "first_order", "paper"])
@pytest.mark.parametrize("ascent", [False, True])
def test_qupel_is_algorithm_2(rule, ascent):
    method = QuPeL(
        eta1=Schedule(growth=0.05),  # 0.1 in epoch 2
        eta3=Schedule(2.0),
        lambda_p=Schedule(0.25),
        optimizer=SGD(weight_decay=0.01),
        quantizer=Prox(eta2=Schedule(0.02), lam=Schedule(growth=0.15), lam_c=Schedule(growth=0.4), rule=rule),
        as_printed=ascent,
    )
    s, (x, w, c) = state(), (X.tolist(), W.tolist(), C.tolist())
    for _ in range(20):
        s = stepped(method, s)
        x, w, c = algorithm(
            x, w, c, eta1=0.1, eta2=0.02, lam=0.3, lam_c=0.8, lambda_p=0.25, eta3=2.0, rule=rule, decay=0.01,
            ascent=ascent,
        )  # fmt: skip
        close(s.x, x)
        close(s.w, w)
        close(s.codebook.centers[0], c)
    assert (s.x - X).abs().max() > 0.1
    assert (s.codebook.centers[0] - C).abs().max() > 0.01


@pytest.mark.parametrize("parts", [{}, {"enters": "free", "quantizer": Frozen()}], ids=["training", "fine-tuning"])
@pytest.mark.parametrize("lambda_p", [0.25, 0.0])
def test_coupling_stands_for_eta3_lambda_p(parts, lambda_p):
    """x is pulled by lambda_p; w takes its share of x whatever lambda_p is. Not given, the share is eta3 lambda_p."""
    common = {"eta1": Schedule(0.1), "lambda_p": Schedule(lambda_p), **parts}
    start = state(c=None)
    given = stepped(QuPeL(**common, coupling=0.3, eta3=Schedule(99.0)), start)
    x = X - 0.1 * (gradient(X) + lambda_p * (X - W))
    close(given.x, x)
    close(given.w, W + 0.3 * (x - W))
    none = stepped(QuPeL(**common, eta3=Schedule(2.0)), start)
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
        quantizer=Prox(eta2=Schedule(0.5), lam=Schedule(0.25), lam_c=Schedule(0.25)),
    )
    after = stepped(method, s, problem(lambda v: ((v - 1) ** 2).sum(-1) / 2), Clock(0, 1, 1))
    # g = (-0.75, -0.25, 1) + 0.5 (0.25, -0.25, 1) = (-0.625, -0.375, 1.5);  y = x - 0.5 g = (0.5625, 0.9375, 1.25)
    # prox moves each quantized weight by 0.5 * 0.25 / 2 = 0.0625 to the nearest center (1): (0.625, 1)
    close(after.x, [0.625, 1.0, 1.25])
    # both weights belong to center 1; h = sum of (1 - 1) = 0; mu = (0, 1), center 0 is empty and stays
    # center 1, kappa = 0.0625: the weight 0.625 pulls, the one on it holds: median(0.625, 1, 1.125, 1, 0.875)
    close(after.codebook.centers[0], [0.0, 1.0])
    # w + 0.5 (x - w)
    close(after.w, [0.3125, 1.0, 1.125])


def test_qupel_sends_its_copy_of_w_and_ships_its_own_model():
    method = QuPeL(eta1=Schedule(0.1), eta3=Schedule(2.0), lambda_p=Schedule(0.25))
    s = method.receive(state(), (W + 5,))
    assert torch.equal(s.w, W + 5)
    assert torch.equal(s.x, X)
    s = stepped(method, s)
    upload = method.upload(s)
    assert upload.shares is None
    assert len(upload.rows) == 1
    assert torch.equal(upload.rows[0], s.w)
    model = method.deployed(s)
    assert torch.equal(model.x, s.codebook.hard(s.x))
    assert not torch.equal(model.x, s.x)
    assert method.broadcast(W)[0] is W


def test_soft_qupel_adds_the_pull():
    q = Prox(eta2=Schedule(0.0), lam=Schedule(0.0), lam_c=Schedule(0.0), mode="soft")
    common = {"eta1": Schedule(0.1), "quantizer": q}
    alone = stepped(Local(**common), state())
    pulled = stepped(QuPeL(**common, lambda_p=Schedule(0.5), eta3=Schedule(0.0)), state())
    close(pulled.x, alone.x - 0.1 * 0.5 * (X - W))


# --- fine-tuning in a federation: QuPeL with frozen assignments ---


def tuning(**settings):
    return QuPeL(
        eta1=Schedule(0.1),
        eta3=Schedule(2.0),
        lambda_p=Schedule(0.25),
        enters="free",
        quantizer=Frozen(eta2=Schedule(0.05)),
        **settings,
    )


def test_finetuning_by_formula():
    """As the paper's: the centers take the summed gradient of f; the pull to w acts on what is not quantized."""
    method = tuning()
    s = method.start(state(), {}, QUADRATIC)
    codes = [nearest(v, C.tolist()) for v in X[1:7].tolist()]
    close(s.x, [X[0], *(C[j] for j in codes), X[7]])
    x, w, c = s.x.tolist(), W.tolist(), C.tolist()
    a, b = A.tolist(), B.tolist()
    for _ in range(30):
        s = stepped(method, s)
        g = [a[k] * (x[k] - b[k]) for k in range(8)]
        c = [c[j] - 0.05 * sum(g[k + 1] for k in range(6) if codes[k] == j) for j in range(3)]
        free = {k: x[k] - 0.1 * (g[k] + 0.25 * (x[k] - w[k])) for k in (0, 7)}
        x = [free[0], *(c[j] for j in codes), free[7]]
        w = [w[k] + (2.0 * 0.25 * (x[k] - w[k]) if k in free else 0.0) for k in range(8)]
        close(s.x, x)
        close(s.w, w)
        close(s.codebook.centers[0], sorted(c))


def test_finetuning_sends_and_pulls_only_what_is_not_quantized():
    method = tuning()
    s = method.start(state(), {}, QUADRATIC)
    moved = stepped(method, s)
    (upload,) = method.upload(moved).rows
    assert torch.equal(upload[1:7], W[1:7])
    assert (upload[[0, 7]] != W[[0, 7]]).all()
    far = stepped(method, replace(s, w=W + 5))  # another w moves the free coordinates only
    assert torch.equal(far.x[1:7], moved.x[1:7])
    assert (far.x[[0, 7]] != moved.x[[0, 7]]).all()
    assert method.receive(s, (W + 5,)).w.tolist() == (W + 5).tolist()
    alone = Local(eta1=Schedule(0.1), quantizer=Frozen())
    assert alone.upload(stepped(alone, s)) is None
    assert alone.receive(s, (W + 5,)) is s


def test_finetuning_without_codebook_is_full_precision():
    s = stepped(tuning(), state(c=None))
    x = X - 0.1 * (gradient(X) + 0.25 * (X - W))
    close(s.x, x)
    close(s.w, W + 0.5 * (x - W))


# --- Local ---


def test_local_is_algorithm_1():
    method = Local(
        eta1=Schedule(0.1), quantizer=Prox(eta2=Schedule(0.05), lam=Schedule(growth=0.1))
    )  # lam_c None: the same lambda
    s, (x, c) = state(), (X.tolist(), C.tolist())
    for _ in range(20):
        s = stepped(method, s)
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
        quantizer=Prox(eta2=Schedule(0.0), lam=Schedule(0.3)),
    )
    parameter = torch.nn.Parameter(X.clone())
    torch_adam = torch.optim.Adam([parameter], 0.1)
    parameter.grad = gradient(X)
    torch_adam.step()
    y = parameter.detach().tolist()
    s = stepped(method, state(memory=Adam().memory(X)))
    close(s.x, [prox_weight(y[k], C.tolist(), 0.1 * 0.3) if k in QUANTIZED else y[k] for k in range(8)])


# --- FedAvg ---


def test_fedavg_by_formula():
    method = FedAvg(eta1=Schedule(0.1), optimizer=SGD(momentum=0.5))
    s = method.receive(method.start(state(), {"q": 2}, QUADRATIC), (W,))
    assert not s.codebook
    x, v = W, torch.zeros(8).double()
    for _ in range(3):
        s = stepped(method, s)
        v = 0.5 * v + gradient(x)
        x = x - 0.1 * v
        close(s.x, x)
    assert torch.equal(method.upload(s).rows[0], s.x)
    fresh = method.receive(s, (X,))  # the optimizer starts afresh every round
    assert torch.equal(fresh.x, X)
    assert torch.equal(fresh.memory[0], torch.zeros(8).double())
    assert torch.equal(method.deployed(fresh).x, X)
    assert torch.equal(method.deployed(State(X, W)).x, W)  # the average, not a client's own steps


def test_quantized_fedavg_is_algorithm_1_from_w_and_ships_w_on_the_clients_levels():
    method = FedAvg(eta1=Schedule(0.1), quantizer=Prox(eta2=Schedule(0.05), lam=Schedule(growth=0.1)))
    s, (x, c) = method.receive(state(), (W,)), (W.tolist(), C.tolist())
    for _ in range(5):
        s = stepped(method, s)
        x, _, c = algorithm(x, W.tolist(), c, eta1=0.1, eta2=0.05, lam=0.2, lam_c=0.2, lambda_p=0, eta3=0)
        close(s.x, x)
        close(s.codebook.centers[0], c)
    assert torch.equal(method.upload(s).rows[0], s.x)
    assert torch.equal(method.deployed(s).x, s.codebook.hard(W))
    again = method.receive(s, (X,))
    assert again.codebook is s.codebook  # the levels stay the client's own
    assert keeps_state(method)
    assert not keeps_state(FedAvg())


# --- Ditto ---


def test_ditto_by_formula():
    """w_i: SGD from the w that came; x_i: Algorithm 1 pulled to that w, which stays while w_i moves on."""
    method = Ditto(
        eta1=Schedule(0.1),
        lambda_p=Schedule(growth=0.25),  # 0.5 in epoch 2
        optimizer=SGD(weight_decay=0.01),
        quantizer=Prox(eta2=Schedule(0.02), lam=Schedule(0.3), lam_c=Schedule(0.8)),
    )
    s, (x, c) = method.start(state(), {"q": 3}, QUADRATIC), (X.tolist(), C.tolist())
    a, b = A.tolist(), B.tolist()
    for came in (W.tolist(), (W / 2 - 0.1).tolist()):
        s = method.receive(s, (torch.tensor(came, dtype=torch.float64),))
        w = came
        for _ in range(6):
            s = stepped(method, s)
            w = [w[k] - 0.1 * (a[k] * (w[k] - b[k]) + 0.01 * w[k]) for k in range(8)]
            x, _, c = algorithm(
                x, came, c, eta1=0.1, eta2=0.02, lam=0.3, lam_c=0.8, lambda_p=0.5, eta3=0, decay=0.01
            )  # fmt: skip
            close(s.w, w)
            close(s.x, x)
            close(s.anchor, came)
            close(s.codebook.centers[0], c)
        assert torch.equal(method.upload(s).rows[0], s.w)
    assert torch.equal(method.deployed(s).x, s.codebook.hard(s.x))
    assert tie(method, 2.0) == 0.5


@pytest.mark.parametrize("quantizer", every(quantizers), ids=name)
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, weight_decay=0.01), Adam()], ids=["momentum", "adam"])
def test_ditto_without_pull_is_fedavg_beside_local(quantizer, optimizer):
    """To the bit, over two rounds."""
    common = {"eta1": Schedule(0.1), "optimizer": optimizer}
    ditto = Ditto(**common, lambda_p=Schedule(0.0), quantizer=quantizer)
    fedavg, local = FedAvg(**common), Local(**common, quantizer=quantizer)
    both, shared, own = entered(ditto), entered(fedavg), entered(local)
    for came in (W, W / 3):
        both, shared, own = ditto.receive(both, (came,)), fedavg.receive(shared, (came,)), local.receive(own, (came,))
        for _ in range(4):
            both, shared, own = stepped(ditto, both), stepped(fedavg, shared), stepped(local, own)
        assert torch.equal(both.x, own.x)
        assert torch.equal(both.w, shared.x)
        pairs = zip(tensors(both.codebook), tensors(own.codebook), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(ditto.upload(both).rows[0], fedavg.upload(shared).rows[0])
        assert torch.equal(ditto.deployed(both).x, local.deployed(own).x)
    assert not torch.equal(both.w, both.x)


def test_what_methods_say_of_themselves():
    assert state_of(Local()) is State
    assert issubclass(state_of(Ditto()), State)
    assert state_of(Ditto()) is not State
    assert not any_network(FedAvg())
    assert tie(QuPeL(lambda_p=Schedule(growth=0.1)), 3.0) == pytest.approx(0.3)
    assert tie(FedAvg(), 3.0) == tie(Local(), 3.0) == 0
