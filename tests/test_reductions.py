"""Methods become one another where they must, to the bit where the operations are the same ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Clock, Schedule, Travel
from qupel.data.batches import rows
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.parts.base import State
from qupel.parts.methods import methods
from qupel.parts.methods.base import Alone
from qupel.parts.methods.ditto import Ditto
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.fedprox import FedProx
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.tasks.task import Evaluated, ModuleTask, Problem
from tiny import QUANTIZER, beginning, blobs, make_job, mlp, run_inline, same


def torch_training(job, client, optimizer, steps):
    """The same batches through torch.optim on the plain module."""
    module = mlp()
    optimizer = optimizer(module.parameters())
    owned = job.parts[client].train_rows
    for step in range(steps):
        picked = torch.as_tensor(owned[rows(job.seed, client, step, len(owned), job.batch)])
        optimizer.zero_grad()
        F.cross_entropy(module(job.data.train.inputs[picked]), job.data.train.targets[picked]).backward()
        optimizer.step()
    return Layout.of(module).flatten(module)


PLAIN = {
    "local": Local(),
    "qupel": QuPeL(lambda_p=Schedule(0.0)),
    "fedavg": FedAvg(),
    "fedprox": FedProx(mu=Schedule(0.0)),
    "ditto": Ditto(lambda_p=Schedule(0.0)),
    "frozen": Local(quantizer=Frozen()),
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(), lambda p: torch.optim.SGD(p, 0.1)),
        (SGD(momentum=0.9, weight_decay=1e-3), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3)),
        (Adam(), lambda p: torch.optim.Adam(p, 0.1)),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("name", PLAIN)
def test_no_codebook_and_no_pull_is_the_plain_optimizer(ours, theirs, name):
    """All of them reduce to it (FedAvg with one client and one round); the whole engine against torch.optim."""
    method = replace(PLAIN[name], eta1=Schedule(0.1), optimizer=ours)
    job = make_job([Phase(method, 1)], sizes=(12,), bits=(32,), local_steps=20)
    finished, models = run_inline(job)
    expected = torch_training(job, 0, theirs, 20)
    torch.testing.assert_close(models[0], expected, rtol=1e-5, atol=1e-6)
    assert (expected - Layout.of(mlp()).flatten(mlp())).abs().max() > 0.05
    if name == "fedavg":
        assert same(finished.w, models)


def steps(method, state, count=25):
    """Free steps on the tiny MLP's real gradient."""
    task = ModuleTask(mlp(), F.cross_entropy)
    problem = Problem(task, task)
    data, _ = blobs((40,))
    batch = data.train.inputs, data.train.targets
    for k in range(count):
        state, _ = method.step(state, problem, batch, Clock(k, count, 5))
    return state


def start(method, plan):
    task = ModuleTask(mlp(), F.cross_entropy)
    x = task.layout.flatten(mlp())
    return method.start(State(x, x), Plan(plan), Problem(task, task))


@pytest.mark.parametrize("lam", [Travel(1.0), Schedule(growth=0.05)])
@pytest.mark.parametrize("levels", [2, 4])
def test_algorithm_1_with_fixed_centers_is_proxquant(lam, levels):
    """eta2 = 0 and the same centers: equal bits."""
    common = {"eta1": Schedule(0.2, decay=0.9), "optimizer": SGD(momentum=0.5)}
    proxquant = Local(**common, quantizer=ProxQuant(lam=lam))
    local = Local(**common, quantizer=replace(QUANTIZER, eta2=Schedule(0.0), lam=lam, lam_c=Schedule(0.0)))
    first = start(proxquant, {"2.weight": levels})
    a, b = steps(proxquant, first), steps(local, first)
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.codebook.centers[0], b.codebook.centers[0])
    assert torch.equal(proxquant.deployed(a).x, local.deployed(b).x)
    assert not torch.equal(a.x, first.x)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_qupel_without_pull_is_algorithm_1_per_client(mode):
    quantizer = replace(QUANTIZER, mode=mode)
    common = {"eta1": Schedule(0.1, decay=0.9), "optimizer": SGD(momentum=0.5), "quantizer": quantizer}
    jobs = [
        make_job([Phase(method, 4)], bits=(1, 2, 3, 32))
        for method in (Local(**common), QuPeL(**common, lambda_p=Schedule(0.0)))
    ]
    (a, models), (b, others) = (run_inline(job) for job in jobs)
    assert same(models, others)
    drop = {"seconds", "method", "upload_bytes"}
    assert [{k: v for k, v in line.items() if k not in drop} for line in a.lines] == [
        {k: v for k, v in line.items() if k not in drop} for line in b.lines
    ]
    assert same(b.w, beginning(jobs[1]).w)  # nothing pulls w either


