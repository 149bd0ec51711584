"""The task of one client, BatchNorm's statistics, and which weights are judged for every method."""

import copy
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.core.quantize import init_centers
from qupel.data.partition import Part
from qupel.data.sources import from_arrays
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.engine.shard import Shard
from qupel.parts.base import State
from qupel.parts.methods import methods
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.none import NoQuantizer
from qupel.tasks.judge import Judge
from qupel.tasks.task import Diverged, ModuleTask
from qupel.tasks.zoo import digits_cnn, resnet20
from tiny import QUANTIZER, beginning, blobs, make_job, mlp, norm_net, same

# --- a task ---


def plain_gradient(module, loss, vector, batch):
    """The gradient by plain autograd on a fresh copy, flattened."""
    module = copy.deepcopy(module).train()
    layout = Layout.of(module)
    layout.load(module, vector)
    loss(module(batch[0]), batch[1]).backward()
    flat = torch.zeros(layout.size)
    for slot in layout.slots:
        slot.view(flat).copy_(dict(module.named_parameters())[slot.name].grad)
    return flat


@pytest.mark.parametrize(
    ("module", "shape"), [(mlp(), (6,)), (digits_cnn(classes=3), (1, 8, 8)), (resnet20(classes=3), (3, 8, 8))]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_gradients_are_those_of_plain_autograd(module, shape, mode):
    """Also where the user left the module in eval mode: BatchNorm learns with the batch's statistics."""
    torch.manual_seed(0)
    module = copy.deepcopy(module).train(mode == "train")
    task = ModuleTask(module, F.cross_entropy)
    layout = task.layout
    for _ in range(3):  # independent of the calls before
        x = layout.flatten(module) + 0.01 * torch.randn(layout.size)
        batch = torch.randn(5, *shape), torch.randint(0, 3, (5,))
        expected = plain_gradient(module, F.cross_entropy, x, batch)
        g = task.gradient(x, batch).gradient
        scale = float(expected.abs().max())
        assert scale > 1e-3
        torch.testing.assert_close(g, expected, rtol=1e-3, atol=1e-4 * scale)
        kept = g.clone()
        task.gradient(x + 1e-3, batch)
        assert torch.equal(g, kept)  # a new vector every time
        assert torch.equal(task.gradient(x, batch).gradient, kept)


def test_task_leaves_the_users_module_alone():
    module = norm_net()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    task = ModuleTask(module, F.cross_entropy)
    inner = {k: v.clone() for k, v in task.module.named_buffers()}
    x = torch.randn(task.layout.size)
    task.gradient(x, (torch.randn(4, 6) + 3, torch.tensor([0, 1, 2, 0])))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(torch.equal(v, inner[k]) for k, v in task.module.named_buffers())  # no running statistic in learning


def test_task_takes_any_loss():
    module = nn.Linear(3, 2)
    task = ModuleTask(module, F.mse_loss)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    w = torch.randn(8)
    residual = x @ w[:6].view(2, 3).T + w[6:] - y  # (4, 2)
    expected = torch.cat([(residual.T @ x).flatten(), residual.sum(0)]) * 2 / residual.numel()
    found = task.gradient(w, (x, y))
    torch.testing.assert_close(found.gradient, expected)
    torch.testing.assert_close(found.outputs, residual + y)
    assert found.loss == pytest.approx(float(residual.square().mean()))


def test_parameters_that_play_no_part_have_gradient_zero():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner[0](x)

    task = ModuleTask(First(), F.mse_loss)
    g = task.gradient(torch.randn(9), (torch.randn(3, 2), torch.randn(3, 2))).gradient
    assert g[6:].tolist() == [0, 0, 0]
    assert g[:6].abs().sum() > 0


def test_a_loss_that_is_not_finite_names_the_layer():
    task = ModuleTask(mlp(), F.cross_entropy)
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    x = task.layout.flatten(mlp())
    bad = x.clone()
    bad[task.layout["2.weight"].start] = float("nan")
    with pytest.raises(Diverged, match=r"loss is nan; layer '2\.weight' holds values that are not finite"):
        task.gradient(bad, batch)
    huge = x.clone()
    huge[task.layout["4.bias"].slice] = torch.tensor([1e38, 3e38, -3e38])
    with pytest.raises(Diverged, match=r"loss is inf; largest weight 3e\+38 in layer '4\.bias'"):
        task.gradient(huge, batch)
    assert torch.isfinite(task.gradient(x, batch).gradient).all()  # and the task goes on


# --- BatchNorm ---


def test_batchnorm_statistics_are_those_of_the_judged_weights():
    """Mean and variance of every channel, measured by hand on the judged model with the given data."""
    torch.manual_seed(0)
    module = norm_net()
    layout = Layout.of(module)
    judge = Judge(module, F.cross_entropy)
    data = torch.randn(20, 6) * 3 + 1
    for _ in range(2):  # the second model's statistics owe nothing to the first's
        x = torch.randn(layout.size)
        judged = judge.load(x, [(data, None)])
        weight, bias = layout["0.weight"].view(x), layout["0.bias"].view(x)
        hidden = data @ weight.T + bias  # (20, 8)
        torch.testing.assert_close(judged[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(judged[1].running_var, hidden.var(0), rtol=1e-4, atol=1e-5)
        assert not judged.training
        assert not judged[1].training
    before = module.state_dict()["1.running_mean"]
    assert torch.equal(before, torch.zeros(8))  # the user's module is untouched


@pytest.mark.parametrize("samples", [2, 256, 257, 300, 513])
def test_calibration_counts_every_sample_about_equally(samples):
    """No last batch of one sample that weighs as much as 256, or that BatchNorm1d could not even take."""
    job = make_job([Phase(FedAvg(), 1)], sizes=(samples,), bits=(32,), module=norm_net())
    sizes = [len(inputs) for inputs, *_ in job.calibration(0)]
    assert sum(sizes) == samples
    assert max(sizes) <= 256
    assert max(sizes) - min(sizes) <= len(sizes)
    x = Layout.of(job.module).flatten(job.module)
    judged = Judge(job.module, job.loss).load(x, job.calibration(0))
    hidden = job.module[0](job.data.train.inputs).detach()
    torch.testing.assert_close(judged[1].running_mean, hidden.mean(0), rtol=0.02, atol=0.02)


def test_calibration_draws_from_all_rows():
    """5,000 rows sorted by label: the 2,048 that count have every class in its share, also within a batch."""
    labels = np.repeat(np.arange(5), 1000)
    inputs = np.repeat(labels[:, None], 6, 1).astype(np.float32)
    data = from_arrays(inputs, labels, inputs[:5], labels[:5])
    parts = [Part(np.arange(5000), np.arange(5))] * 2
    job = make_job([Phase(FedAvg(), 1)], bits=(32,), module=norm_net(), data=(data, parts))
    seen = [list(job.calibration(client)) for client in (0, 0, 1)]
    for _, targets, _ in seen[0]:
        assert torch.bincount(targets, minlength=5).min() > 0.1 * len(targets)
    first, again, other = (torch.cat([batch.targets for batch in batches]) for batches in seen)
    assert len(first) == 2048
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    few = replace(job, parts=[Part(np.arange(300)[::-1].copy(), np.arange(5))], plans=[Plan()])
    assert torch.equal(
        torch.cat([b.inputs for b in few.calibration(0)]), data.train.inputs[:300].flip(0)
    )  # in their order
    assert sum(len(b.targets) for b in job.calibration(0, None)) == 5000


def test_deployed_statistics_are_of_the_quantized_model_on_the_clients_training_data():
    """BatchNorm behind the quantized layer: its statistics must follow from Q_c(x), not from x or another's data."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    data, parts = blobs((10, 20))
    job = make_job([Phase(Local(quantizer=QUANTIZER), 2)], bits=(1,), module=net(), data=(data, parts))
    with Inline(job) as engine:
        finished = run(job, engine)
        shard = engine.shard
        for client in (0, 1):
            model = engine.deployed(job.rounds - 1, finished.w, client)
            judged = next(shard.evaluate(job.rounds - 1, finished.w, [client]))
            state = shard.state(client, 0, finished.w)
            assert not torch.equal(state.x, model.x)
            mine = data.train.inputs[parts[client].train_rows]
            scores = {}
            for name, x in (("deployed", model.x), ("float", state.x)):
                layout = Layout.of(job.module)

                def layer(k, inputs, x=x, layout=layout):
                    return inputs @ layout[f"{k}.weight"].view(x).T + layout[f"{k}.bias"].view(x)

                hidden = layer(1, layer(0, mine))
                mean, var = hidden.mean(0), hidden.var(0)
                test = parts[client].test(data)
                h = (layer(1, layer(0, test.inputs)) - mean) / (var + 1e-5).sqrt()
                h = h * layout["2.weight"].view(x) + layout["2.bias"].view(x)
                scores[name] = float(F.cross_entropy(layer(3, h), test.targets))
            assert judged.test.loss == pytest.approx(scores["deployed"], rel=1e-4)
            assert judged.float_test.loss == pytest.approx(scores["float"], rel=1e-4)
            assert abs(scores["deployed"] - scores["float"]) > 1e-3


# --- which weights are judged ---


class Tells(nn.Module):
    """Remembers the weights it was judged with."""

    seen: ClassVar[list[torch.Tensor]] = []

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 2), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        if not self.training:
            Tells.seen.append(torch.cat([p.detach().flatten() for p in self.parameters()]))
        return self.last(self.middle(self.first(x)))


def planted(layout):
    """(x, w, codebook): x counts up, w is constant, the centers are nobody's by chance."""
    x = torch.arange(float(layout.size)) / 100
    codebook = Codebook((layout["middle.weight"],), (torch.tensor([0.111, 0.155, 0.177, 0.2]),))
    return x, torch.full((layout.size,), 7.0), codebook


def expect_hard(x, w, codebook):
    q = x.clone()
    (slot,), (c,) = codebook.slots, codebook.centers
    q[slot.slice] = c[(x[slot.slice, None] - c).abs().argmin(1)]
    return q


def expect_w(x, w, codebook):
    return w


def expect_placed(how):
    def expect(x, w, codebook):
        (slot,) = codebook.slots
        return expect_hard(x, w, Codebook((slot,), (init_centers(x[slot.slice], how=how, levels=4),)))

    return expect


def expect_ternary(x, w, codebook):
    """By thresholds, not the nearest; of the planted four levels, which it never makes itself, the lowest."""
    q = x.clone()
    (slot,), (c,) = codebook.slots, codebook.centers
    q[slot.slice] = c[0]
    return q


HOW = {  # where Q_c(x) on the state's own centers is not what ships
    "none": lambda x, w, codebook: x,
    "afterwards": expect_placed("kmeans"),
    "ttq": expect_ternary,
}
JUDGED = [(Local(quantizer=quantizers[name]()), HOW.get(name, expect_hard)) for name in quantizers]
JUDGED += [
    (FedAvg(), expect_w),
    (QuPeL(), expect_hard),
    (QuPeL(quantizer=Frozen(), enters="free"), expect_hard),
    (Local(quantizer=Afterwards(init="range")), expect_placed("range")),
]


@pytest.mark.parametrize(
    ("method", "expected"), JUDGED, ids=[f"{methods.name_of(m)} {quantizers.name_of(m.quantizer)}" for m, _ in JUDGED]
)
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_the_judged_weights_are_the_deployed_ones(method, expected, store, tmp_path):
    job = make_job([Phase(method, 5)], module=Tells(), bits=(2,))
    shard = Shard(job, [0, 1], store, tmp_path)
    x, w, codebook = planted(shard.layout)
    codebook = Codebook() if method.quantizer == NoQuantizer() else codebook
    shard.store.put(1, 0, State(x, -w, codebook, method.optimizer.memory(x)))
    x_judged = expected(x, w, codebook)
    Tells.seen.clear()
    (judged,) = shard.evaluate(3, (w,), [1])
    deployed = shard.deployed(1, 3, (w,))
    assert torch.equal(Tells.seen[0], x_judged)
    assert torch.equal(deployed.x, x_judged)
    if codebook:
        assert torch.equal(Tells.seen[1], x)  # what is called the float model
        assert judged.bits == 2
        assert len(Tells.seen) == 2
    else:
        assert len(Tells.seen) == 1
        assert judged.bits == 32
    for slot, c in deployed.codebook:  # a deployed weight sits exactly on a center
        assert torch.isin(deployed.x[slot.slice], c).all()


def test_a_full_precision_client_is_judged_at_x():
    job = make_job([Phase(QuPeL(), 5)], module=Tells(), bits=(32,))
    shard = Shard(job, [0])
    x, w, _ = planted(shard.layout)
    shard.store.put(0, 0, State(x, -w, Codebook()))
    Tells.seen.clear()
    (judged,) = shard.evaluate(3, (w,), [0])
    assert torch.equal(Tells.seen[0], x)
    assert judged.test == judged.float_test


def test_fedavg_is_judged_at_the_newest_average():
    """The average after the round, not the one the clients trained from, for clients in the cohort or not."""
    job = make_job([Phase(FedAvg(), 2)], module=Tells(), sample=0.5, evaluate_every=2)
    with Inline(job) as engine:
        Tells.seen.clear()
        finished = run(job, engine)
    assert len(Tells.seen) == len(job.parts)
    assert all(torch.equal(v, finished.w[0]) for v in Tells.seen)
    assert not same(finished.w, beginning(job).w)


def test_validation_data_are_judged_with_the_same_weights_and_apart_from_test():
    data, parts = blobs((12, 12))
    parts = [replace(p, train_rows=p.train_rows[:8], validation_rows=p.train_rows[8:]) for p in parts]
    job = make_job([Phase(Local(quantizer=QUANTIZER), 2)], bits=(2,), data=(data, parts))
    with Inline(job) as engine:
        finished = run(job, engine)
        (judged,) = engine.evaluate(1, finished.w, [0])
        model = engine.deployed(1, finished.w, 0)
    module = copy.deepcopy(job.module).eval()
    Layout.of(module).load(module, model.x)
    for score, arrays in ((judged.test, parts[0].test(data)), (judged.validation, parts[0].validation(data))):
        outputs = module(arrays.inputs).detach()
        assert score.count == len(arrays)
        assert score.accuracy == int((outputs.argmax(1) == arrays.targets).sum()) / len(arrays)
        assert score.loss == pytest.approx(float(F.cross_entropy(outputs, arrays.targets)), rel=1e-5)


def test_score_over_several_batches_is_the_mean_over_samples():
    module = nn.Linear(2, 2)
    x = torch.randn(7, 2)
    y = torch.randint(0, 2, (7,))
    judge = Judge(module, F.cross_entropy)
    vector = Layout.of(module).flatten(module)
    whole = judge.score(vector, [], [(x, y)])
    parts = judge.score(vector, [], [(x[:4], y[:4]), (x[4:], y[4:])])
    assert parts.accuracy == whole.accuracy
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    regression = Judge(nn.Linear(2, 1), F.mse_loss).score(torch.randn(3), [], [(x, torch.randn(7, 1))])
    assert regression.accuracy is None
    assert judge.score(vector, [], []).count == 0


def test_dead_centers_and_bytes_are_reported():
    job = make_job([Phase(Local(), 1)], module=Tells(), bits=(2,))
    shard = Shard(job, [0])
    x, w, _ = planted(shard.layout)
    slot = shard.layout["middle.weight"]
    book = Codebook((slot,), (torch.tensor([-9.0, 0.15, 0.18, 9.0]),))
    shard.store.put(0, 0, State(x, w, book))
    (judged,) = shard.evaluate(0, (w,), [0])
    assert judged.dead == 2
    assert judged.bytes == slot.size * 2 // 8 + 4 * 4 + 4 * (shard.layout.size - slot.size)
