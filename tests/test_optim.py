"""Flat optimizers equal torch.optim's step for step, on a real module and real data."""

import pytest
import torch
from torch import nn

from qupel.core.layout import Layout
from qupel.core.optim import SGD, Adam
from qupel.data.sources import load
from qupel.tasks.task import ModuleTask
from qupel.tasks.zoo import digits_cnn

CASES = [
    (SGD(), lambda p, lr: torch.optim.SGD(p, lr)),
    (SGD(weight_decay=0.01), lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.01)),
    (SGD(momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    (
        SGD(momentum=0.8, nesterov=True, weight_decay=1e-3),
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.8, nesterov=True, weight_decay=1e-3),
    ),
    (Adam(), lambda p, lr: torch.optim.Adam(p, lr)),
    (
        Adam(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01),
        lambda p, lr: torch.optim.Adam(p, lr, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=lambda v: repr(v) if isinstance(v, SGD | Adam) else "")
def test_equal_to_torch_for_50_steps(ours, theirs):
    """Both take the gradient from the same bound module, so that only the optimizers can differ."""
    torch.manual_seed(0)
    data = load("digits").train
    inputs, targets = data.inputs[:64].float(), data.targets[:64]
    task = ModuleTask(digits_cnn(), nn.functional.cross_entropy)
    module, lr = task.module, 0.01
    optimizer = theirs(list(module.parameters()), lr)
    x = task.values.clone()
    memory = ours.memory(x)
    layout, start = Layout.of(module), x.clone()
    for step in range(50):
        batch = inputs[step % 2 :: 2], targets[step % 2 :: 2]
        g = task.gradient(x, batch).gradient  # sets the module to x
        for slot, p in zip(layout.slots, module.parameters(), strict=True):
            p.grad = slot.view(g.clone())
        optimizer.step()
        before = x.clone()
        x, memory = ours.step(x, g, memory, lr)
        torch.testing.assert_close(x, layout.flatten(module), rtol=1e-6, atol=1e-7)
        assert not torch.equal(x, before)
        x = layout.flatten(module)  # theirs goes on, so that a difference of one step is not hidden or multiplied
    assert (x - start).abs().max() > 0.01


@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=lambda v: repr(v) if isinstance(v, SGD | Adam) else "")
def test_trajectories_stay_together_without_help(ours, theirs):
    """A quadratic, whose gradient needs no module: 50 free steps, a learning rate that changes."""
    torch.manual_seed(1)
    target, start = torch.randn(100), torch.randn(100)
    p = nn.Parameter(start.clone())
    optimizer = theirs([p], 0.1)
    x, memory = start.clone(), ours.memory(start)
    for step in range(50):
        lr = 0.1 * 0.95**step
        optimizer.param_groups[0]["lr"] = lr
        p.grad = p.detach() - target
        optimizer.step()
        x, memory = ours.step(x, x - target, memory, lr)
        torch.testing.assert_close(x, p.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [ours for ours, _ in CASES], ids=repr)
def test_a_step_changes_none_of_its_arguments(optimizer):
    x, g = torch.randn(20), torch.randn(20)
    x, memory = optimizer.step(x, g, optimizer.memory(x), 0.1)
    copies = [t.clone() for t in (x, g, *memory)]
    optimizer.step(x, g, memory, 0.1)
    assert all(torch.equal(a, b) for a, b in zip((x, g, *memory), copies, strict=True))


def test_a_clipped_gradient_is_torchs():
    """Of each client of a stack by its own length; a short one keeps its bits."""
    torch.manual_seed(2)
    x, g = torch.randn(3, 50), torch.randn(3, 50) * torch.tensor([[0.01], [1.0], [100.0]])
    new, _ = SGD(clip=2.0).step(x, g, (), 0.1)
    for k in range(3):
        p = nn.Parameter(x[k].clone())
        p.grad = g[k].clone()
        nn.utils.clip_grad_norm_([p], 2.0)
        torch.optim.SGD([p], 0.1).step()
        torch.testing.assert_close(new[k], p.detach())
    assert torch.equal(new[0], SGD().step(x[0], g[0], (), 0.1)[0])
    assert not torch.allclose(new[1], SGD().step(x[1], g[1], (), 0.1)[0])
