"""Networks of the paper and small ones to start with, for images, signals and text. Any nn.Module works in their place.

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
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
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


def _separable(conv: type[nn.Module], norm: type[nn.Module], before: int, after: int, stride: int) -> list[nn.Module]:
    """A depthwise 3-tap convolution, then a pointwise one, each with BatchNorm and ReLU (Howard et al., 2017)."""
    depthwise = conv(before, before, 3, stride=stride, padding=1, groups=before, bias=False)
    return [depthwise, norm(before), nn.ReLU(), conv(before, after, 1, bias=False), norm(after), nn.ReLU()]


def mobilenet(channels: int = 3, classes: int = 10) -> nn.Module:
    """Small images by depthwise convolutions: conv3x3x16, five separable blocks up to 128, mean, fc."""
    widths = [(16, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 1)]
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for before, after, stride in widths:
        layers += _separable(nn.Conv2d, nn.BatchNorm2d, before, after, stride)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def mobilenet1d(channels: int = 8, classes: int = 10) -> nn.Module:
    """Signals by depthwise convolutions: conv5x32, three separable blocks up to 96, mean, fc."""
    layers: list[nn.Module] = [nn.Conv1d(channels, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU()]
    for before, after, stride in [(32, 48, 2), (48, 96, 2), (96, 96, 1)]:
        layers += _separable(nn.Conv1d, nn.BatchNorm1d, before, after, stride)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(96, classes))


def tcn(channels: int = 8, classes: int = 10) -> nn.Module:
    """Signals by dilated convolutions (1, 2, 4, 8) of 32 channels, mean, fc: small, and without BatchNorm."""
    layers: list[nn.Module] = []
    for before, dilation in [(channels, 1), (32, 2), (32, 4), (32, 8)]:
        layers += [nn.Conv1d(before, 32, 3, padding=dilation, dilation=dilation), nn.ReLU()]
    return _he(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, classes))


def cnn1d(channels: int = 8, length: int = 52, classes: int = 10) -> nn.Module:
    """Five layers for signals (channels, length): conv5x32, pool, conv5x64, pool, conv3x64, fc64, fc."""
    return _he(
        nn.Conv1d(channels, 32, 5, padding=2),
        nn.MaxPool1d(2),
        nn.ReLU(),
        nn.Conv1d(32, 64, 5, padding=2),
        nn.MaxPool1d(2),
        nn.ReLU(),
        nn.Conv1d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (length // 4), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


# --- text: tokens (n, length), whole numbers below `vocabulary` -> what comes next (n, vocabulary) ---


class TextLSTM(nn.Module):
    """The next character by an LSTM, as LEAF's for Shakespeare, but smaller (Caldas et al., 2018)."""

    def __init__(self, vocabulary: int, embedding: int = 16, hidden: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens.long()))  # (n, length, hidden)
        return self.head(states[:, -1])


class TextTransformer(nn.Module):
    """The next character by a transformer that looks at the whole sequence and answers at its last place."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        one = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(one, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        for table in (self.embedding, self.places):
            nn.init.normal_(table.weight, std=0.02 * width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens.long()) + self.places.weight[: tokens.shape[1]]  # (n, length, width)
        return self.head(self.encoder(h)[:, -1])


# --- by name: a builder takes the shape of one input, the number of classes, or settings of its own ---

networks: Registry[Callable[..., nn.Module]] = Registry("network")
_SIZES = {"digits_cnn": (8,), "small_cnn": (28, 32), "cnn5": (32,)}  # of images
_ANY = {"mlp"}  # takes inputs of any shape
_TAKES = {"cnn1d": ("signals (channels, length)", 2), "lstm": ("tokens (length,)", 1)}
_TAKES["transformer"] = _TAKES["lstm"]
_TAKES["mobilenet1d"] = _TAKES["tcn"] = _TAKES["cnn1d"]
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


@networks.register("mobilenet", about="depthwise convolutions, BatchNorm, small images, 37,162 numbers")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return mobilenet(shape[0], classes)


@networks.register("cnn1d", about="5-layer CNN for signals (channels, length)")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return cnn1d(shape[0], shape[1], classes)


@networks.register("mobilenet1d", about="depthwise convolutions and BatchNorm for signals (channels, length)")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return mobilenet1d(shape[0], classes)


@networks.register("tcn", about="4 dilated convolutions for signals (channels, length)")
def _(shape: tuple[int, ...], classes: int) -> nn.Module:
    return tcn(shape[0], classes)


@networks.register("lstm", about="2-layer LSTM for text; classes: the vocabulary")
def _(shape: tuple[int, ...], classes: int, embedding: int = 16, hidden: int = 96, layers: int = 2) -> nn.Module:
    return TextLSTM(classes, embedding, hidden, layers)


@networks.register("transformer", about="2-layer transformer for text; classes: the vocabulary")
def _(shape: tuple[int, ...], classes: int, width: int = 64, layers: int = 2, heads: int = 4) -> nn.Module:
    return TextTransformer(classes, shape[0], width, layers, heads)


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if name in _ANY or name not in networks:
        return
    takes, dimensions = _TAKES.get(name, ("", 3))
    sizes = _SIZES.get(name, ())
    if not takes:
        takes = f"{' or '.join(f'{s}x{s}' for s in sizes) or '(channels, height, width)'} images"
    if len(shape) != dimensions or (sizes and shape[1] not in sizes) or (name == "cnn1d" and shape[1] < 4):
        raise UserError(f"model {name!r} takes {takes}; this data has inputs of shape {tuple(shape)}")


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
    _check_shape(name, shape)
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
