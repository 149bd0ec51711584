"""One config with a network, a loss and a metric of one's own, experiments/emg_own, on every engine: the same bits, and
ONNX files that have their clients' scores. On EMG recordings where QUPEL_DATA has them, else on signals like them."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flower_bench import final_w
from flower_fleet import exported, fleets, job_of, local, qupel
from qupel.cli import app
from qupel.engine import group as groups
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from tiny import saved_rows, timeless

OWN = Path(__file__).parents[1] / "experiments" / "emg_own"
CLASSES = 7
SHORT = ["data.args.people=3", "rounds=5", "local_steps=4", "evaluate_every=5"]


def signals(path: Path, owners: int = 6) -> None:
    """A file like EMG's: gestures one after another, a tone of its own for each, which each person makes faster."""
    rng, arrays = np.random.default_rng(0), {"classes": np.int64(CLASSES)}
    for split, windows in (("train", 9), ("test", 6)):
        targets = np.tile(np.repeat(np.arange(CLASSES), windows), owners)
        people = np.repeat(np.arange(owners), CLASSES * windows)
        speed = 0.1 * (1 + targets) * (1 + people / 20)  # (n,)
        tone = np.sin(speed[:, None, None] * np.arange(52) + np.arange(8)[:, None])  # (n, 8, 52)
        inputs = tone + rng.normal(0, 0.5, tone.shape)
        named = {"inputs": inputs.astype(np.float16), "targets": targets, "groups": people}
        arrays |= {f"{split}_{name}": value for name, value in named.items()}
    path.parent.mkdir(parents=True)
    np.savez(path, **arrays)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The folder with the config, copied; the recordings; nothing of it stays loaded."""
    folder = tmp_path / "project"
    shutil.copytree(OWN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if not Path(os.environ.get("QUPEL_DATA", ""), "emg/emg.npz").is_file():
        signals(tmp_path / "data" / "emg" / "emg.npz")
        monkeypatch.setenv("QUPEL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    names = [path.stem for path in folder.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield folder
    for name in names:
        sys.modules.pop(name, None)


def left(run: Path) -> dict[str, bytes]:
    """w and every client's model, as they are in files."""
    cell = run / "cells" / "QuPeL-s0"
    return {path.name: path.read_bytes() for path in (cell / "w.safetensors", *sorted((cell / "models").iterdir()))}


def export(source: Path, target: Path, *more: str) -> None:
    done = CliRunner().invoke(app, ["export", str(source), "--to", "onnx", "--out", str(target), *more])
    assert done.exit_code == 0, done.output


def reproduces(files: Path, line: dict) -> None:
    """Each client's ONNX file has, in ONNX Runtime, the scores that its client has reported."""
    from compare_onnx import scores  # beside the config

    told = line["clients"]
    found = scores(files, len(told["test"]))
    assert found == {name: told[name] for name in ("test", "my_metrics:lateness")}


def test_one_config_on_one_process_two_workers_and_two_ranks(project, tmp_path):
    pytest.importorskip("onnxruntime")
    config = configs.load(project / "federation.toml", SHORT)
    ways = {"one": {}, "workers": {"workers": 2}, "ranks": {"workers": 2, "start": groups.start}}
    results = {name: run_experiment(config, tmp_path / name, **way)[0]["lines"] for name, way in ways.items()}
    files = left(tmp_path / "one")
    assert len(files) == 1 + 3
    assert left(tmp_path / "workers") == left(tmp_path / "ranks") == files
    assert timeless(results["workers"]) == timeless(results["ranks"]) == timeless(results["one"])
    last = results["one"][-1]
    assert last["test"] > 1.5 / CLASSES
    assert last["over_clients"]["my_metrics:lateness"]["higher"] is False
    export(tmp_path / "one", tmp_path / "onnx", "--all")
    reproduces(tmp_path / "onnx", last)


@pytest.mark.slow
def test_six_people_on_flower_end_with_these_bits(project, tmp_path):
    """TLS, keys, six SuperNodes: final w, every person's state and model file, every line with the own metric as on one
    process, two workers and two ranks; and ONNX files of the models on the clients' disks have their scores."""
    pytest.importorskip("flwr")
    with fleets(project) as start:
        federation, path = start(6, (project / "federation.toml").read_text())
        qupel("run", federation.folder, path, "--name", "r")
    config = configs.load(path, ["data.args.people=6"])
    w, files, rows, lines = local(config, tmp_path / "one")
    for name, way in (("workers", {}), ("ranks", {"start": groups.start})):
        (result,) = run_experiment(config, tmp_path / name, workers=2, **way)
        assert left(tmp_path / name) == left(tmp_path / "one")
        assert timeless(result["lines"]) == timeless(lines)
    target, job = federation.folder / "runs" / "r", job_of(federation, "r")
    assert torch.equal(final_w(target), w)
    assert exported(federation, job) == files
    told = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    same = {"seconds": 0, "weights": None}  # centers stay with their client
    assert [{**line, **same} for line in told] == [{**line, **same} for line in lines]
    for i in range(6):
        state = federation.client(i) / "state" / job
        assert list(saved_rows(state / f"round-{config.rounds - 1:06}").values()) == [rows[i]]
        export(state / "model.safetensors", tmp_path / f"{i}", "--model", "my_nets:HarNet")
        (tmp_path / f"{i}" / "model.onnx").rename(tmp_path / f"client-{i:03}.onnx")
    reproduces(tmp_path, told[-1])
