"""Networks of the paper and small ones to start with. Any nn.Module with Linear/Conv layers works in their place.

Max-pooling and ReLU commute; pooling first leaves the ReLU a quarter of the work.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qupel.util.errors import UserError
from qupel.util.registry import Registry


def mlp(inputs: int = 784, hidden: Sequence[int] = (256, 128), classes: int = 10) -> nn.Module:
    """Fully connected network with ReLU; takes images or vectors."""
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return _he(*layers, nn.Linear(sizes[-1], classes))


def _he(*layers: nn.Module) -> nn.Sequential:
    """Layers in a row, initialized for ReLU networks (He et al., 2015) with zero biases."""
    for layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers)


def digits_cnn(channels: int = 1, classes: int = 10) -> nn.Module:
    """Four layers for 8x8 images: conv3x3x16, fc128, fc32, fc; more than 99 % of its weights are quantized."""
    return _he(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, classes),
    )


def small_cnn(channels: int = 3, size: int = 32, classes: int = 10) -> nn.Module:
    """A compact CNN for 28x28 or 32x32 images: conv5x5x16, pool, conv5x5x32, pool, fc128, fc64, fc."""
    side = (((size - 4) // 2) - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def cnn5(channels: int = 3, classes: int = 10) -> nn.Module:
    """The paper's 5-layer CNN for 32x32 images: conv5x5x64, pool, conv5x5x64, pool, fc384, fc192, fc.

    797,962 parameters, of which 790,528 (the middle three weights) are quantized.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


class _Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a parameter-free shortcut (subsampled, zero-padded channels)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.widen = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride] if self.stride > 1 else x
        if self.widen:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.widen // 2, self.widen - self.widen // 2))
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + shortcut)


class _ResNet(nn.Module):
    """The CIFAR ResNet of He et al. with 6 * blocks + 2 layers."""

    def __init__(self, blocks: int, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
        self.blocks = nn.Sequential(*(_Block(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)))
        self.fc = nn.Linear(64, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(y.mean(dim=(2, 3)))


def resnet20(channels: int = 3, classes: int = 10) -> nn.Module:
    """ResNet-20 for 32x32 images: 269,722 parameters, 18 of its convolutions quantized."""
    return _ResNet(3, channels, classes)


def resnet32(channels: int = 3, classes: int = 10) -> nn.Module:
    """ResNet-32 for 32x32 images: 464,154 parameters, 30 of its convolutions quantized."""
    return _ResNet(5, channels, classes)


# --- by name: a builder takes the shape of one input, the number of classes, or settings of its own ---

networks: Registry[Callable[..., nn.Module]] = Registry("network")
_SIZES = {"digits_cnn": (8,), "small_cnn": (28, 32), "cnn5": (32,)}  # of images
_ANY = {"mlp"}  # takes inputs of any shape
NONE: Mapping[str, Any] = MappingProxyType({})


@networks.register("mlp", about="fully connected 256-128, any input")
def _(shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (256, 128)) -> nn.Module:
    return mlp(math.prod(shape), hidden, classes)


@networks.register("digits_cnn", about="4 layers for 8x8 images")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return digits_cnn(shape[0], classes)


@networks.register("small_cnn", about="compact 5-layer CNN for 28x28 and 32x32 images")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return small_cnn(shape[0], shape[1], classes)


@networks.register("cnn5", about="the paper's 5-layer CNN, 32x32 images, 797,962 parameters")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return cnn5(shape[0], classes)


@networks.register("resnet20", about="ResNet-20 with BatchNorm, 32x32 images, 269,722 parameters")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return resnet20(shape[0], classes)


@networks.register("resnet32", about="ResNet-32 with BatchNorm, 32x32 images, 464,154 parameters")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return resnet32(shape[0], classes)


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int | None,
    seed: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """The named network, or "module:Name" of your own, initialized from `seed` without touching the global generator.

    It is called with `settings`, and with `shape` (of one input) and `classes` where it takes them.
    """
    builder = networks[name]
    if name in networks and name not in _ANY and (len(shape) != 3 or shape[1] not in _SIZES.get(name, (shape[1],))):
        sizes = " or ".join(f"{s}x{s}" for s in _SIZES.get(name, ())) or "(channels, height, width)"
        raise UserError(f"model {name!r} takes {sizes} images; this data has inputs of shape {tuple(shape)}")
    known = inspect.signature(builder).parameters
    offered = {"shape": tuple(shape), "classes": classes}
    given = {key: value for key, value in offered.items() if key in known} | dict(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = builder(**given)
        except TypeError as e:
            raise UserError(f"model {name!r} cannot be built with {', '.join(given) or 'no settings'}: {e}") from None
    if not isinstance(module, nn.Module):
        raise UserError(f"model {name!r} gives {type(module).__name__}, not a torch.nn.Module")
    return module
