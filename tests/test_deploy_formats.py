"""Exporters are parts: by name, or by the import path of a function of one's own."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import qupel
from qupel.core.codebook import Codebook
from qupel.deploy import About, load, save
from qupel.deploy.commands import _FORMATS
from qupel.deploy.formats import exporters, suffix, write
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_commands import call
from test_deploy_file import deployed

OWN = '''
"""Weights as a NumPy archive."""
import numpy as np

def write(path, module, codebook, *, about, rest):
    assert rest == "fp32"
    with open(path, "wb") as file:
        np.savez(file, client=about.client, levels=[len(c) for _, c in codebook],
                 **{name: p.detach().numpy() for name, p in module.named_parameters()})

write.suffix = ".npz"

def silent(path, module, codebook, *, about, rest): ...

def other(module): ...

number = 3
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module in the folder where the user works, which is not on the Python path."""
    (tmp_path / "my_formats.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_formats", None)


def arrays(path):
    with np.load(path) as held:
        return dict(held)


def test_the_built_in_ones():
    assert {name: suffix(name) for name in exporters} == {
        "packed": ".safetensors",
        "onnx": ".onnx",
        "coreml": ".mlpackage",
    }
    assert all(entry.about for entry in exporters.all().values())
    assert all(name in _FORMATS for name in exporters)  # the help text of `qupel export --to`


def test_the_registry_is_whole_by_itself():
    """Whoever asks first gets all of them, whatever has been loaded."""
    import subprocess

    code = "from qupel.deploy.formats import exporters; print(sorted(exporters))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['coreml', 'onnx', 'packed']"


def test_one_of_ones_own_from_the_command_line(own):
    module, codebook = deployed(models.digits_cnn(), 3)
    save(own / "client-000.safetensors", module, codebook, about=About("digits_cnn", (1, 8, 8), 10, client="Ann"))
    said = call("export", own / "client-000.safetensors", "--to", "my_formats:write", "--out", "out")
    assert "client-000.npz" in said
    held = arrays(own / "out" / "client-000.npz")
    assert (str(held["client"]), held["levels"].tolist()) == ("Ann", [3, 3])
    np.testing.assert_array_equal(held["0.weight"], module[0].weight.detach())
    assert f"{(own / 'out' / 'client-000.npz').stat().st_size:,}" in said


def test_one_of_ones_own_from_fit(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    x, y = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), np.arange(8) % 2
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    made = qupel.fit(net, [qupel.Client(x, y, name="Ann")], bits=2, rounds=4)
    (path,) = made.save(own / "models", to="my_formats:write")
    assert path.name == "client-000.npz"
    np.testing.assert_array_equal(arrays(path)["2.weight"], made.models[0][2].weight.detach())


def test_scales_go_through_fit_and_its_files(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("float32"), rng.integers(0, 2, 40)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    made = qupel.fit(net, [qupel.Client(x, y)], bits=2, rounds=4, levels="channel")
    (path,) = made.save(tmp_path)
    assert load(path).channels
    with torch.no_grad():
        assert torch.equal(qupel.load(path, net)(torch.from_numpy(x)), made.models[0](torch.from_numpy(x)))


def test_refusals(own, monkeypatch):
    monkeypatch.syspath_prepend(own)
    module, target = nn.Linear(2, 2), own / "new" / "m"
    for to, message in (
        ("tflite", "unknown exporter 'tflite'; allowed: .*packed.* or \"module:Name\" of your own"),
        ("my_formats:silent", "exporter 'my_formats:silent' has not written .*m"),
        ("my_formats:other", "exporter 'my_formats:other' cannot be called with .path, module, codebook, about="),
        ("my_formats:number", "cannot be called with"),
        ("my_formats:nothing", "my_formats has no 'nothing'"),
        ("no_such_module:write", "no module 'no_such_module'"),
    ):
        with pytest.raises(UserError, match=message) as error:
            write(target, module, Codebook(), About("", (2,), 2), to)
        assert str(error.value).isprintable()
    with pytest.raises(UserError, match="only packed files are compressed, not onnx"):
        write(target, module, Codebook(), About("", (2,), 2), "onnx", compress=True)
    save(own / "client-000.safetensors", module, Codebook())
    assert "unknown exporter" in call("export", own / "client-000.safetensors", "--to", "tflite", code=2)
    own_network = call("export", own / "client-000.safetensors", "--to", "my_formats:write", code=2)
    assert "the network is your own" in own_network
