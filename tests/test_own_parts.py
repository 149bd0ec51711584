"""Parts of the user's own, in modules that nothing else knows: a method with a state of its own, a quantizer, a server,
a metric, a loss and a network run through configs, `qupel.fit`, workers and ranks; mistakes are told in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qupel
from qupel.parts.phase import phase_from
from qupel.report.show import show
from qupel.report.write import write_report
from qupel.run import config as configs
from qupel.run import experiment
from qupel.util.errors import UserError
from tiny import CLASSES, INPUTS, mlp

PARTS = '''
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qupel.core.codebook import start_codebook
from qupel.core.optim import SGD, Optimizer
from qupel.core.schedule import Schedule
from qupel.parts.base import Deployed, Info, State, Upload
from qupel.parts.methods.base import OneRow, quantized_step
from qupel.parts.quantizers import Quantizer
from qupel.parts.quantizers.base import descend_at
from qupel.parts.servers.base import add


@dataclass(frozen=True)
class Mine:
    """Weights of the quantized layers sit on a grid that never moves."""

    spread: float = 1.0

    def start(self, before, plan, layout):
        book = start_codebook(layout, before.x, plan, "range")
        return before.x, book.with_centers(self.spread * c for c in book.centers)

    def gradient(self, x, codebook, task, batch, clock):
        return descend_at(x, task, batch)

    def settle(self, y, codebook, descent, task, batch, eta1, clock):
        return y, codebook, descent.info

    def deployed(self, x, codebook):
        return Deployed(codebook.hard(x), codebook)


@dataclass(frozen=True, kw_only=True)
class Counted(State):
    steps: Tensor


@dataclass(frozen=True)
class Lonely(OneRow):
    """Each client trains its own model, starts every round half way to the others' mean, and counts its steps."""

    state_type: ClassVar[type] = Counted
    eta1: Schedule = Schedule(0.1)
    optimizer: Optimizer = SGD()
    quantizer: Quantizer = Mine()
    half: float = 0.5

    def start(self, before, plan, problem):
        x, codebook = self.quantizer.start(before, plan, problem.own.layout)
        return Counted(x, before.w, codebook, self.optimizer.memory(x), steps=torch.zeros(1))

    def receive(self, state, w):
        return replace(state, w=w[0], x=torch.lerp(state.x, w[0], self.half))

    def step(self, s, problem, batch, clock):
        x, codebook, memory, info = quantized_step(
            self.quantizer, self.optimizer, self.eta1, (s.x, s.codebook, s.memory), problem.own, batch, clock
        )
        s = replace(s, x=x, codebook=codebook, memory=memory, steps=s.steps + 1)
        return s, replace(info, more={"steps": s.steps.squeeze(-1)})

    def upload(self, state):
        return Upload((state.x,))

    def deployed(self, state):
        return self.quantizer.deployed(state.x, state.codebook)


@dataclass(frozen=True)
class MyServer:
    """Goes a part of the way to the mean, and remembers how often."""

    pull: float = 0.5

    def start(self, w):
        return (torch.zeros(1),)

    def send(self, w, state):
        return w

    def add(self, so_far, upload, share):
        return add(so_far, upload, share)

    def finish(self, w, so_far, state):
        return tuple(torch.lerp(a, b, self.pull) for a, b in zip(w, so_far.mean(w), strict=True)), (state[0] + 1,)


class Plain:
    """No dataclass, so it has no settings."""


def gentle(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.2)


def recipe(settings, length):
    from qupel.parts.phase import Phase
    return [Phase(Lonely(eta1=settings.x_schedule(length)), length.rounds, MyServer())]


def net(shape, classes, hidden=4):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(torch.Size(shape).numel(), hidden), torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes or 1),
    )
