"""QuPeD: its distillation against autograd in float64, and whole federations of three networks against plain PyTorch
written from the formulas alone."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from qupel.core.codebook import plan_bits, start_codebook
from qupel.core.layout import Layout
from qupel.core.optim import SGD
from qupel.core.schedule import Clock, Schedule
from qupel.data.batches import batch as batch_of
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.door import check_trainable
from qupel.engine.inline import Inline
from qupel.engine.rounds import Stopped, enter, one_round, run
from qupel.parts.base import State
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.quped import QuPeD
from qupel.parts.phase import Phase
from qupel.parts.quantizers.lsq import LSQ
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.ste import StraightThrough
from qupel.parts.quantizers.taught import TaughtQuantizer
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.tasks.distill import Taught, kd
from qupel.tasks.task import Batch, ModuleTask, Problem
from qupel.util.errors import UserError
from tiny import CLASSES, INPUTS, beginning, final_models, make_job, mlp, run_inline, same, wide_mlp
from toy import exact_center, nearest, prox_weight

ETA1, ETA2, ETA3, LAM, LAMBDA_P = 0.1, 0.05, 0.2, 0.3, 0.4
QUANTIZER = Prox(eta2=Schedule(ETA2), lam=Schedule(LAM))
CLOCK = Clock(3, 20, 4)


def deep_mlp(seed: int = 7) -> nn.Module:
    """6-10-9-9-3: a third network, with two quantized layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = (INPUTS, 10, 9, 9)
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(9, CLASSES))


def quped(**settings) -> QuPeD:
    usual = {"eta1": Schedule(ETA1), "eta3": Schedule(ETA3), "lambda_p": Schedule(LAMBDA_P), "quantizer": QUANTIZER}
    return QuPeD(**usual | settings)


def federation(method, rounds=3, **settings):
    """Three clients with three networks; w is of a fourth client's kind, the first's."""
    networks = {"wide": wide_mlp(), "deep": deep_mlp()}
    given = {"sizes": (12, 9, 14), "bits": (2, 1, 2), "networks": networks, "network": ["", "wide", "deep"]}
    return make_job([Phase(method, rounds)], **given | {"local_steps": 4, "batch": 5} | settings)


# --- the formula ---


def divergence(student, teacher, T, on):
    """Written out: no log_softmax, no F.kl_div."""
    p = torch.exp(teacher / T) / torch.exp(teacher / T).sum(1, keepdim=True)
    z = student / T if on == "both" else student
    q = torch.exp(z) / torch.exp(z).sum(1, keepdim=True)
    return (T**2 if on == "both" else 1) * (p * (p / q).log()).sum(1).mean()


WAYS = [(1.0, "both"), (3.0, "both"), (2.0, "teacher")]
ways = pytest.mark.parametrize(("T", "on"), WAYS)


