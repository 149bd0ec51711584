"""A client's own label prior: what is added to shared models, where, and that nobody else sees it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from qupel.core.layout import Layout
from qupel.core.schedule import Schedule
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.engine.workers import Pool, Workers
from qupel.parts.base import State, Upload
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase, phase_from
from qupel.parts.prior import NO_PRIOR, Prior, output_bias, shift
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.ste import StraightThrough
from qupel.util.errors import UserError
from tiny import CLASSES, INPUTS, blobs, make_job, mlp

ETA = Schedule(0.1)
NARROW = (0, 2)  # clients that lack class 1


def narrow():
    """Blobs in which two of four clients have no sample of class 1, in training or test."""
    data, parts = blobs((24, 24, 24, 24), test=12)
    labels, held = data.train.targets, data.test.targets
    kept = []
    for i, part in enumerate(parts):
        if i in NARROW:
            keep = [rows[np.asarray(of[rows] != 1)] for rows, of in ((part.train_rows, labels), (part.test_rows, held))]
            part = replace(part, train_rows=keep[0], test_rows=keep[1])
        kept.append(part)
    return data, kept


def phases(prior, method=None):
    shared = Phase(FedAvg(ETA), 2)
    return [shared, Phase(method or Local(ETA, quantizer=StraightThrough()), 2, prior=prior)]


def finish(job):
    with Inline(job) as engine:
        done = run(job, engine)
        return done.w[0], [engine.deployed(job.rounds - 1, done.w, i).x for i in range(len(job.parts))]


def test_the_shift_is_the_logarithm_of_the_estimate():
    found = shift(torch.tensor([0, 0, 2, 2, 2, 2]), 4, 0.5)
    want = np.log(0.5 / (6 + 0.5 * 4))
    torch.testing.assert_close(found, torch.tensor([0, want, 0, want], dtype=torch.float32))
    assert shift(torch.tensor([0, 1]), 2, 0.5) is None  # nothing is absent
    assert shift(torch.tensor([[0, -100], [1, -100]]), 3, 1.0)[2] == np.float32(np.log(1 / (2 + 3)))


class Reordered(nn.Module):
    """The output layer is defined first, and a vector of as many numbers as classes stands after it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, CLASSES)
        self.body = nn.Linear(INPUTS, 4)
        self.gain = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return self.gain * self.body(x)[:, :CLASSES] + self.out(torch.relu(self.body(x)))


def test_the_bias_is_found_by_what_it_does():
    inputs = torch.randn(2, INPUTS)
    module = Reordered()
    before = Layout.of(module).flatten(module)
    assert output_bias(module, Layout.of(module), inputs, CLASSES).name == "out.bias"
    torch.testing.assert_close(Layout.of(module).flatten(module), before, rtol=0, atol=0)
    assert module.training
    squashed = nn.Sequential(mlp(), nn.Softmax(1))
    assert output_bias(squashed, Layout.of(squashed), inputs, CLASSES) is None
    assert output_bias(mlp(), Layout.of(mlp()), inputs, CLASSES + 1) is None


def test_seen_and_sent_are_inverse_and_leave_other_rows_alone():
    layout = Layout.of(mlp())
    bias = layout.slots[-1]
    prior = Prior(torch.tensor([0.0, -3.0, 0.0]), bias, bias)
    w, control = torch.randn(layout.size), torch.randn(layout.size)
    seen = prior.seen((w, control), 1)
    assert seen[1] is control
    moved = seen[0] - w
    assert moved.nonzero().flatten().tolist() == [bias.start + 1]
    assert moved[bias.start + 1] == pytest.approx(-3)
    back = prior.sent(Upload(seen), 1)
    torch.testing.assert_close(back.rows[0], w)
    state = State(w, w)
    assert NO_PRIOR.entered(NO_PRIOR, state) is state
    torch.testing.assert_close(NO_PRIOR.entered(prior, prior.entered(NO_PRIOR, state)).x, w)


def test_absent_classes_are_lowered_where_they_are_absent_and_only_there():
    data = narrow()
    plain, with_prior = (finish(make_job(phases(p), data=data, bits=(2,))) for p in (0.0, 0.5))
    torch.testing.assert_close(plain[0], with_prior[0])  # the shared phase knows nothing of it
    bias = Layout.of(mlp()).slots[-1]
    for i, (without, own) in enumerate(zip(plain[1], with_prior[1], strict=True)):
        fell = without[bias.start + 1] - own[bias.start + 1]
        assert (fell > 1) if i in NARROW else torch.equal(without, own)


def test_it_is_as_if_training_began_at_the_lowered_bias():
    """By hand: w of the shared phase, its bias lowered, then plain steps of a client alone."""
    data = narrow()
    method = Local(ETA, quantizer=NoQuantizer())
    w, models = finish(make_job(phases(0.5, method), data=data, bits=(32,)))
    job = make_job(phases(0.5, method), data=data, bits=(32,))
    bias = Layout.of(mlp()).slots[-1]
    labels = data[0].train.targets[data[1][0].train_rows]
    with Inline(job) as engine:
        shard = engine.shard
        x = w.clone()
        x[bias.slice] += shift(labels, CLASSES, 0.5)
        for round in (2, 3):
            for local, rows in enumerate(shard.steps.rows(0, round)):
                found = shard.problem(0).own.gradient(x, shard.steps.batch(0, 3 * round + local, rows))
                x = x - 0.1 * found.gradient
    torch.testing.assert_close(models[0], x)


def test_what_is_sent_has_no_shift():
    """A method that ties x to w sends w's of one kind: the mean moves as without a prior where steps are 0."""
    still = QuPeL(Schedule(0.0), eta3=Schedule(0.0), lambda_p=Schedule(1.0), quantizer=StraightThrough())
    data = narrow()
    w, _ = finish(make_job(phases(0.5, still), data=data, bits=(2,)))
    before, _ = finish(make_job([Phase(FedAvg(ETA), 2)], data=data, bits=(2,)))
    torch.testing.assert_close(w, before)
    rows = finish(make_job([Phase(FedAvg(Schedule(0.0)), 2, prior=0.5)], data=data, bits=(32,)))[0]
    torch.testing.assert_close(rows, Layout.of(mlp()).flatten(mlp()))


def test_workers_and_stacks_do_the_same():
    data = narrow()
    tied = QuPeL(ETA, lambda_p=Schedule(0.3), quantizer=StraightThrough())
    job = make_job(phases(0.5, tied), data=data, bits=(2,))
    alone = finish(job)
    stacked = finish(replace(job, stacked=True))
    for one, other in zip((alone[0], *alone[1]), (stacked[0], *stacked[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with Pool(2) as pool:
        engine = Workers(pool, job)
        done = run(job, engine)
        assert torch.equal(done.w[0], alone[0])
        assert all(torch.equal(engine.deployed(3, done.w, i).x, x) for i, x in enumerate(alone[1]))


def test_in_a_config():
    table = {"rounds": 2, "method": "local", "prior": 0.5}
    assert phase_from(table, "phase 1").prior == 0.5
    assert phase_from(phase_from(table, "p").table(), "p") == phase_from(table, "p")
    assert "prior" not in phase_from({"rounds": 2, "method": "local"}, "p").table()
    for bad in (-1, "much", True, float("inf")):
        with pytest.raises(UserError, match=r"phase 1\.prior: a number from 0 on is needed"):
            phase_from({**table, "prior": bad}, "phase 1")