'''
METRICS = """
def late(outputs, targets):
    return (outputs.argmax(1) >= targets).double().mean()
"""
CONFIG = """
rounds = 3
local_steps = 2
batch = 4
evaluate_every = 3
vectorize = "off"
[split]
clients = 3
train_per_client = 8
test_per_client = 4
[model]
name = "my_parts:net"
args = {hidden = 6}
[task]
loss = "my_parts:gentle"
metrics = ["my_metrics:late", "macro_f1"]
[methods.Own]
method = "my_parts:Lonely"
quantizer = {name = "my_parts:Mine", spread = 0.5}
server = "my_parts:MyServer"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("own")
    (found / "my_parts.py").write_text(PARTS)
    (found / "my_metrics.py").write_text(METRICS)
    (found / "c.toml").write_text(CONFIG)
    return found


@pytest.fixture
def importable(folder, monkeypatch):
    """The modules, on this process's Python path for as long as a test goes."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield folder
    for name in ("my_parts", "my_metrics"):
        sys.modules.pop(name, None)


def command(*arguments, cwd):
    """In a process of its own, whose Python path has not the folder of the modules."""
    source = str(Path(qupel.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    given = [sys.executable, "-m", "qupel", *map(str, arguments)]
    return subprocess.run(given, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def outcome(run):
    """Metrics without the time they took, and the model files."""
    lines = [json.loads(line) for line in (run / "cells/Own-s0/metrics.jsonl").read_text().splitlines()]
    models = [p.read_bytes() for p in sorted((run / "cells/Own-s0/models").iterdir())]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines], models


def test_a_config_names_modules_that_stand_beside_it(importable, tmp_path):
    """On the command line, from another folder, two workers and two ranks give the bits of one process."""
    experiment.run_experiment(configs.load(importable / "c.toml"), tmp_path / "one")
    for name, engine in (("two", "local"), ("ranks", "ranks")):
        way = ("--workers", 2, "--engine", engine)
        done = command("run", importable / "c.toml", "--out", tmp_path / name, *way, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    found = {name: outcome(tmp_path / name) for name in ("one", "two", "ranks")}
    assert found["one"] == found["two"] == found["ranks"]
    (line,), models = found["one"]
    assert (line["method"], line["quantizer"], line["bits"]) == ("my_parts:Lonely", "my_parts:Mine", 7 / 3)
    assert line["train_steps"] == 3.5  # the mean of the steps 1 to 6
    assert 0 <= line["test_my_metrics:late"] <= 1
    assert 0 <= line["test_macro_f1"] <= 1
    assert len(models) == 3
    result = json.loads((tmp_path / "one/cells/Own-s0/result.json").read_text())
    (phase,) = result["phases"]
    assert phase["method"] == "my_parts:Lonely"
    assert phase["quantizer"] == {"name": "my_parts:Mine", "spread": 0.5}
    assert phase["server"] == {"name": "my_parts:MyServer", "pull": 0.5}
    assert result["quantized"] == ["3.weight"]


def people():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 13, INPUTS)).astype(np.float32)
    y = x[:, :, :CLASSES].argmax(2)
    return [(a[:8], b[:8], a[8:], b[8:]) for a, b in zip(x, y, strict=True)]


def fit(**options):
    parts = {"method": "my_parts:Lonely", "quantizer": "my_parts:Mine", "server": "my_parts:MyServer"}
    short = {"rounds": 3, "local_steps": 2, "batch": 4, "evaluate_every": 3, "vectorize": "off"}
    return qupel.fit(mlp(), people(), **{**parts, **short, **options})


def test_fit_takes_parts_by_name(importable):
    found = fit(metrics=["my_metrics:late", "top5"], loss="my_parts:gentle")
    last = found.metrics[-1]
    assert (last["method"], last["quantizer"], last["train_steps"]) == ("my_parts:Lonely", "my_parts:Mine", 3.5)
    assert last["test_top5"] == 1  # of three classes
    assert last["test_my_metrics:late"] >= np.mean(found.test)
    assert found.quantized == [{"2.weight": 2}] * 3
    two = fit(metrics=["my_metrics:late", "top5"], loss="my_parts:gentle", workers=2)
    assert [{**line, "seconds": 0} for line in two.metrics] == [{**line, "seconds": 0} for line in found.metrics]
    for a, b in zip(found.models, two.models, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    stacked = fit(loss="my_parts:gentle", vectorize="on")
    assert stacked.engine.stacked
    assert stacked.metrics[-1]["test_loss"] == pytest.approx(last["test_loss"], rel=1e-4)
    plain = fit()
    assert plain.metrics[-1]["test_loss"] != last["test_loss"]
    assert "test_top5" not in plain.metrics[-1]


def test_fit_takes_parts_themselves(importable):
    import my_metrics
    import my_parts

    named = fit(metrics=["my_metrics:late"], loss="my_parts:gentle")
    made = fit(
        quantizer=my_parts.Mine(),
        server=my_parts.MyServer(),
        metrics={"my_metrics:late": my_metrics.late},
        loss=my_parts.gentle,
    )
    assert [{**line, "seconds": 0} for line in made.metrics] == [{**line, "seconds": 0} for line in named.metrics]
    other = fit(quantizer=my_parts.Mine(spread=0.1), metrics=["my_metrics:late"], loss="my_parts:gentle")
    assert other.codebooks[0].centers[0].abs().max() < named.codebooks[0].centers[0].abs().max()


def test_a_recipe_of_ones_own(importable):
    found = fit(method="my_parts:recipe", quantizer=None, server=None)
    assert found.metrics[-1]["method"] == "my_parts:Lonely"
    config = configs.parse('[methods.A]\nrecipe = "my_parts:recipe"\n', "c")
    (phase,) = experiment.build_job(config, experiment.cells(config)[0]).phases
    assert phase_from(phase.table(), "phase") == phase
    with pytest.raises(UserError, match="quantizer and server go with a method"):
        fit(method="my_parts:recipe", server=None)


MISTAKES = [
    ('method = "nowhere:Lonely"', "methods.Own: method: method 'nowhere:Lonely': no module 'nowhere'"),
    ('method = "my_parts:Lonly"', "methods.Own: method: method 'my_parts:Lonly': my_parts has no 'Lonly'"),
    ('method = "my_parts:Plain"', "methods.Own: method: my_parts:Plain is no frozen dataclass, so it cannot have"),
    ('method = "my_parts:gentle"', "methods.Own: method: my_parts:gentle is no frozen dataclass"),
    ('method = "broken:Lonely"', "method 'broken:Lonely': broken fails to load: ZeroDivisionError: division by zero"),
    ('method = {name = "my_parts:Lonely", haf = 1.0}', "methods.Own: method: unknown key 'haf'; did you mean 'half'?"),
    ('method = {name = "my_parts:Lonely", half = "1"}', "method.half: input should be a valid number, not '1'"),
    ('method = "my_parts:Lonely"\nquantizer = {name = "my_parts:Mine", spred = 1}', "quantizer: unknown key 'spred'"),
    ('method = "my_parts:Lonely"\nserver = "my_parts:Server"', "server: server 'my_parts:Server': my_parts has no"),
    ('recipe = "my_parts:cake"', "methods.Own.recipe: recipe 'my_parts:cake': my_parts has no 'cake'"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_mistakes_are_told_in_one_line(importable, text, says):
    (importable / "broken.py").write_text("1 / 0\n")
    (importable / "wrong.toml").write_text(f"[methods.Own]\n{text}\n")
    with pytest.raises(UserError) as error:
        configs.load(importable / "wrong.toml")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_line_tells_them_too(folder, tmp_path):
    (folder / "wrong.toml").write_text('[methods.Own]\nmethod = "nowhere:Lonely"\n')
    done = command("run", folder / "wrong.toml", "--out", tmp_path / "r", cwd=tmp_path)
    assert done.returncode == 2
    assert "no module 'nowhere' on the Python path or beside the config" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("{hiden = 6}", "model 'my_parts:net' cannot be built with shape, classes, hiden"),
        ("{hidden = '6'}", "model 'my_parts:net' cannot be built with shape, classes, hidden"),
    ],
)
def test_a_network_that_cannot_be_built(importable, args, says):
    config = configs.parse(CONFIG.replace("{hidden = 6}", args), "c")
    with pytest.raises(UserError, match=says):
        experiment.build_job(config, experiment.cells(config)[0])


def test_numbers_as_targets_need_a_loss(importable, tmp_path, capsys):
    """Data without class labels: a run with a loss that is named, judged by that loss and other metrics."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 24), ("test", 12)):
        arrays[f"{split}_inputs"] = rng.standard_normal((n, 3)).astype(np.float32)
        arrays[f"{split}_targets"] = arrays[f"{split}_inputs"].sum(1, keepdims=True)
    np.savez(tmp_path / "numbers.npz", **arrays)
    text = CONFIG.replace("train_per_client = 8\ntest_per_client = 4\n", 'kind = "iid"\n')
    before, after = text.split("[task]\n")
    text = before + '[task]\nloss = "huber"\nmetrics = ["mae"]\n' + after[after.index("[methods") :]
    text += f'[data]\nname = "{tmp_path / "numbers.npz"}"\n'
    config = configs.parse(text, "c")
    (result,) = experiment.run_experiment(config, tmp_path / "run")
    last = result["lines"][-1]
    assert last["test"] == last["test_loss"]
    assert last["test_mae"] > last["test_loss"]  # beyond 1 and near 0 alike
    assert len(list((tmp_path / "run/cells/Own-s0/models").iterdir())) == 3
    show([result], tmp_path / "run", one=False, seconds=1)
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    summary = (tmp_path / "run/summary.md").read_text()
    for name in ("loss", "mae"):
        mean = f"{last[f'test_{name}']:.4g}"
        assert ["Own", name, mean] in [words[:3] for words in told]
        assert f"| Own | {name} | {mean} |" in summary
    page = write_report([tmp_path / "run"]).read_text()
    assert "Test loss (less is better) after the last round" in page
    without = configs.parse(text.replace('loss = "huber"\n', ""), "c")
    with pytest.raises(UserError, match=r"has no class labels: say which loss is meant"):
        experiment.build_job(without, experiment.cells(without)[0])


def test_a_data_set_of_ones_own_by_its_import_path(importable):
    """A function beside the config: four arrays, or a Dataset; what returns something else is one line."""
    (importable / "my_data.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    rng = np.random.default_rng(0)\n"
        "    x = rng.normal(size=(80, 6)).astype(np.float32)\n"
        "    y = x[:, :3].argmax(1)\n"
        "    return x[:60], y[:60], x[60:], y[60:]\n"
        "def nothing():\n"
        "    return 3\n"
    )
    text = 'rounds = 2\nlocal_steps = 1\n[data]\nname = "my_data:load"\n[split]\nkind = "iid"\nclients = 2\n'
    text += '[model]\nname = "mlp"\n[methods.Alone]\nrecipe = "fedavg"\n'
    (importable / "data.toml").write_text(text)
    config = configs.load(importable / "data.toml")
    (result,) = experiment.run_experiment(config, importable / "data-run")
    assert np.isfinite(result["lines"][-1]["test_loss"])
    wrong = configs.load(importable / "data.toml", ["data.name=my_data:nothing"])
    with pytest.raises(UserError, match=r"'my_data:nothing': returns int; allowed are a list or a dict of clients"):
        experiment.run_experiment(wrong, importable / "wrong-run")