@ways
def test_kd_is_its_formula_and_so_are_its_gradients(T, on):
    g = torch.Generator().manual_seed(0)
    z, t = (torch.randn(5, 4, generator=g).double().requires_grad_() for _ in range(2))
    got, expected = kd(z, t, T, on), divergence(z, t, T, on)
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, (z, t)), torch.autograd.grad(expected, (z, t)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_equal_models_have_no_distance_and_nothing_moves():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    t = z.detach().clone().requires_grad_()
    value = kd(z, t, 2.5)
    assert abs(value.item()) < 1e-15
    assert all(g.abs().max().item() < 1e-15 for g in torch.autograd.grad(value, (z, t)))


def test_a_federation_of_one_model_that_only_distills_stands_still():
    """lambda_p = 1: no data; x = w, so that x and w have nothing to learn from each other."""
    job = make_job([Phase(quped(lambda_p=Schedule(1.0), quantizer=NoQuantizer()), 2)], bits=(32,))
    finished, models = run_inline(job)
    first = beginning(job).w[0]
    torch.testing.assert_close(finished.w[0], first, rtol=0, atol=1e-6)
    assert all(torch.allclose(m, first, rtol=0, atol=1e-6) for m in models)


def setting(networks=(mlp, wide_mlp), seed=1):
    """(own module, shared module, batch) in float64."""
    own, shared = (make().double() for make in networks)
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(7, INPUTS, generator=g).double()
    return own, shared, Batch(inputs, torch.randint(0, CLASSES, (7,), generator=g))


def mixed(z, targets, teacher, T=1.0, on="both", weight=LAMBDA_P):
    return (1 - weight) * F.cross_entropy(z, targets) + weight * divergence(z, teacher, T, on)


@ways
def test_gradients_in_x_c_and_w(T, on):
    """One step in float64: x moves by autograd's gradient, c by that at the new x, w by that of both distances."""
    own, shared, batch = setting()
    task, other = (ModuleTask(m, F.cross_entropy, torch.float64) for m in (own, shared))
    layout = task.layout
    x, w = layout.flatten(own), other.layout.flatten(shared)
    codebook = start_codebook(layout, x, plan_bits(layout, 2), "range")
    still = Prox(eta2=Schedule(ETA2), lam=Schedule(0.0), lam_c=Schedule(0.0))
    method = quped(temperature=T, on=on, quantizer=still)
    after, info = method.step(State(x, w, codebook), Problem(task, other), batch, CLOCK)

    named, theirs = dict(own.named_parameters()), dict(shared.named_parameters())
    z_w, z_x = shared(batch.inputs), own(batch.inputs)
    loss = mixed(z_x, batch.targets, z_w.detach(), T, on)
    grads = torch.autograd.grad(loss, list(named.values()))
    new = {name: p.detach() - ETA1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
    for slot in layout.slots:
        torch.testing.assert_close(slot.view(after.x), new[slot.name], rtol=1e-10, atol=1e-12)
    (slot, c), leaf = next(iter(codebook)), next(iter(codebook))[1].clone().requires_grad_()
    codes = (new[slot.name][..., None] - c).abs().argmin(-1)
    z_q = functional_call(own, {**new, slot.name: leaf[codes]}, (batch.inputs,))
    (h,) = torch.autograd.grad(mixed(z_q, batch.targets, z_w.detach(), T, on), leaf)
    torch.testing.assert_close(after.codebook.centers[0], (c - ETA2 * h).sort().values, rtol=1e-10, atol=1e-12)
    both = LAMBDA_P * (divergence(z_x.detach(), z_w, T, on) + divergence(z_q.detach(), z_w, T, on))
    grads = dict(zip(theirs, torch.autograd.grad(both, list(theirs.values())), strict=True))
    for slot in other.layout.slots:
        expected = theirs[slot.name].detach() - ETA3 * grads[slot.name]
        torch.testing.assert_close(slot.view(after.w), expected, rtol=1e-10, atol=1e-12)
    assert info.loss == pytest.approx(F.cross_entropy(z_x, batch.targets).item(), rel=1e-12)  # f, not the mixture
    assert info.quantized_loss == pytest.approx(F.cross_entropy(z_q, batch.targets).item(), rel=1e-12)


# --- whole federations, from the formulas alone ---


class Plain:
    """A client: its network, its centers by layer, its copy of w."""

    def __init__(self, module, centers):
        self.x, self.c, self.w = copy.deepcopy(module), {k: v.clone() for k, v in centers.items()}, None

    def round(self, w, batches, reading, T, on, fresh):
        self.w = copy.deepcopy(w)
        for inputs, targets in batches:
            self.step(inputs, targets, reading, T, on, fresh)
        return self.w

    def step(self, inputs, targets, reading, T, on, fresh):
        z_w = self.w(inputs)
        z_x = self.x(inputs)
        mixed(z_x, targets, z_w.detach(), T, on).backward()
        with torch.no_grad():
            for p in self.x.parameters():
                p -= ETA1 * p.grad
                p.grad = None
            codes = {}
            for name, c in self.c.items():
                p, levels = dict(self.x.named_parameters())[name], c.tolist()
                codes[name] = torch.tensor([[nearest(v, levels) for v in row] for row in p.tolist()])
                p.copy_(torch.tensor([[prox_weight(v, levels, ETA1 * LAM) for v in row] for row in p.tolist()]))
        leaves = {name: c.clone().requires_grad_() for name, c in self.c.items()}
        levels = {name: leaves[name][codes[name]] for name in leaves}
        z_q = functional_call(self.x, levels, (inputs,))
        grads = torch.autograd.grad(mixed(z_q, targets, z_w.detach(), T, on), list(leaves.values()))
        for (name, c), h in zip(self.c.items(), grads, strict=True):
            mu, p = (c - ETA2 * h).tolist(), dict(self.x.named_parameters())[name].detach().flatten().tolist()
            mine = [[v for v in p if nearest(v, c.tolist()) == j] for j in range(len(c))]
            moved = [exact_center(mu[j], mine[j], ETA2 * LAM / 2) for j in range(len(c))]
            self.c[name] = torch.tensor(moved).sort().values
        z_x, z_q = z_x.detach(), z_q.detach()
        if fresh:
            values = {
                k: c[(dict(self.x.named_parameters())[k][..., None] - c).abs().argmin(-1)] for k, c in self.c.items()
            }
            z_x, z_q = self.x(inputs).detach(), functional_call(self.x, values, (inputs,)).detach()
        if reading == "mutual":
            mixed(z_w, targets, z_x, T, on).backward()
        else:
            (LAMBDA_P * (divergence(z_x, z_w, T, on) + divergence(z_q, z_w, T, on))).backward()
        with torch.no_grad():
            for p in self.w.parameters():
                p -= ETA3 * p.grad
                p.grad = None


CASES = [("distill", 1.0, "both", False), ("distill", 2.0, "teacher", True), ("mutual", 3.0, "both", False)]


@pytest.mark.parametrize(("reading", "T", "on", "fresh"), CASES)
def test_three_clients_with_three_networks_are_plain_pytorchs(reading, T, on, fresh):
    job = federation(quped(reading=reading, temperature=T, on=on, fresh=fresh))
    check_trainable(job)
    shared, w = beginning(job), copy.deepcopy(job.module)
    layout = Layout.of(w)
    with Inline(job) as engine:
        starts = [engine.shard.state(i, 0, shared.w) for i in range(3)]
        modules = [job.networks[name] if name else job.module for name in job.network]
        clients = [Plain(m, {slot.name: c for slot, c in s.codebook}) for m, s in zip(modules, starts, strict=True)]
        for r in range(job.rounds):
            shared, *_ = one_round(job, engine, r, shared)
            uploads = []
            for i, client in enumerate(clients):
                rows = engine.shard.steps.rows(i, r)
                batches = [batch_of(job.data.train, own, job.transform)[:2] for own in rows]
                uploads.append(layout.flatten(client.round(w, batches, reading, T, on, fresh)))
            layout.load(w, torch.stack(uploads).double().mean(0).float())
            torch.testing.assert_close(shared.w[0], layout.flatten(w), rtol=1e-4, atol=1e-6)
        assert not torch.allclose(shared.w[0], beginning(job).w[0], atol=1e-3)
        for i, client in enumerate(clients):
            state = engine.shard.state(i, 0, shared.w)
            own = dict(client.x.named_parameters())
            for slot in Layout.of(client.x).slots:
                torch.testing.assert_close(slot.view(state.x), own[slot.name].detach(), rtol=1e-3, atol=1e-5)
            for slot, c in state.codebook:
                torch.testing.assert_close(c, client.c[slot.name], rtol=1e-3, atol=1e-5)


# --- what it reduces to ---


@pytest.mark.parametrize("quantizer", [QUANTIZER, StraightThrough(), NoQuantizer()])
def test_without_a_tie_it_is_local(quantizer):
    alone, models = run_inline(federation(Local(eta1=Schedule(ETA1), quantizer=quantizer)))
    done, others = run_inline(federation(quped(lambda_p=Schedule(0.0), quantizer=quantizer)))
    assert same(models, others)
    assert torch.equal(done.w[0], Layout.of(mlp()).flatten(mlp()))  # of nothing w learns nothing
    assert done.lines[-1]["test_loss"] == alone.lines[-1]["test_loss"]


def test_mutual_learning_without_a_tie_is_fedavg_beside_local():
    job = federation(quped(reading="mutual", lambda_p=Schedule(0.0), eta3=None))
    done, models = run_inline(job)
    _, others = run_inline(federation(Local(eta1=Schedule(ETA1), quantizer=QUANTIZER)))
    average, _ = run_inline(federation(FedAvg(eta1=Schedule(ETA1)), networks={}, network=["", "", ""]))
    torch.testing.assert_close(done.w[0], average.w[0], rtol=0, atol=1e-7)
    for a, b in zip(models, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_a_quantizer_with_one_pass_teaches_with_what_it_has():
    """Straight through there is no f(x): w learns from Q(x) alone."""
    own, shared, batch = setting()
    task, other = (ModuleTask(m, F.cross_entropy, torch.float64) for m in (own, shared))
    x, w = task.layout.flatten(own), other.layout.flatten(shared)
    codebook = start_codebook(task.layout, x, plan_bits(task.layout, 2), "range")
    method = quped(quantizer=StraightThrough())
    after, _ = method.step(State(x, w, codebook), Problem(task, other), batch, CLOCK)
    z_q = task.outputs(codebook.hard(x), batch.inputs)
    theirs = dict(shared.named_parameters())
    grads = torch.autograd.grad(LAMBDA_P * divergence(z_q, shared(batch.inputs), 1.0, "both"), list(theirs.values()))
    for name, g in zip(theirs, grads, strict=True):
        slot = other.layout[name]
        torch.testing.assert_close(slot.view(after.w), theirs[name].detach() - ETA3 * g, rtol=1e-9, atol=1e-11)


def test_a_step_makes_three_forward_passes_and_no_more():
    calls = {"own": 0, "shared": 0}

    class Counted(ModuleTask):
        def __init__(self, module, role):
            super().__init__(module, F.cross_entropy, torch.float64)
            self.module.register_forward_hook(lambda *_: calls.__setitem__(role, calls[role] + 1))

    own, shared, batch = setting()
    tasks = Problem(Counted(own, "own"), Counted(shared, "shared"))
    x, w = tasks.own.layout.flatten(own), tasks.shared.layout.flatten(shared)
    codebook = start_codebook(tasks.own.layout, x, plan_bits(tasks.own.layout, 2), "range")
    quped().step(State(x, w, codebook), tasks, batch, CLOCK)
    assert calls == {"own": 2, "shared": 1}


def test_what_a_task_is_taught_may_be_taught_again():
    """Two teachers: (1 - a) ((1 - b) f + b KD_b) + a KD_a."""
    own, shared, batch = setting()
    task, third = ModuleTask(own, F.cross_entropy, torch.float64), wide_mlp(3).double()
    a, b = third(batch.inputs).detach(), shared(batch.inputs).detach()
    inner = Taught(task, b, 0.25)
    got = Taught(inner, a, 0.5, 2.0).gradient(task.layout.flatten(own), batch)
    z = own(batch.inputs)
    expected = 0.5 * mixed(z, batch.targets, b, weight=0.25) + 0.5 * divergence(z, a, 2.0, "both")
    grads = dict(zip(dict(own.named_parameters()), torch.autograd.grad(expected, list(own.parameters())), strict=True))
    for slot in task.layout.slots:
        torch.testing.assert_close(slot.view(got.gradient), grads[slot.name], rtol=1e-10, atol=1e-12)
    assert set(inner.heard) == {"q"}


# --- clients of one network ---


def shared_within(**settings):
    """Two clients of one network, one of another, one of the shared network alone with it."""
    method = quped(share="architecture", **settings)
    return federation(method, sizes=(12, 12, 12, 12), network=["", "wide", "deep", "wide"], bits=(2, 2, 1, 2))


@pytest.mark.parametrize("quantizer", [QUANTIZER, NoQuantizer()])
def test_clients_of_one_network_are_averaged_within_it(quantizer):
    """With pull = 1 both have their mean, as by hand; who is alone keeps what it has; who has the shared network has
    w, until it is quantized."""
    job = replace(shared_within(pull=1.0, quantizer=quantizer), on_bad_upload="stop")
    alone = replace(job, phases=[replace(job.phases[0], method=quped(quantizer=quantizer))])
    with Inline(job) as engine, Inline(alone) as other:
        shared, *_ = one_round(job, engine, 0, enter(job.phases[0], beginning(job).w, job.first_means))
        expected, *_ = one_round(alone, other, 0, beginning(alone))
        torch.testing.assert_close(shared.w[0], expected.w[0])
        mine, theirs = (
            [e.shard.state(i, 0, w).x for i in range(4)] for e, w in ((engine, shared.w), (other, expected.w))
        )
    mean = (theirs[1].double() + theirs[3].double()).div(2).float()
    first = expected.w[0] if quantizer == NoQuantizer() else theirs[0]
    for got, want in zip(mine, (first, mean, theirs[2], mean), strict=True):
        torch.testing.assert_close(got, want)


def test_the_mean_of_a_network_is_what_a_client_becomes_personal_with():
    """Whatever the next phase: the newest mean, not what the client made of the one before; and the server's momentum
    is the means', too. lambda_p = 0, full batches, no levels: each network is FedAvgM of its own clients."""
    method = quped(share="architecture", pull=1.0, lambda_p=Schedule(0.0), quantizer=NoQuantizer(), reading="mutual")
    four = {"sizes": (12, 12, 12, 12), "network": ["", "wide", "deep", "wide"], "bits": (32, 32, 32, 32)}
    job = federation(method, **four, batch=12)
    server = FedAvgM(0.9, nesterov=True)
    job = job.with_phases([Phase(method, 3, server), Phase(Local(eta1=Schedule(0.0)), 1)])
    done, models = run_inline(job)
    for name, clients in (("wide", (1, 3)), ("deep", (2,))):
        own = {"module": job.networks[name], "networks": {}, "network": (), "names": ()}
        own |= {"parts": [job.parts[i] for i in clients], "plans": [job.plans[i] for i in clients]}
        expected, _ = run_inline(replace(job, **own, phases=[Phase(FedAvg(method.eta1), 3, server)]))
        for i in clients:
            torch.testing.assert_close(models[i], expected.w[0])
    assert len(done.w) == 5


def test_means_cannot_begin_late():
    job = shared_within()
    with pytest.raises(UserError, match="means of networks are there from the first phase on"):
        job.with_phases([Phase(quped(), 1), *job.phases])


def test_it_goes_on_from_a_checkpoint_in_stacks_and_over_phases(tmp_path):
    job = shared_within()
    job = job.with_phases([Phase(replace(job.phases[0].method, quantizer=NoQuantizer()), 2), *job.phases])
    done, models = run_inline(job)
    assert len(done.w) == 5  # w, its own network's mean; wide's and deep's, two rows of w's size each
    assert done.lines[-1]["upload_bytes"] == 4 * 3 * len(done.w[0])
    for _ in range(job.rounds - 1):
        with Inline(job) as engine, pytest.raises(Stopped):
            run(job, engine, checkpoints=Checkpoints(tmp_path, "same"), should_stop=lambda: True)
    with Inline(job) as engine:
        again = run(job, engine, checkpoints=Checkpoints(tmp_path, "same"))
        assert same(final_models(job, engine, again.w), models)
    stacked, others = run_inline(replace(job, stacked=True))
    for a, b in zip([*done.w, *models], [*stacked.w, *others], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    _, apart = run_inline(job.with_phases([replace(p, method=replace(p.method, share="nothing")) for p in job.phases]))
    assert not torch.allclose(apart[1], models[1], atol=1e-4)


# --- at the door ---


def test_numbers_to_predict_are_refused():
    job = federation(quped())
    job = replace(job, data=replace(job.data, classes=None))
    with pytest.raises(UserError, match=r"QuPeD learns from class probabilities, .* has no class labels"):
        check_trainable(job)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"temperature = 0\.0: allowed are numbers greater than 0"):
        QuPeD(temperature=0.0)


def test_a_memory_goes_with_each_network():
    """With momentum, stacked, and in one by one: the same, whoever is beside whom."""
    method = quped(optimizer=SGD(momentum=0.9))
    job = federation(method, sizes=(12, 12, 12, 12), network=["", "wide", "deep", "wide"])
    done, models = run_inline(job)
    again, others = run_inline(replace(job, stacked=True))
    for a, b in zip([done.w[0], *models], [again.w[0], *others], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    with Inline(job) as engine:
        finished = run(job, engine)
        assert [len(engine.deployed(job.rounds - 1, finished.w, i).codebook.slots) for i in range(4)] == [1, 1, 2, 1]


# --- a client's own x as the teacher of its Q(x) ---


@pytest.mark.parametrize(("quantizer", "forwards"), [(Prox(eta2=Schedule(ETA2), lam=Schedule(0.0)), 2), (LSQ(), 2)])
def test_x_teaches_its_low_bit_model(quantizer, forwards):
    """Against autograd in float64, with the quantizer's own way to make weights and levels of df/dQ; what x said is
    taken from a pass that is there, else made."""
    own, _, batch = setting()
    task, calls = ModuleTask(own, F.cross_entropy, torch.float64), []
    task.module.register_forward_hook(lambda *_: calls.append(1))
    x = task.layout.flatten(own)
    codebook = start_codebook(task.layout, x, plan_bits(task.layout, 2), "range")
    taught = Local(eta1=Schedule(ETA1), quantizer=TaughtQuantizer(quantizer, 0.25, 2.0))
    after, info = taught.step(State(x, x, codebook), Problem(task, task), batch, CLOCK)
    assert len(calls) == forwards
    z = own(batch.inputs).detach()

    class ByHand(ModuleTask):
        """The task with the mixture as its loss, but at x."""

        def gradient(self, v, *given, **named):
            loss = F.cross_entropy if v is x else lambda out, targets: mixed(out, targets, z, 2.0, weight=0.25)
            return super().gradient(v, *given, **{**named, "loss": loss})

    hand = ByHand(own, F.cross_entropy, torch.float64)
    alone = Local(eta1=Schedule(ETA1), quantizer=quantizer)
    expected, _ = alone.step(State(x, x, codebook), Problem(hand, hand), batch, CLOCK)
    torch.testing.assert_close(after.x, expected.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(after.codebook.centers[0], expected.codebook.centers[0], rtol=1e-9, atol=1e-12)
    plain, said = alone.step(State(x, x, codebook), Problem(task, task), batch, CLOCK)
    assert not torch.allclose(plain.codebook.centers[0], after.codebook.centers[0], atol=1e-9)
    assert info.loss == said.loss  # f, not the mixture


def test_a_taught_quantizer_without_weight_is_the_quantizer():
    _, models = run_inline(federation(quped()))
    _, others = run_inline(federation(quped(quantizer=TaughtQuantizer(QUANTIZER, 0.0))))
    _, lessons = run_inline(federation(quped(quantizer=TaughtQuantizer(QUANTIZER, 0.5))))
    assert same(models, others)
    assert not any(torch.equal(a, b) for a, b in zip(models, lessons, strict=True))
