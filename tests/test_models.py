"""The networks of the paper have its sizes; building one is seeded and leaves the global generator alone."""

import pytest
import torch
from torch import nn

from qupel.core.layout import Layout
from qupel.tasks import zoo as models
from qupel.util.errors import UserError


@pytest.mark.parametrize(
    ("make", "parameters", "layers"),
    [(models.cnn5, 797_962, 3), (models.resnet20, 269_722, 18), (models.resnet32, 464_154, 30)],
)
def test_sizes_of_the_paper(make, parameters, layers):
    module = make()
    layout = Layout.of(module)
    assert layout.size == parameters == sum(p.numel() for p in module.parameters())
    assert len(layout.default_layers()) == layers
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "parameters", "layers"),
    [("mobilenet", (3, 32, 32), 37_162, 10), ("mobilenet1d", (8, 52), 19_034, 6), ("tcn", (8, 52), 10_442, 3)],
)
def test_small_networks_of_other_kinds(name, shape, parameters, layers):
    module = models.build(name, shape, 10, 0)
    layout = Layout.of(module)
    assert layout.size == parameters
    assert len(layout.default_layers()) == layers
    assert module(torch.randn(2, *shape)).shape == (2, 10)
    depthwise = [m for m in module.modules() if getattr(m, "groups", 1) > 1]
    assert bool(depthwise) == name.startswith("mobilenet")


def test_cnn5_quantizes_its_middle_three_weights():
    layout = Layout.of(models.cnn5())
    assert sum(layout[name].size for name in layout.default_layers()) == 790_528
    # conv5x5x64 (3 -> 64), conv5x5x64, fc384, fc192, fc10
    shapes = [layout[name].shape for name in layout.weights]
    assert shapes == [(64, 3, 5, 5), (64, 64, 5, 5), (384, 1600), (192, 384), (10, 192)]


def test_resnets_quantize_convolutions_only():
    module = models.resnet20()
    layout = Layout.of(module)
    by_name = dict(module.named_modules())
    chosen = [by_name[name.removesuffix(".weight")] for name in layout.default_layers()]
    assert all(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in chosen)
    assert module.conv not in chosen


def test_resnet_halves_its_image_twice_and_widens():
    module = models.resnet20()
    y = torch.relu(module.bn(module.conv(torch.randn(1, 3, 32, 32))))
    seen = []
    for block in module.blocks:
        y = block(y)
        seen.append(tuple(y.shape[1:]))
    assert seen == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


@pytest.mark.parametrize("side", [28, 32])
def test_small_cnn_takes_both_image_sizes(side):
    assert models.small_cnn(1, side, 7)(torch.randn(2, 1, side, side)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mlp", "digits_cnn"])
def test_build_is_seeded_and_local(name):
    before = torch.get_rng_state()
    a, b, c = (Layout.of(m).flatten(m) for m in (models.build(name, (1, 8, 8), 10, s) for s in (1, 1, 2)))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert models.build(name, (1, 8, 8), 4, 0)(torch.randn(3, 1, 8, 8)).shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("alexnet", (3, 32, 32), "unknown network 'alexnet'.*; allowed: mlp, "),
        ("cnn5", (1, 28, 28), "takes 32x32 images"),
        ("small_cnn", (1, 8, 8), "28x28 or 32x32"),
        ("digits_cnn", (64,), r"inputs of shape \(64,\)"),
        ("resnet20", (64,), r"\(channels, height, width\)"),
    ],
)
def test_what_does_not_fit_is_refused(name, shape, says):
    with pytest.raises(UserError, match=says):
        models.build(name, shape, 10, 0)
