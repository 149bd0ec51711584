"""5x5 convolutions by FFT: the same function as torch's own, values and gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qupel.tasks import convolution
from qupel.tasks import zoo as models
from qupel.tasks.convolution import use_fft
from qupel.tasks.task import ModuleTask

by_fft = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2" or not torch.backends.nnpack.is_available(),
    reason="only where it is faster: processors with AVX2 and no AVX-512",
)


def fourier(module: nn.Module) -> list[str]:
    """The layers that go by FFT."""
    return [name for name, layer in module.named_modules() if isinstance(layer, convolution._Conv5x5)]


@by_fft
@pytest.mark.parametrize("batch", [1, 7, 50])
@pytest.mark.parametrize("padding", [0, 2, (4, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_float64(batch: int, padding: int | tuple[int, int], bias: bool) -> None:
    torch.manual_seed(batch)
    layer = nn.Conv2d(16, 24, 5, padding=padding, bias=bias)
    inputs = torch.randn(batch, 16, 13, 14).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact = nn.Conv2d(16, 24, 5, padding=padding, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    wanted = exact(inputs.double())
    use_fft(layer)
    found = layer(inputs)
    assert isinstance(layer, convolution._Conv5x5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)

    upstream = torch.randn_like(found)
    grads = torch.autograd.grad(found, [inputs, *layer.parameters()], upstream)
    exact_grads = torch.autograd.grad(wanted, [inputs, *exact.parameters()], upstream.double())
    for ours, theirs in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=1e-5 * float(theirs.abs().max()))


@by_fft
def test_a_task_takes_it_and_leaves_the_users_module_alone() -> None:
    module = models.build("cnn5", (3, 32, 32), 10, 0)
    task = ModuleTask(module, F.cross_entropy)
    assert fourier(task.module) == ["3"]  # the first one has 3 channels
    assert fourier(module) == []
    torch.manual_seed(1)
    batch = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 3, 4, 5])
    x = task.layout.flatten(module)
    exact = ModuleTask(module.double(), F.cross_entropy, torch.float64)
    found = task.gradient(x, batch).gradient
    wanted = exact.gradient(x.double(), (batch[0].double(), batch[1])).gradient
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-6)
    only = task.gradient(x, batch, [task.layout["3.weight"]]).gradient
    torch.testing.assert_close(only[task.layout["3.weight"].slice], found[task.layout["3.weight"].slice])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 3),
        nn.Conv2d(3, 16, 5),
        nn.Conv2d(16, 16, 5, stride=2),
        nn.Conv2d(16, 16, 5, dilation=2),
        nn.Conv2d(16, 16, 5, groups=2),
        nn.Conv2d(16, 16, 5, padding="same"),
        nn.Conv2d(16, 16, 5, padding=5),
        nn.Conv2d(16, 16, 5, padding=2, padding_mode="reflect"),
        nn.Conv1d(16, 16, 5),
    ],
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    use_fft(layer)
    assert fourier(layer) == []


@by_fft
def test_one_image_without_a_batch_and_float64_go_torchs_way() -> None:
    layer = nn.Conv2d(16, 8, 5)
    plain = nn.Conv2d(16, 8, 5)
    plain.load_state_dict(layer.state_dict())
    use_fft(layer)
    image = torch.randn(16, 9, 9)
    torch.testing.assert_close(layer(image), plain(image))
    torch.testing.assert_close(layer.double()(image[None].double()), plain.double()(image[None].double()))
