"""5x5 convolutions by FFT. On processors with AVX2 and no AVX-512, NNPACK (a part of PyTorch) takes half of oneDNN's
time for the forward pass and sums fewer products, so that its result is nearer to the exact one. For 3x3 kernels, for
inputs of few channels and for gradients oneDNN is faster and stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHANNELS = 16  # of the input: with fewer there is little to gain


def use_fft(module: nn.Module) -> None:
    """Let the 5x5 convolutions of a module go by FFT, in place, where that is faster."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or not torch.backends.nnpack.is_available():
        return
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _fits(layer):
            layer.__class__ = _Conv5x5


def _fits(layer: nn.Conv2d) -> bool:
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    padding = not isinstance(layer.padding, str) and max(layer.padding) < 5
    return plain and padding and layer.kernel_size == (5, 5) and layer.in_channels >= CHANNELS


class _Conv5x5(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4 or input.device.type != "cpu" or not input.dtype == self.weight.dtype == torch.float32:
            return super().forward(input)
        return _ByFFT.apply(input, self.weight, self.bias, self.padding)


class _ByFFT(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        y = torch._nnpack_spatial_convolution(x.contiguous(), weight.contiguous(), bias, padding)
        return y.contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        asked, sizes = list(ctx.needs_input_grad[:3]), [len(weight)]
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, sizes, [1, 1], ctx.padding, [1, 1], False, [0, 0], 1, asked
        )
        return *found, None
