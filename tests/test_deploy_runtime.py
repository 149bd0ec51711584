"""Models that stay packed in memory."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from qupel.deploy import About, empty, save
from qupel.deploy.packed import pack_model
from qupel.deploy.runtime import keep_packed
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_file import deployed, resnet


@pytest.mark.parametrize("name", ["resnet20", "mlp", "digits_cnn"])
@pytest.mark.parametrize("levels", [2, 3, 8, 256])
def test_same_outputs_bit_for_bit(name, levels):
    torch.manual_seed(0)
    shape = {"resnet20": (3, 32, 32), "mlp": (1, 8, 8), "digits_cnn": (1, 8, 8)}[name]
    module, codebook = resnet(levels) if name == "resnet20" else deployed(models.build(name, shape, 10, 0), levels)
    running = keep_packed(pack_model(module, codebook, About(name, shape, 10)))
    x = torch.randn(3, *shape)
    with torch.no_grad():
        assert torch.equal(running(x), module(x))
        assert torch.equal(running(x), module(x))
    held = {n for n, _ in running.named_parameters()}
    assert held == {n for n, _ in module.named_parameters()} - {slot.name for slot in codebook.slots}
    assert not any("weight" in m.__dict__ for m in running.modules())  # nothing dense stays


def test_own_module_shared_weights_and_failed_calls():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    module, codebook = deployed(Own(), {"one.weight": 3})
    with empty():
        blank = Own()
    running = keep_packed(pack_model(module, codebook), blank)
    with pytest.raises(RuntimeError):
        running(torch.randn(3, 5))
    assert "weight" not in running.one.__dict__
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(running(x), module(x))

    class Scratch(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    module, codebook = deployed(Scratch(), {})
    with empty():
        blank = Scratch()
    with pytest.raises(UserError, match="'scratch' is not in the file"):
        keep_packed(pack_model(module, codebook), blank)


def test_building_from_a_file_takes_little_memory(tmp_path):
    """In a process of its own: no lazily imported machinery, no dense model on the way."""
    module, codebook = resnet(2)
    save(tmp_path / "f", module, codebook, about=About("resnet20", (3, 32, 32), 10))
    script = (
        "import sys, torch; from qupel.deploy import keep_packed, load; from qupel.deploy.memory import resident;"
        "before, modules = resident(), len(sys.modules); keep_packed(load(sys.argv[1]));"
        "print((resident() - before) / 2**20, len(sys.modules) - modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "f"], check=True, capture_output=True, text=True)
    grown, modules = map(float, done.stdout.split())
    assert grown < 8, done.stdout
    assert modules < 100, done.stdout
