"""From a federation with a budget per device to ONNX Runtime giving each client's reported accuracy."""

import json
from pathlib import Path

import pytest

from qupel.deploy.file import load
from qupel.deploy.predict import accuracy, open_model
from qupel.run import config, experiment, jobs

CONFIG = """
seeds = [3]
bits = "auto"
budget = ["22 KiB", "40 KiB", "56 KiB"]
rounds = 4
batch = 10
[split]
clients = 6
train_per_client = 20
[methods.QuPeL]
recipe = "qupel"
warmup = 0.5
finetune = 0.25
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    experiment.run_experiment(config.parse(CONFIG, "test"), out)
    return out


def test_files_fit_their_clients_budget_and_onnx_gives_the_reported_accuracy(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from qupel.cli import app

    monkeypatch.setenv("COLUMNS", "120")
    for to in ("packed", "onnx"):
        done = CliRunner().invoke(app, ["export", str(run), "--all", "--to", to, "--out", str(tmp_path / to)])
        assert to == "onnx" or done.exit_code == 0, done.output
    cfg = config.parse(CONFIG, "test")
    data = jobs.load_data("digits", None, None)
    parts = jobs.split_data(cfg, data, seed=3)
    told = json.loads((run / "cells/QuPeL-s3/result.json").read_text())["lines"][-1]["clients"]["test"]
    budgets = [22 * 1024, 40 * 1024, 56 * 1024]
    seen_plans = set()
    for i, part in enumerate(parts):
        packed = tmp_path / "packed" / f"client-{i:03d}.safetensors"
        assert packed.stat().st_size <= budgets[i % 3]
        seen_plans.add(tuple(layer.bits for layer in load(packed).layers))
        test = part.test(data)
        for file in (packed, tmp_path / "onnx" / f"client-{i:03d}.onnx"):
            assert accuracy(open_model(file), test.inputs, test.targets) == pytest.approx(told[i], abs=1e-12)
    assert len(seen_plans) == 3  # three budgets, three kinds of model


def test_a_budget_that_nothing_fits_is_refused_before_training(tmp_path: Path) -> None:
    from qupel.util.errors import UserError

    with pytest.raises(UserError, match="even 1 bit takes"):
        experiment.run_experiment(config.parse(CONFIG.replace("22 KiB", "2 KiB"), "test"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
