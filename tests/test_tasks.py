"""Tasks: a module and a loss as functions of a flat vector, against autograd; stacks of clients against the loop."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qupel.core.layout import Layout
from qupel.tasks.stack import StackTask
from qupel.tasks.task import Diverged, ModuleTask, Problem, Task

CLASSES = 3


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """No chain: a convolution, a scalar parameter, one that the loss does not use, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.scale = nn.Conv2d(1, 2, 3), nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(torch.tanh(self.conv(x.view(-1, 1, 4, 4)).flatten(1)))
        return self.head(self.fc(torch.relu(h)) * self.scale)


def chain() -> nn.Module:
    """Layers that take a stack as they are."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8, bias=False),
        nn.Sequential(nn.Tanh(), nn.Linear(8, 6)),
        nn.GELU(),
        nn.Linear(6, CLASSES),
    )


def normed() -> nn.Module:
    """BatchNorm: batch statistics only."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


MODULES = {"chain": seeded(chain), "vmap": seeded(Net), "norm": seeded(normed)}
modules = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


def distilled(outputs: Tensor, targets: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """A loss of a method's own: labels, and what another model says to the same batch."""
    difference = teacher.log_softmax(-1) - outputs.log_softmax(-1)  # F.kl_div has no batching rule
    kept = (teacher.softmax(-1) * difference).sum(-1).mean()
    return (1 - weight) * F.cross_entropy(outputs, targets) + weight * kept


def brier(outputs: Tensor, targets: Tensor) -> Tensor:
    """Another loss that needs nothing beside the batch."""
    hit = (targets.unsqueeze(-1) == torch.arange(CLASSES)).float()
    return (outputs.softmax(-1) - hit).square().sum(-1).mean()


LABELS = torch.randint(0, CLASSES, (3, 7), generator=torch.Generator().manual_seed(1))
INPUTS, TEACHER, WEIGHT = randn(3, 7, 1, 4, 4), randn(3, 7, CLASSES, seed=2), torch.tensor([0.25, 0.5, 1.0])
LOSSES = {
    "own": (None, ()),
    "another": (brier, ()),
    "given": (distilled, (TEACHER, WEIGHT)),
}
losses = pytest.mark.parametrize(("loss", "given"), LOSSES.values(), ids=LOSSES)


def vector(module, client=0):
    """Another point than the module's own weights."""
    layout = Layout.of(module)
    return layout.flatten(module) + 0.1 * randn(layout.size, seed=10 + client)


def by_autograd(module, x, inputs, targets, loss):
    """(gradient, loss, outputs) of the plain module in training mode, parameter by parameter."""
    module = copy.deepcopy(module).train()
    layout = Layout.of(module)
    layout.load(module, x)
    outputs = module(inputs)
    value = loss(outputs, targets)
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    gradient = torch.zeros_like(x)
    for each, g in zip(names, found, strict=True):
        if g is not None:
            layout[each].view(gradient).copy_(g)
    return gradient, value.item(), outputs.detach()


# --- one client ---


@modules
@losses
def test_a_task_is_plain_autograd(module, loss, given):
    task = ModuleTask(module, F.cross_entropy)
    first = tuple(g[0] for g in given)
    for client in range(2):  # twice: the buffers are used again
        x = vector(module, client)
        before = x.clone()
        found = task.gradient(x, (INPUTS[0], LABELS[0]), loss=loss, given=first)
        plain = loss or F.cross_entropy
        gradient, value, outputs = by_autograd(
            module, x, INPUTS[0], LABELS[0], lambda o, t, plain=plain: plain(o, t, *first)
        )
        torch.testing.assert_close(found.gradient, gradient, rtol=1e-5, atol=1e-6)
        assert found.loss == pytest.approx(value, rel=1e-5)
        assert isinstance(found.loss, float)
        torch.testing.assert_close(found.outputs, outputs, rtol=1e-5, atol=1e-6)
        assert torch.equal(x, before)
        assert not any(t.requires_grad for t in (found.gradient, found.outputs))
    assert found.gradient.abs().max() > 0


@modules
def test_outputs_and_value_without_a_gradient(module):
    task = ModuleTask(module, F.cross_entropy)
    x, batch = vector(module), (INPUTS[0], LABELS[0])
    found = task.gradient(x, batch)
    said = task.outputs(x, INPUTS[0])
    assert torch.equal(said, found.outputs)
    assert not said.requires_grad
    assert task.value(x, batch) == pytest.approx(found.loss, rel=1e-6)
    kept = said.clone()
    task.outputs(vector(module, 1), INPUTS[1])
    assert torch.equal(said, kept)  # what was said stays when the task goes on


@modules
def test_slots_ask_for_some_layers_only(module):
    """Where it is asked for the gradient is the same; elsewhere it may be 0. Loss and outputs are whole."""
    task, x, batch = ModuleTask(module, F.cross_entropy), vector(module), (INPUTS[0], LABELS[0])
    whole = task.gradient(x, batch)
    for slot in task.layout.slots:
        part = task.gradient(x, batch, [slot])
        torch.testing.assert_close(part.gradient[slot.slice], whole.gradient[slot.slice])
        elsewhere = torch.cat([part.gradient[: slot.start], part.gradient[slot.stop :]])
        assert not elsewhere.any()
        assert part.loss == whole.loss
        assert torch.equal(part.outputs, whole.outputs)


def test_the_users_module_is_left_alone():
    module = seeded(normed).eval()
    before = copy.deepcopy(module.state_dict())
    task = ModuleTask(module, F.cross_entropy)
    task.gradient(vector(module), (INPUTS[0], LABELS[0]))
    task.outputs(vector(module), INPUTS[0])
    assert not module.training
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_a_result_is_the_callers():
    """Methods write into gradients; the next call must not see it."""
    module = MODULES["chain"]
    task, x, batch = ModuleTask(module, F.cross_entropy), vector(module), (INPUTS[0], LABELS[0])
    first = task.gradient(x, batch).gradient
    kept = first.clone()
    first.add_(1)
    assert torch.equal(task.gradient(x, batch).gradient, kept)


def test_float64():
    module = seeded(chain).double()
    task = ModuleTask(module, F.cross_entropy, torch.float64)
    x = task.layout.flatten(module)
    found = task.gradient(x, (INPUTS[0].double(), LABELS[0]))
    assert found.gradient.dtype == torch.float64
    step = 1e-6 * randn(len(x), seed=4).double()
    rise = task.value(x + step, (INPUTS[0].double(), LABELS[0])) - task.value(x - step, (INPUTS[0].double(), LABELS[0]))
    assert rise / 2 == pytest.approx(float(found.gradient @ step), rel=1e-6)


def test_a_loss_that_is_not_finite_names_the_layer():
    module = MODULES["chain"]
    task, x = ModuleTask(module, F.cross_entropy), vector(module)
    x[task.layout["2.1.bias"].start] = math.nan
    with pytest.raises(Diverged, match=r"the loss is nan; layer '2\.1\.bias' holds values that are not finite"):
        task.gradient(x, (INPUTS[0], LABELS[0]))


def test_a_problem_may_have_two_networks():
    own, shared = ModuleTask(MODULES["chain"], F.cross_entropy), ModuleTask(MODULES["vmap"], F.cross_entropy)
    problem = Problem(own, shared)
    assert problem.own.layout.size != problem.shared.layout.size
    task: Task = problem.shared
    x, w = vector(MODULES["chain"]), vector(MODULES["vmap"])
    teacher = task.outputs(w, INPUTS[0])
    found = own.gradient(x, (INPUTS[0], LABELS[0]), loss=distilled, given=(teacher, WEIGHT[1]))
    assert found.gradient.shape == x.shape
    # at the same outputs the teacher asks for nothing more than the labels do
    alone = own.gradient(x, (INPUTS[0], LABELS[0]), loss=distilled, given=(found.outputs, torch.tensor(1.0)))
    assert alone.loss == pytest.approx(0, abs=1e-6)
    assert alone.gradient.abs().max() < 1e-6


# --- stacks ---


@modules
@losses
def test_a_stack_is_its_clients_row_by_row(module, loss, given):
    """Gradients, losses, outputs and values of three clients with weights, data and given tensors of their own."""
    one, stack = ModuleTask(module, F.cross_entropy), StackTask(module, F.cross_entropy)
    x = torch.stack([vector(module, k) for k in range(3)])
    before = x.clone()
    found = stack.gradient(x, (INPUTS, LABELS), loss=loss, given=given)
    said, values = stack.outputs(x, INPUTS), stack.value(x, (INPUTS, LABELS))
    assert found.loss.shape == (3,)
    for k in range(3):
        batch = INPUTS[k], LABELS[k]
        alone = one.gradient(x[k], batch, loss=loss, given=[g[k] for g in given])
        torch.testing.assert_close(found.gradient[k], alone.gradient, rtol=1e-4, atol=1e-6)
        assert float(found.loss[k]) == pytest.approx(alone.loss, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(found.outputs[k], alone.outputs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(said[k], one.outputs(x[k], INPUTS[k]), rtol=1e-5, atol=1e-5)
        assert float(values[k]) == pytest.approx(one.value(x[k], batch), rel=1e-5)
    assert torch.equal(x, before)
    assert not any(t.requires_grad for t in (found.gradient, found.outputs, said))
    assert stack.faults == {}


@modules
def test_slots_of_a_stack(module):
    stack, batch = StackTask(module, F.cross_entropy), (INPUTS, LABELS)
    x = torch.stack([vector(module, k) for k in range(3)])
    whole = stack.gradient(x, batch)
    for slot in stack.layout.slots:
        part = stack.gradient(x, batch, [slot])
        torch.testing.assert_close(part.gradient[:, slot.slice], whole.gradient[:, slot.slice])
        assert not torch.cat([part.gradient[:, : slot.start], part.gradient[:, slot.stop :]], 1).any()


@modules
def test_clients_that_start_from_one_model_may_share_it(module):
    stack, x = StackTask(module, F.cross_entropy), vector(module)
    shared, each = (stack.gradient(v, (INPUTS, LABELS)) for v in (x, x.expand(3, -1).clone()))
    assert torch.equal(shared.gradient, each.gradient)
    assert torch.equal(stack.outputs(x, INPUTS), each.outputs)
    assert torch.equal(stack.value(x, (INPUTS, LABELS)), each.loss)


@modules
def test_a_row_depends_on_nothing_but_its_client(module):
    """A neighbor that diverges is written down, and moves no other row."""
    stack, batch = StackTask(module, F.cross_entropy), (INPUTS, LABELS)
    x = torch.stack([vector(module, k) for k in range(3)])
    calm = stack.gradient(x, batch)
    wild = x.clone()
    wild[1] = math.nan
    found = stack.gradient(wild, batch)
    assert torch.equal(found.gradient[[0, 2]], calm.gradient[[0, 2]])
    assert list(stack.faults) == [1]
    assert "not finite" in stack.faults[1]


@pytest.mark.parametrize(
    ("module", "loss", "targets"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)), F.cross_entropy, LABELS.where(LABELS > 0, -100)),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 5)), F.cross_entropy, randn(3, 7, 5, seed=3).softmax(-1)),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 5)), F.mse_loss, randn(3, 7, 5, seed=3)),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 5)), F.binary_cross_entropy_with_logits, randn(3, 7, 5).sigmoid()),
    ],
    ids=["labels left out", "soft labels", "regression", "several labels"],
)
def test_losses_of_other_targets(module, loss, targets):
    one, stack = ModuleTask(module, loss), StackTask(module, loss)
    x = torch.stack([vector(module, k) for k in range(3)])
    found = stack.gradient(x, (INPUTS, targets))
    for k in range(3):
        alone = one.gradient(x[k], (INPUTS[k], targets[k]))
        torch.testing.assert_close(found.gradient[k], alone.gradient, rtol=1e-4, atol=1e-6)
        assert float(found.loss[k]) == pytest.approx(alone.loss, rel=1e-5)
