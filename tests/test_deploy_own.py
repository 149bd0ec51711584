"""Networks of the user's own in model files: every command works on them where the user names their code, and no file
makes us import anything."""

import hashlib
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from qupel.deploy import About, FormatError, load, open_model, own, save
from qupel.deploy.file import write_packed
from qupel.deploy.own import Allowed
from qupel.run import config as configs
from qupel.run import experiment
from qupel.util.errors import UserError
from test_deploy_commands import call

NETS = '''
import torch
from torch import nn


class HarNet(nn.Module):
    """For signals (channels, length)."""

    def __init__(self, shape, classes, width=6):
        super().__init__()
        self.first, self.body = nn.Conv1d(shape[0], width, 3, padding=1), nn.Conv1d(width, width, 3, padding=1)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, classes)
        self.register_buffer("gain", torch.tensor(2.0), persistent=False)  # is in no file

    def forward(self, x):
        return self.head(self.gain * torch.relu(self.norm(self.body(torch.relu(self.first(x))))).mean(2))
'''
CONFIG = """
rounds = 2
local_steps = 2
batch = 4
[data]
name = "signals.npz"
[split]
kind = "groups"
[model]
name = "har_nets:HarNet"
args = {width = 5}
[methods.Own]
recipe = "local"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of three people, with the network and the data beside its config."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(36, 3, 10)).astype(np.float32), rng.integers(0, 4, 36)
    groups = np.arange(36) % 3
    split = {"x_train": x, "y_train": y, "train_groups": groups, "x_test": x, "y_test": y, "test_groups": groups}
    np.savez(home / "signals.npz", **split)
    (home / "har_nets.py").write_text(NETS)
    (home / "c.toml").write_text(CONFIG.replace("signals.npz", str(home / "signals.npz")))
    before, path = list(sys.path), os.environ.get("PYTHONPATH")
    try:
        experiment.run_experiment(configs.load(home / "c.toml"), home / "run")
    finally:
        sys.path[:] = before
        sys.modules.pop("har_nets", None)
        os.environ.pop("PYTHONPATH", None) if path is None else os.environ.__setitem__("PYTHONPATH", path)
    return home / "run"


@pytest.fixture
def home(run, monkeypatch):
    """The folder of the modules is where one works."""
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield run.parent
    sys.modules.pop("har_nets", None)


def first(run):
    return run / "cells/Own-s0/models/client-000.safetensors"


def test_the_file_says_what_it_needs(run):
    about = load(first(run)).about
    assert (about.model, about.args) == ("har_nets:HarNet", {"width": 5})
    assert (about.input_shape, about.dtype, about.classes) == ((3, 10), "float32", 4)
    assert about.source == hashlib.sha256(NETS.encode()).hexdigest()
    assert about.needs["torch"] == torch.__version__.partition("+")[0]


def test_every_command_works_on_it(run, home, tmp_path):
    """The run's own config names the network; of a single file the user does."""
    pytest.importorskip("onnxruntime")
    file, model = first(run), ("--model", "har_nets:HarNet")
    call("export", run, "--client", 0, "--to", "onnx", "--out", tmp_path)
    call("export", file, "--to", "onnx", "--out", tmp_path / "one", *model)
    made = [(tmp_path / "client-000.onnx").read_bytes(), (tmp_path / "one/client-000.onnx").read_bytes()]
    assert made[0] == made[1]
    x = np.load(home / "signals.npz")["x_test"]
    packed = open_model(file, allowed=Allowed("har_nets:HarNet"))
    kept = open_model(file, allowed=Allowed("har_nets:HarNet"), keep_packed=True)
    outputs = packed.run(x)
    np.testing.assert_array_equal(kept.run(x), outputs)
    np.testing.assert_allclose(open_model(tmp_path / "client-000.onnx").run(x), outputs, atol=1e-5)
    said = call("inspect", file, *model)
    assert "full precision: first (the first layer), head (the last layer), 5 biases" in " ".join(said.split())
    assert call("predict", file, home / "signals.npz", *model).count("row") == 36
    assert "of 36 test samples" in call("eval", file, "--data", home / "signals.npz", *model)
    assert "to be quantized: 75 of " in " ".join(call("plan", file, "--budget", "4KiB", *model).split())
    told = call("plan", "har_nets:HarNet", "--input", "3x10", "--classes", 4, "--budget", "4KiB")
    assert "first (the first layer)" in " ".join(told.split())


def test_without_the_users_word_nothing_is_imported(run, home):
    file = first(run)
    for words in (
        ("predict", file, home / "signals.npz"),
        ("export", file, "--to", "onnx"),
        ("plan", file, "--budget", "9KiB"),
    ):
        said = call(*words, code=2)
        assert said == (
            "the file names the model 'har_nets:HarNet'; if that is code of yours, say so: --model har_nets:HarNet"
        )
    assert "why, the network would tell" in " ".join(call("inspect", file).split())
    call("export", file, "--out", home / "again")  # packed again: no code is needed
    assert (home / "again/client-000.safetensors").read_bytes() == file.read_bytes()
    assert "not 'other:Net'" in call("inspect", file, "--model", "other:Net", code=2)
    assert "har_nets" not in sys.modules


def test_a_file_cannot_call_what_it_likes(tmp_path, monkeypatch):
    """A name is only a name, also in the config of a run that somebody else made."""
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("called"))
    packed = replace(load_any(tmp_path), about=About("os:system", (4,), 2, args={"command": "true"}))
    run = tmp_path / "run"
    write_packed(run / "cells/Own-s0/models/client-000.safetensors", packed)
    file = run / "cells/Own-s0/models/client-000.safetensors"
    with pytest.raises(UserError, match="if that is code of yours"):
        open_model(file)
    (run / "config.json").write_text('{"model": {"name": "os:system"}}')
    assert "of an installed package; say so yourself" in call("export", run, "--all", "--to", "onnx", code=2)
    assert own.is_installed("torch.hub:load")
    assert not own.is_installed("test_deploy_own:HarNet")


def load_any(folder):
    from test_deploy_file import deployed

    save(folder / "any", *deployed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), 4))
    return load(folder / "any")


@pytest.mark.parametrize("args", [{"layers": 10**9}, {"hidden": 10**12}, {"hidden": -1}, {"hidden": [[2]]}])
def test_settings_of_our_networks_in_a_file_are_held_to_sizes(args, tmp_path):
    packed = replace(load_any(tmp_path), about=About("lstm", (4,), 2, args=args))
    with pytest.raises(FormatError, match=r"about\.args\.\w+: must be whole numbers"):
        packed.model()


def test_changed_code_is_refused_unless_the_user_says_so(run, home):
    file, model = first(run), ("--model", "har_nets:HarNet")
    code = home / "har_nets.py"
    try:
        code.write_text(NETS.replace('"""For signals', '"""Now for signals'))
        said = call("inspect", file, *model, code=2)
        assert said == ("the code of 'har_nets' is not what it was when the file was made; --changed takes it as it is")
        call("inspect", file, *model, "--changed")
        sys.modules.pop("har_nets")
        code.write_text(NETS.replace("width=6", "wide=6"))
        said = call("inspect", file, *model, "--changed", code=2)
        assert "cannot be built with shape, classes, width" in said
    finally:
        code.write_text(NETS)


def test_a_missing_module_is_told_in_a_line(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = call("inspect", first(run), "--model", "har_nets:HarNet", code=2)
    assert said == "network 'har_nets:HarNet': no module 'har_nets' on the Python path or beside the config"
