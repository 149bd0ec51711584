"""More than 200 clients: their scores live beside the metrics, and every reader has them."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import qupel
from qupel.deploy.file import load
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.inline import Inline
from qupel.engine.rounds import Stopped, run
from qupel.engine.scores import FILE, attach
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase
from qupel.report.charts import clients as dots
from qupel.report.charts import compare
from qupel.report.runs import load_runs
from qupel.report.tables import rows
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.run.jobs import cells
from qupel.util.errors import UserError
from tiny import make_job, run_inline, timeless

MANY = 301

CONFIG = f"""
rounds = 2
local_steps = 2
batch = 3
bits = [2, 32]
evaluate_every = 1
[data]
name = "{{data}}"
[split]
kind = "iid"
clients = {MANY}
[model]
name = "mlp"
[methods.QuPeL]
recipe = "qupel"
warmup = 0.0
finetune = 0.0
[methods.Local]
recipe = "local"
warmup = 0.0
finetune = 0.0
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, MANY * 7)
    inputs = (rng.normal(size=(MANY * 7, 4)) + 2 * targets[:, None]).astype(np.float32)
    parts = {"train": slice(MANY * 4), "test": slice(MANY * 4, None)}
    arrays = {f"{split}_inputs": inputs[which] for split, which in parts.items()}
    arrays |= {f"{split}_targets": targets[which] for split, which in parts.items()}
    np.savez(folder / "data.npz", **arrays)
    config = configs.parse(CONFIG.format(data=folder / "data.npz"), "test")
    return folder / "run", config, run_experiment(config, folder / "run")


def test_every_exported_file_carries_its_own_score(run_folder):
    folder, config, results = run_folder
    for cell, result in zip(cells(config), results, strict=True):
        scores = result["lines"][-1]["clients"]["test"]
        assert len(scores) == MANY
        assert len(set(scores)) > 2
        assert np.mean(scores) == pytest.approx(result["lines"][-1]["test"])
        models = sorted((folder / "cells" / cell.name / "models").iterdir())
        told = [load(path).about.extra["test"] for path in (models[0], models[7], models[-1])]
        assert told == [round(scores[i], 6) for i in (0, 7, -1)]
        written = json.loads((folder / "cells" / cell.name / "result.json").read_text())
        assert all("clients" not in line for line in written["lines"])  # they are in the compact file
        assert (folder / "cells" / cell.name / FILE).stat().st_size < 10_000


def test_a_table_has_all_columns(run_folder):
    folder, _, _ = run_folder
    runs = load_runs([folder])
    for row in rows(runs[0].results):
        assert set(row.by_bits) == {2.0, 32.0}
        assert row.spread > 0
        assert row.worst < row.mean
    chart = dots(compare(runs))
    assert sum(len(r["values"]) for r in chart["rows"]) == 2 * MANY


def test_fit_tells_every_clients_score(tmp_path):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 2, (MANY, 6))
    inputs = (rng.normal(size=(MANY, 6, 4)) + targets[..., None]).astype(np.float32)
    clients = [(x[:3], y[:3], x[3:], y[3:]) for x, y in zip(inputs, targets, strict=True)]
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    settings = qupel.Settings(warmup=0.0, finetune=0.0)
    options = {"bits": 2, "rounds": 2, "local_steps": 2, "batch": 3, "settings": settings, "evaluate_every": 1}
    found = qupel.fit(net, clients, out=tmp_path / "a", **options)
    assert len(found.test) == MANY
    for i in (0, 150, MANY - 1):
        x, y = (torch.from_numpy(v) for v in clients[i][2:])
        assert found.test[i] == pytest.approx(float((found.models[i](x).argmax(1) == y).float().mean()))
    again = qupel.fit(net, clients, out=tmp_path / "a", **options)  # read from disk, not trained again
    assert again.test == found.test
    assert qupel.fit(net, clients, **options).test == found.test


def test_scores_survive_a_stop(tmp_path):
    job = make_job([Phase(QuPeL(), 3)], sizes=(4,) * MANY, bits=(2,), evaluate_every=1)
    whole, _ = run_inline(job)
    assert ["clients" in line for line in whole.lines] == [False, False, True]
    for stop in (1, 3):
        checkpoints, seen = Checkpoints(tmp_path / str(stop), "x"), []
        (tmp_path / str(stop)).mkdir()
        with Inline(job) as engine:
            if stop < 3:
                with pytest.raises(Stopped):
                    run(job, engine, checkpoints=checkpoints, watch=seen.append, should_stop=lambda: True)
            else:
                run(job, engine, checkpoints=checkpoints)  # done, but what came of it was not written
        with Inline(job) as engine:
            rest = run(job, engine, checkpoints=checkpoints)
        assert timeless(rest.lines) == timeless(whole.lines)


def test_scores_of_another_round_or_damaged_ones_are_not_believed(tmp_path, run_folder):
    folder, config, results = run_folder
    shutil.copy(folder / "cells" / cells(config)[0].name / FILE, tmp_path)
    lines = [{"round": 1}]
    attach(tmp_path, lines)
    assert lines == [{"round": 1}]
    lines = [{"round": 2}]
    attach(tmp_path, lines)
    assert lines[0]["clients"] == results[0]["lines"][-1]["clients"]
    (tmp_path / FILE).write_bytes(b"PK" + bytes(50))
    with pytest.raises(UserError, match=r"scores.npz is damaged"):
        attach(tmp_path, [{"round": 2}])
