"""A module's parameters as one vector and back; which layers are quantized."""

import pytest
import torch
from torch import nn

from qupel.core.layout import Layout, choose_layers
from qupel.tasks import zoo as models
from qupel.util.errors import UserError


class Owned(nn.Module):
    """A user's own module: convolutions of three kinds, a normalization, a bare parameter, nesting."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))  # 0-D
        self.stem = nn.Conv2d(2, 4, (3, 2), padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(80, 5), nn.ReLU())
        self.line = nn.Conv1d(1, 2, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        y = self.body(self.depthwise(torch.relu(self.norm(self.stem(x)))))
        return self.head(self.line(y[:, None]).flatten(1)) * self.scale


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.last(self.b(self.a(self.first(x))))


def parameters(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("make", [Owned, Tied, models.digits_cnn, models.resnet20])
def test_round_trip(make):
    torch.manual_seed(0)
    module, other = make(), make()
    layout = Layout.of(module)
    before = parameters(module)
    vector = layout.flatten(module)
    assert vector.shape == (layout.size,) == (sum(p.numel() for p in module.parameters()),)
    for slot in layout.slots:
        assert torch.equal(slot.view(vector), before[slot.name])
    layout.load(other, vector)
    after = parameters(other)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    vector.add_(1)  # neither module holds the vector
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


@pytest.mark.parametrize("make", [Owned, Tied, models.digits_cnn])
def test_a_bound_vector_is_the_module(make):
    torch.manual_seed(0)
    module, plain = make(), make()
    layout = Layout.of(module)
    values = layout.bind(module)
    new = 0.1 * torch.randn(layout.size)
    values.copy_(new)  # writing the vector is setting the model
    layout.load(plain, new)
    x = torch.randn(3, 1, 8, 8) if make is models.digits_cnn else torch.randn(3, 4)
    x = torch.randn(3, 2, 4, 4) if make is Owned else x
    torch.testing.assert_close(module(x), plain(x), rtol=1e-6, atol=1e-5)
    assert torch.equal(layout.flatten(module), values)


def test_4d_weights_lie_channels_last():
    layout = Layout.of(nn.Conv2d(3, 2, (2, 5)))
    vector = torch.arange(float(layout.size))
    view = layout["weight"].view(vector)
    assert view.shape == (2, 3, 2, 5)
    assert view.is_contiguous(memory_format=torch.channels_last)
    o, i, h, w = 1, 2, 1, 3
    assert view[o, i, h, w] == ((o * 2 + h) * 5 + w) * 3 + i  # memory order o, h, w, i
    view[o, i, h, w] = -1.0
    assert (vector == -1).sum() == 1


def test_tied_weights_are_stored_once():
    module = Tied()
    layout = Layout.of(module)
    names = [s.name for s in layout.slots]
    assert "a.weight" in names
    assert "b.weight" not in names
    assert layout.weights == ("first.weight", "a.weight", "last.weight")
    values = layout.bind(module)
    values.normal_()
    assert torch.equal(module.a.weight, module.b.weight)
    assert torch.equal(layout["a.weight"].view(values), module.b.weight)


def test_slots_tile_the_vector():
    layout = Layout.of(Owned())
    assert layout.slots[0].start == 0
    assert [s.stop for s in layout.slots[:-1]] == [s.start for s in layout.slots[1:]]
    assert layout["scale"].size == 1


def test_default_layers_leave_out_first_and_last():
    layout = Layout.of(Owned())
    assert layout.weights == ("stem.weight", "depthwise.weight", "body.1.weight", "line.weight", "head.weight")
    assert layout.default_layers() == ("depthwise.weight", "body.1.weight", "line.weight")


def test_choose_layers():
    layout = Layout.of(Owned())
    assert choose_layers(layout, None) == layout.default_layers()
    assert choose_layers(layout, ["head", "stem.weight"]) == ("head.weight", "stem.weight")
    assert choose_layers(layout, []) == ()


@pytest.mark.parametrize("name", ["nothing", "norm", "norm.weight", "stem.bias", "scale", ""])
def test_what_is_no_layer_to_quantize_is_refused_with_the_names_there_are(name):
    with pytest.raises(UserError, match=r"to quantize.*stem\.weight.*head\.weight"):
        choose_layers(Layout.of(Owned()), [name])


def test_unknown_slot_names_those_there_are():
    with pytest.raises(UserError, match=r"'tail'.*stem\.weight"):
        Layout.of(Owned())["tail"]


def test_other_types_than_float32_are_refused():
    with pytest.raises(UserError, match=r"'weight'.*float64"):
        Layout.of(nn.Linear(2, 2).double())
