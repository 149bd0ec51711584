"""FedProx, pFedMe, SCAFFOLD and IFCA against their formulas, on quadratics."""

import pytest
import torch

from qupel.core.codebook import Plan
from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Schedule
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.fedprox import FedProx
from qupel.parts.methods.ifca import IFCA
from qupel.parts.methods.pfedme import PFedMe
from qupel.parts.methods.scaffold import Scaffold
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.servers.mean import Mean
from toy import QUADRATIC, A, B, W, X, close, entered, federated, gradient, problem, state, stepped

NONE = Plan()

# --- FedProx ---


def test_fedprox_by_formula():
    method = FedProx(eta1=Schedule(0.1), mu=Schedule(growth=0.15), optimizer=SGD(momentum=0.5))  # 0.3 in epoch 2
    s = method.receive(method.start(state(c=None), NONE, QUADRATIC), (W,))
    x, v = W, torch.zeros(8).double()
    for _ in range(5):
        s = stepped(method, s)
        v = 0.5 * v + gradient(x) + 0.3 * (x - W)
        x = x - 0.1 * v
        close(s.x, x)
    assert torch.equal(method.upload(s).rows[0], s.x)
    assert torch.equal(method.deployed(s).x, W)
    assert method.tie(2.0) == pytest.approx(0.3)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()], ids=["momentum", "adam"])
def test_fedprox_without_pull_is_fedavg(optimizer):
    """To the bit."""
    common = {"eta1": Schedule(0.1), "optimizer": optimizer}
    ours, _ = federated(FedProx(**common, mu=Schedule(0.0)), 3, 4)
    plain, _ = federated(FedAvg(**common), 3, 4)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(ours, plain, strict=True))


# --- pFedMe ---


def test_pfedme_by_formula():
    method = PFedMe(
        Schedule(0.1), Schedule(0.5), rate=0.2, inner=4, optimizer=SGD(momentum=0.5), quantizer=NoQuantizer()
    )
    s = method.receive(method.start(state(c=None), NONE, QUADRATIC), (W,))
    w = W
    for _ in range(3):
        s = stepped(method, s)
        theta, v = w, torch.zeros(8).double()
        for _ in range(4):
            v = 0.5 * v + gradient(theta) + 0.5 * (theta - w)
            theta = theta - 0.1 * v
        w = w - 0.2 * (w - theta)
        close(s.x, theta)
        close(s.w, w)
    assert torch.equal(method.upload(s).rows[0], s.w)
    assert torch.equal(method.deployed(s).x, s.x)


def test_many_inner_steps_find_the_proximal_point():
    """argmin f(x) + (lambda/2)|x - w|^2 = (a b + lambda w) / (a + lambda), in closed form."""
    method = PFedMe(Schedule(0.2), Schedule(2.0), inner=300, quantizer=NoQuantizer())
    s = stepped(method, entered(method, NONE))
    torch.testing.assert_close(s.x, (A * B + 2 * W) / (A + 2), rtol=1e-9, atol=1e-9)


# --- SCAFFOLD ---


def test_scaffold_by_formula():
    """Option II over three rounds: models, the clients' controls, the server's."""
    eta, steps, rounds, n = 0.05, 4, 3, 3
    seen, states = federated(Scaffold(Schedule(eta)), rounds, steps)
    w, c, own = W, torch.zeros(8).double(), [torch.zeros(8).double() for _ in range(n)]
    for rows in seen:
        models, controls = [], []
        for k in range(n):
            y = w
            for _ in range(steps):
                y = y - eta * (A * (y - B - k) - own[k] + c)
            models.append(y)
            controls.append(own[k] - c + (w - y) / (steps * eta))
        w = sum(models) / n
        c = c + sum(new - old for new, old in zip(controls, own, strict=True)) / n
        own = controls
        torch.testing.assert_close(rows[0], w, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rows[1], c, rtol=1e-9, atol=1e-9)
    for k in range(n):
        torch.testing.assert_close(states[k].next_control, own[k], rtol=1e-9, atol=1e-9)
    assert float(c.abs().max()) > 0.1


def test_scaffolds_first_round_is_fedavgs_and_its_last_knows_no_drift():
    """With controls of 0 they are one; later SCAFFOLD comes to the minimum of the mean, which FedAvg misses where
    clients differ in their curvature."""
    steep = [A * (1 + k) for k in range(3)]
    problems = [problem(lambda v, a=a, k=k: (a * (v - B - k) ** 2).sum(-1) / 2) for k, a in enumerate(steep)]
    best = sum(a * (B + k) for k, a in enumerate(steep)) / sum(steep)

    def run(method, rounds):
        return federated(method, rounds, 6, problems=problems)[0][-1][0]

    assert torch.equal(run(Scaffold(Schedule(0.05)), 1), run(FedAvg(Schedule(0.05)), 1))
    torch.testing.assert_close(run(Scaffold(Schedule(0.05)), 300), best, rtol=1e-6, atol=1e-6)
    assert (run(FedAvg(Schedule(0.05)), 300) - best).abs().max() > 0.01


# --- IFCA ---


def test_ifca_takes_the_model_that_fits_and_leaves_the_others():
    method = IFCA(Schedule(0.1), clusters=3, optimizer=SGD(momentum=0.5))
    rows = (W + 7, B + 0.1, W - 9)  # the second one is nearest to the minimum
    s = method.receive(method.start(state(c=None), NONE, QUADRATIC), rows)
    x, v = rows[1], torch.zeros(8).double()
    for _ in range(3):
        s = stepped(method, s)
        v = 0.5 * v + gradient(x)
        x = x - 0.1 * v
        close(s.x, x)
    upload = method.upload(s)
    assert upload.shares.tolist() == [0, 1, 0]
    new, _ = Mean().finish(rows, Mean().add(None, upload, 2.0), ())
    assert torch.equal(new[1], s.x)
    assert new[0] is rows[0]
    assert new[2] is rows[2]
    again = method.receive(s, new)
    assert torch.equal(method.deployed(again).x, new[1])  # the model of its choice, as the server has it


def test_ifca_with_one_cluster_is_fedavg():
    common = {"eta1": Schedule(0.1), "optimizer": SGD(momentum=0.9)}
    ours, _ = federated(IFCA(**common, clusters=1), 3, 4)
    plain, _ = federated(FedAvg(**common), 3, 4)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(ours, plain, strict=True))


def test_ifca_begins_with_models_that_differ():
    rows = IFCA(clusters=3, spread=0.5).broadcast(X)
    assert torch.equal(rows[0], X)
    assert not torch.equal(rows[1], rows[2])
    again = IFCA(clusters=3, spread=0.5).broadcast(X)  # the same on every machine
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