def test_no_codebook_is_full_precision_qupel():
    """x - eta1 (grad f(x) + lambda_p (x - w)), w + eta3 lambda_p (x - w), mean: in plain torch, two clients."""
    method = QuPeL(eta1=Schedule(0.1), eta3=Schedule(2.0), lambda_p=Schedule(0.1), quantizer=QUANTIZER)
    job = make_job([Phase(method, 3)], sizes=(12, 8), bits=(32,))
    finished, models = run_inline(job)
    task = ModuleTask(mlp(), F.cross_entropy)
    w = Layout.of(mlp()).flatten(mlp()).double()
    x = [w.clone(), w.clone()]
    for r in range(3):
        local = [w.clone(), w.clone()]
        for i in range(2):
            for step in range(3 * r, 3 * r + 3):
                owned = job.parts[i].train_rows
                picked = torch.as_tensor(owned[rows(0, i, step, len(owned), 4)])
                batch = job.data.train.inputs[picked], job.data.train.targets[picked]
                g = task.gradient(x[i].float(), batch).gradient.double()
                x[i] = x[i] - 0.1 * (g + 0.1 * (x[i] - local[i]))
                local[i] = local[i] + 0.2 * (x[i] - local[i])
        w = (local[0] + local[1]) / 2
    torch.testing.assert_close(finished.w[0], w.float(), rtol=1e-4, atol=1e-5)
    for got, expected in zip(models, x, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


def test_identical_clients_stay_identical():
    """Same data, same bits, whole batches: x_i and w_i stay equal, but for the order of the samples in a sum."""
    data, parts = blobs((10,))
    method = QuPeL(eta3=Schedule(1.25), lambda_p=Schedule(0.1), quantizer=QUANTIZER)
    tune = replace(method, quantizer=Frozen(eta2=Schedule(1e-2)), enters="free")
    job = make_job([Phase(method, 4), Phase(tune, 2)], bits=(2,), data=(data, parts * 3), batch=10)
    with Inline(job) as engine:
        finished = run(job, engine)
        models = [engine.deployed(5, finished.w, i).x for i in range(3)]
        states = [engine.shard.state(i, 1, finished.w) for i in range(3)]
    for i in (1, 2):
        torch.testing.assert_close(models[i], models[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[i].x, states[0].x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[i].codebook.centers[0], states[0].codebook.centers[0], rtol=1e-5, atol=1e-6)
    one = make_job([Phase(method, 4), Phase(tune, 2)], bits=(2,), data=(data, parts), batch=10)
    alone, (model,) = run_inline(one)  # and equal to the federation of one
    torch.testing.assert_close(models[0], model[: len(models[0])], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(finished.w[0], alone.w[0], rtol=1e-5, atol=1e-6)


def test_identical_clients_with_one_sample_are_identical_bits():
    data, parts = blobs((1,))
    method = QuPeL(eta3=Schedule(1.25), lambda_p=Schedule(0.1), quantizer=QUANTIZER)
    job = make_job([Phase(method, 5)], bits=(2,), data=(data, parts * 3))
    finished, models = run_inline(job)
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])
    alone, (model,) = run_inline(make_job([Phase(method, 5)], bits=(2,), data=(data, parts)))
    assert torch.equal(model, models[0])
    torch.testing.assert_close(finished.w[0], alone.w[0], rtol=1e-6, atol=1e-7)  # the mean of three equal floats rounds


@pytest.mark.parametrize("weighted", [False, True])
def test_fedavg_is_the_mean_of_its_clients_models(weighted):
    sizes = (4, 8, 20)
    job = make_job([Phase(FedAvg(eta1=Schedule(0.2)), 1)], sizes=sizes, bits=(32,), weighted=weighted, local_steps=5)
    finished, _ = run_inline(job)
    trained = [torch_training(job, i, lambda p: torch.optim.SGD(p, 0.2), 5).numpy() for i in range(3)]
    expected = np.average(np.stack(trained).astype(np.float64), axis=0, weights=sizes if weighted else None)
    np.testing.assert_allclose(finished.w[0].numpy(), expected, rtol=1e-5, atol=1e-6)
    other = np.average(np.stack(trained).astype(np.float64), axis=0, weights=None if weighted else sizes)
    assert np.abs(other - expected).max() > 1e-3


def test_fedavg_then_local_is_local_training_from_the_average():
    """The conversion: the fine-tuning phase starts at the newest global model, on every client."""
    tuned = make_job([Phase(FedAvg(), 3), Phase(Local(), 2)], bits=(32,))
    finished, models = run_inline(tuned)
    average, _ = run_inline(make_job([Phase(FedAvg(), 3)], bits=(32,)))
    assert same(finished.w, average.w)
    task = ModuleTask(mlp(), F.cross_entropy)
    for i in range(4):
        x = average.w[0]
        for step in range(9, 15):
            owned = tuned.parts[i].train_rows
            picked = torch.as_tensor(owned[rows(0, i, step, len(owned), 4)])
            batch = tuned.data.train.inputs[picked], tuned.data.train.targets[picked]
            x = torch.add(x, task.gradient(x, batch).gradient, alpha=-0.1)
        torch.testing.assert_close(models[i], x, rtol=1e-5, atol=1e-6)


def test_binaryrelax_with_lambda_0_is_posttraining_until_deployment():
    a = steps(Local(quantizer=BinaryRelax(lam=Schedule(0.0))), start(Local(quantizer=BinaryRelax()), {"2.weight": 2}))
    b = steps(Local(quantizer=Afterwards()), start(Local(quantizer=Afterwards()), {"2.weight": 2}))
    assert torch.equal(a.x, b.x)


def test_travel_0_and_full_tracking_off_is_the_plain_optimizer_with_a_codebook_on_the_side():
    quantizer = replace(QUANTIZER, lam=Travel(0.0), lam_c=Schedule(0.0))
    a = steps(Local(quantizer=quantizer), start(Local(), {"2.weight": 4}))
    b = steps(Local(), start(Local(), {}))
    assert torch.equal(a.x, b.x)
    assert not torch.equal(a.codebook.centers[0], start(Local(), {"2.weight": 4}).codebook.centers[0])


# --- the sign of the w step ---


class Level:
    """f = 0."""

    def gradient(self, x, batch, slots=None):
        return Evaluated(torch.zeros_like(x), 0.0, x[:0])


FLAT = Problem(Level(), Level())


@pytest.mark.parametrize(("as_printed", "factor"), [(True, 1.125), (False, 0.875)])
def test_the_printed_w_step_diverges_and_the_corrected_one_contracts(as_printed, factor):
    """|w - x| grows as 1.125^t at the paper's eta3 = 5 and lambda_p = 0.025, and shrinks as 0.875^t with descent."""
    method = QuPeL(eta1=Schedule(0.0), eta3=Schedule(5.0), lambda_p=Schedule(0.025), as_printed=as_printed)
    x = torch.zeros(3).double()
    s = State(x, torch.tensor([1.0, -2.0, 0.5]).double(), Codebook())
    for t in range(1, 40):
        s, _ = method.step(s, FLAT, None, Clock(0, 1, 1))
        torch.testing.assert_close(s.w, torch.tensor([1.0, -2.0, 0.5]).double() * factor**t)


def test_the_printed_center_rule_drives_centers_away():
    """400 steps on N(0, 0.05), two centers (MATH.md): R stays near its least with +, explodes with the printed -."""
    torch.manual_seed(0)
    x = 0.05 * torch.randn(8000).double()
    slot = Layout.of(torch.nn.Linear(8000, 1, bias=False)).slots[0]
    ends = {}
    for rule in ("first_order", "paper", "exact"):
        q = replace(QUANTIZER, eta2=Schedule(1e-4), lam=Schedule(0.0), lam_c=Schedule(0.02), rule=rule)
        s = State(x, x, Codebook((slot,), (torch.tensor([-0.04, 0.04]).double(),)))
        method = Local(eta1=Schedule(0.0), quantizer=q)
        for _ in range(400):
            s, _ = method.step(s, FLAT, None, Clock(0, 1, 1))
        c = s.codebook.centers[0]
        ends[rule] = float((x[:, None] - c).abs().min(1).values.sum() / 2)
    least = float((x.abs() - x.abs().median()).abs().sum() / 2)
    assert ends["exact"] == pytest.approx(least, rel=0.01)
    assert ends["first_order"] < 1.1 * least
    assert ends["paper"] > 3 * least


@pytest.mark.parametrize("name", [name for name in methods if issubclass(methods[name], Alone)])
def test_methods_that_do_not_communicate_send_nothing(name):
    method, w = methods[name](), (torch.zeros(3),)
    s = State(torch.ones(3), torch.ones(3))
    assert method.upload(s) is None
    assert method.receive(s, w) is s
    assert method.broadcast(w[0]) == w
    job = make_job([Phase(method, 2)])
    assert same(run_inline(job)[0].w, beginning(job).w)
