"""What holds for every registered method with every registered quantizer; nothing here lists them."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch

from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Clock, Schedule
from qupel.parts.methods import methods
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.none import NoQuantizer
from qupel.parts.quantizers.prox import Prox
from qupel.tasks.task import Evaluated, Problem
from toy import (
    BATCH,
    CHANNELS,
    CLOCK,
    PLAN,
    QUADRATIC,
    Toy,
    W,
    X,
    close,
    cover,
    entered,
    every,
    name,
    state,
    stepped,
    tensors,
    together,
)

METHODS, QUANTIZERS = every(methods), every(quantizers)
LIVELY = [  # defaults and what is easily written into: carried weights, soft levels, an optimizer's memory
    *QUANTIZERS,
    Prox(eta2=Schedule(0.05), lam=Schedule(0.5), carry=True),
    Prox(eta2=Schedule(0.05), lam=Schedule(0.5), mode="soft", center_gradient="mean"),
    Prox(eta2=Schedule(0.05), lam=Schedule(0.5), lam_c=Schedule(0.5), rule="first_order"),
]
IDS = [*map(name, QUANTIZERS), "carry", "soft", "first_order"]
all_methods = pytest.mark.parametrize("method", METHODS, ids=name)


def cases(quantizers):
    """Every method with every quantizer; channels, which only quantizers know of, with two methods each."""
    wide = [(m, q, PLAN) for m in METHODS for q in quantizers] + [
        (m, q, CHANNELS) for m, q in cover(METHODS, quantizers)
    ]
    names = dict(zip(map(id, LIVELY), IDS, strict=True))
    ids = [f"{name(m)}-{names[id(q)]}-{'channels' if plan.channels else 'layers'}" for m, q, plan in wide]
    return pytest.mark.parametrize(("method", "quantizer", "plan"), wide, ids=ids)


def with_quantizer(method, quantizer, **settings):
    return replace(method, quantizer=quantizer, **settings) if hasattr(method, "quantizer") else method


@cases(LIVELY)
def test_a_step_changes_no_state_but_returns_a_new_one(method, quantizer, plan):
    """The engine keeps the old state of a client whose round fails."""
    optimizer = (SGD(momentum=0.9), Adam())[(METHODS.index(method) + LIVELY.index(quantizer)) % 2]
    method = with_quantizer(method, quantizer)
    method = replace(method, optimizer=optimizer) if hasattr(method, "optimizer") else method
    fresh = entered(method, plan)
    for s in (fresh, stepped(method, fresh)):
        before = tensors(s)
        copies = [t.clone() for t in before]
        after = stepped(method, s)
        assert type(after) is type(s)
        assert all(torch.equal(t, copy) for t, copy in zip(before, copies, strict=True))
        assert not torch.equal(after.x, s.x)
        assert [t.shape for t in tensors(after)] == [t.shape for t in before]
        assert [t.dtype for t in tensors(after)] == [t.dtype for t in before]


@cases(LIVELY)
def test_clients_stepped_together_equal_each_alone(method, quantizer, plan):
    method = with_quantizer(method, quantizer)
    g = torch.Generator().manual_seed(3)
    alone = [
        entered(method, plan, X + torch.randn(8, generator=g).double() / 5, W + k / 10) for k in range(3)
    ]  # fmt: skip
    stack = together(alone)
    for step in range(4):
        clock = Clock(step, 4, 2)
        moved = [method.step(s, QUADRATIC, BATCH, clock) for s in alone]
        stack, info = method.step(stack, QUADRATIC, BATCH, clock)
        alone = [s for s, _ in moved]
        for got, expected in zip(tensors(stack), tensors(together(alone)), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        for key in ("loss", "quantized_loss"):
            each = [getattr(one, key) for _, one in moved]
            if each[0] is None:
                assert getattr(info, key) is None
            else:
                close(getattr(info, key), each)
        assert info.more.keys() == moved[0][1].more.keys()
    assert (stack.x[0] - stack.x[1]).abs().max() > 1e-3


@cases(LIVELY)
def test_what_ships_sits_on_its_levels(method, quantizer, plan):
    method = with_quantizer(method, quantizer)
    s = entered(method, plan)
    for _ in range(3):
        s = stepped(method, s)
    model = method.deployed(s)
    assert torch.equal(model.codebook.hard(model.x), model.x)
    for layer in model.codebook.layers:
        assert bool((layer.centers.diff() >= 0).all())
        distance = (layer.of(model.x)[:, None] - layer.centers).abs().amin(1)
        assert float(distance.max()) < 1e-12


class Planted(Toy):
    """A quadratic whose losses are planted: every call has its own, and its point is written down."""

    def __init__(self, points):
        super().__init__()
        object.__setattr__(self, "points", points)

    def gradient(self, x, batch, slots=None, *, loss=None, given=()) -> Evaluated:
        found = super().gradient(x, batch, slots, loss=loss, given=given)
        return replace(found, loss=self.loss_of(found.outputs, batch))

    def loss_of(self, outputs, batch):
        planted = 100.0 + len(self.points)
        self.points[planted] = outputs[0].clone()
        return planted


@dataclass(frozen=True)
class Watched:
    """A quantizer that is held to what its Info says: `loss` was taken at the x of the step, `quantized_loss` at Q(x),
    before or after the x step."""

    inner: Any
    points: dict = field(default_factory=dict)
    came: list = field(default_factory=list)
    infos: list = field(default_factory=list)

    def start(self, before, plan, layout):
        return self.inner.start(before, plan, layout)

    def gradient(self, x, codebook, task, batch, clock):
        self.came[:] = [x.clone()]
        return self.inner.gradient(x, codebook, task, batch, clock)

    def settle(self, y, codebook, descent, task, batch, eta1, clock):
        x, moved, info = self.inner.settle(y, codebook, descent, task, batch, eta1, clock)
        if info.loss is not None:
            assert torch.equal(self.points[info.loss], self.came[0])
        if info.quantized_loss is not None:
            assert codebook
            point = self.points[info.quantized_loss][1:7]
            assert any(torch.equal(point, self.deployed(v, codebook).x[1:7]) for v in (self.came[0], x))
        self.infos.append(info)
        return x, moved, info

    def deployed(self, x, codebook):
        return self.inner.deployed(x, codebook)


@cases(QUANTIZERS)
def test_info_names_its_losses_truthfully(method, quantizer, plan):
    """Nothing is made up, and a method passes on what its quantizer saw last."""
    watched = Watched(quantizer)
    method = with_quantizer(method, watched)
    s = entered(method, plan)
    for _ in range(3):
        watched.points.clear()
        task = Planted(watched.points)
        s, info = method.step(s, Problem(task, task), BATCH, CLOCK)
        assert info.loss is not None or info.quantized_loss is not None or info.more
        assert (info.loss, info.quantized_loss) == (watched.infos[-1].loss, watched.infos[-1].quantized_loss)
        assert watched.infos[-1].more.items() <= info.more.items()
        assert all(value in watched.points for value in info.more.values())


@all_methods
def test_what_is_not_stored_comes_with_every_round(method):
    """`receive` fills every field that says so, whatever was there before."""
    s = stepped(method, entered(method))
    if method.upload(s) is None:
        return
    names = [f.name for f in fields(s) if f.metadata.get("received")]
    assert "w" in names
    lost = replace(s, **{n: () if isinstance(getattr(s, n), tuple) else torch.full((8,), math.nan) for n in names})
    rows = method.broadcast(W / 7)
    pairs = zip(tensors(method.receive(s, rows)), tensors(method.receive(lost, rows)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_full_precision_is_every_quantizers_empty_plan():
    """One step in any method, with an empty codebook: whatever the quantizer, the same bits as none at all."""
    for method in METHODS:
        steps = []
        for quantizer in (NoQuantizer(), *LIVELY):
            each = with_quantizer(method, quantizer, eta1=Schedule(0.1))
            s = each.receive(each.start(state(c=None), {}, QUADRATIC), each.broadcast(W))
            for _ in range(3):
                s = stepped(each, s)
            steps.append(s.x)
            assert not s.codebook
        assert all(torch.equal(steps[0], other) for other in steps[1:]), method
