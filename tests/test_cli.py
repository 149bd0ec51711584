"""The command line: lists, tables that fit 80 columns, one line and exit code 2 for what the user can mend."""

import json
import os
import stat
import subprocess
import sys
import warnings

import numpy as np
import pytest
from rich.console import Console

from qupel.data.sources import NPZ
from qupel.data.sources import datasets as DATASETS
from qupel.parts.codecs import codecs
from qupel.parts.methods import methods
from qupel.parts.quantizers import quantizers
from qupel.parts.servers import servers
from qupel.run.recipes import recipes
from qupel.tasks.zoo import networks

with warnings.catch_warnings():  # typer imports names that its dependency click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from qupel import cli

CONFIG = """
rounds = 4
local_steps = 2
batch = 5
evaluate_every = 2
[model]
name = "mlp"
[split]
clients = 3
train_per_client = 8
test_per_client = 4
[settings]
warmup = 0.25
finetune = 0.25
[methods.QuPeL]
recipe = "qupel"
[methods.Local]
recipe = "local"
"""


@pytest.fixture
def qupel(tmp_path, monkeypatch, capsys):
    """Run a command in this process, in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["qupel", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


# --- lists ---


def test_parts_are_listed_by_kind(qupel):
    """Each with what it is, in the words of its own file, however wide the terminal."""
    code, out, err = qupel("methods")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    blocks = [block.splitlines() for block in out.split("\n\n")]
    assert [block[0] for block in blocks] == ["recipes", "methods", "quantizers", "servers", "codecs"]
    for (_, *lines), kind in zip(blocks, (recipes, methods, quantizers, servers, codecs), strict=True):
        assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(kind)
        said = " ".join(" ".join(lines).split())
        for name, entry in kind.all().items():
            assert " ".join(f"{name} {entry.about} {entry.paper}".split()) in said


@pytest.mark.parametrize(("command", "names"), [("datasets", (*DATASETS, NPZ)), ("models", networks)])
def test_lists_have_one_line_each(qupel, command, names):
    code, out, err = qupel(command)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(names)
    assert all(len(line) <= 80 and len(line.split()) > 2 for line in out.splitlines())


def test_split_shows_who_has_what(qupel, tmp_path):
    code, out, err = qupel("split", "c.toml", "--picture", "p.svg", "--seed", "3")
    assert (code, err) == (0, "")
    numbers = [line.replace("│", " ").replace("·", "0").split() for line in out.splitlines() if "·" in line]
    assert [int(row[0]) for row in numbers] == [0, 1, 2]
    for row in numbers:
        counts = [int(v) for v in row[1:11]]
        assert sum(v > 0 for v in counts) == 4  # classes a client
        assert sum(counts) == int(row[11]) == 8
        assert int(row[13]) == 4


def test_split_of_the_papers_sizes_fits_80_columns(qupel):
    """Four digits a number; where classes are many, how many of them a client has."""
    for classes, words in ((10, 14), (40, 5)):
        y = np.arange(40_000) % classes
        x = np.zeros((len(y), 1), np.float32)
        np.savez(f"{classes}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        how = (f"data.name={classes}.npz", "split.kind=iid", "split.clients=8", "split.train_per_client=5000")
        code, out, err = qupel("split", "c.toml", *(word for each in how for word in ("--set", each)))
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out
        rows = [line.split() for line in out.splitlines() if line.strip()][-8:]
        assert [(len(row), row[-3]) for row in rows] == [(words, "5000")] * 8


# --- runs ---


def test_run_ends_with_its_table_and_keeps_everything(qupel, tmp_path):
    code, out, err = qupel("run", "c.toml", "--out", "r", "--workers", "1", "--set", "seeds=[0, 1]")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    table = [line.split() for line in out.splitlines() if line.startswith((" QuPeL ", " Local ")) or "QuPeL  " in line]
    assert {row[0] for row in table} >= {"QuPeL", "Local"}
    assert "QuPeL ends" in out
    cells = tmp_path / "r" / "cells"
    assert sorted(p.name for p in cells.iterdir()) == ["Local-s0", "Local-s1", "QuPeL-s0", "QuPeL-s1"]
    for cell in cells.iterdir():
        files = sorted(str(p.relative_to(cell)) for p in cell.rglob("*") if p.is_file())
        models = [f"models/client-00{i}.safetensors" for i in range(3)]
        assert files == ["engine.json", "metrics.jsonl", *models, "result.json", "w.safetensors"]
        lines = [json.loads(text) for text in (cell / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((cell / "result.json").read_text())
        assert lines == result["lines"]
        assert result["files"] == [(cell / name).stat().st_size for name in models]
        assert lines[-1]["round"] == 4
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert [row["label"] for row in summary] == ["QuPeL", "Local"]
    assert summary[1]["file_bytes"] == pytest.approx(np.mean(result["files"]), rel=0.01)
    assert (tmp_path / "r" / "summary.md").read_text().startswith("| method |")
    assert "t-test over seeds" in (tmp_path / "r" / "summary.md").read_text()


def test_finished_cells_never_run_twice(qupel, tmp_path):
    assert qupel("run", "c.toml", "--out", "r", "--workers", "1")[0] == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "r" / "cells").rglob("*") if p.is_file()}
    code, out, _ = qupel("run", "c.toml", "--out", "r", "--workers", "1", "--resume")
    assert code == 0
    assert "round" not in out.split("mean ± std")[0].replace("last round", "")
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_train_ends_with_its_table(qupel):
    code, out, err = qupel("train", "--out", "r", "--set", "rounds=4", "--set", "model.name=mlp", "--workers", "1")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for word in ("learned centers", "full precision", "k-means afterwards", "float", "deployed", "file"):
        assert word in out, word


def test_a_narrow_terminal_breaks_no_table(qupel, tmp_path, monkeypatch):
    """80 columns and a label that is too long: the label wraps, no number is cut."""
    monkeypatch.setattr(cli, "out", Console(width=80))
    label = "A rather long name of a method"
    (tmp_path / "c.toml").write_text(CONFIG + f'[methods."{label}"]\nrecipe = "fedavg"\n')
    code, out, err = qupel("run", "c.toml", "--out", "r", "--workers", "1", "--set", "split.validation=0.2")
    assert (code, err) == (0, "")
    table = out.split("mean ± std")[1].splitlines()
    assert max(map(len, table)) <= 80
    assert "…" not in out
    assert sum("kB" in line for line in table) == 3


# --- what the user can mend ---


def refused(result, tmp_path, *words):
    code, _, err = result
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nothing=1", ["nothing", "unknown key"]),
        ("bits=0", ["bits"]),
        ("bits=9", ["bits = 9", "1 to 8"]),
        ("methods.QuPeL.bits=16", ["bits = 16"]),
        ('model.layers=["conv9"]', ["conv9", "3.weight"]),
        ("model.name=resnet999", ["resnet999", "resnet20"]),
        ("model.name=cnn5", ["32x32", "(1, 8, 8)"]),
        ("data.name=imagenet", ["imagenet", "digits"]),
        ("data.name=none.npz", ["none.npz"]),
        ("model.start=none.safetensors", ["none.safetensors"]),
        ("split.clients=100000", ["100000 clients"]),
        ("split.kind=groups", ["group"]),
        ("split.classes=11", ["11"]),
        ("seeds=[-1]", ["-1"]),
        ("seeds=[1, 1]", ["seeds"]),
        ("settings.personal=0.9", ["personal"]),
        ("methods.QuPeL.recipe=magic", ["magic", "qupel"]),
        ("rounds=many", ["rounds", "many"]),
        ("rounds", ["key=value"]),
    ],
)
def test_a_bad_setting_is_one_line_and_leaves_nothing(qupel, tmp_path, override, words):
    refused(qupel("run", "c.toml", "--out", "r", "--workers", "1", "--set", override), tmp_path, *words)


def test_a_config_that_is_none(qupel, tmp_path):
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    refused(qupel("run", "bad.toml", "--out", "r"), tmp_path, "bad.toml", "not TOML")
    refused(qupel("train", "none.toml", "--out", "r"), tmp_path, "none.toml", "No such file")
    refused(qupel("split", "bad.toml"), tmp_path, "not TOML")
    refused(qupel("run", "bad.toml", "--out", "r", "--engine", "ranks"), tmp_path, "not TOML")


def test_a_rank_that_cannot_know_where_to_go_says_so(qupel, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    refused(qupel("run", "c.toml", "--out", "r"), tmp_path, "rank 0 of 2 cannot meet the others", "MASTER_ADDR")


def npz(path, *, inputs=None, targets=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32) if inputs is None else inputs
    y = np.arange(60) % 3 if targets is None else targets
    np.savez(path, train_inputs=x, train_targets=y, test_inputs=x[:30], test_targets=np.arange(30) % 3)


def test_bad_data(qupel, tmp_path):
    run = ("run", "c.toml", "--out", "r", "--workers", "1", "--set", "split.classes=2", "--set")
    npz(tmp_path / "good.npz")
    code, _, err = qupel(*run, "data.name=good.npz", "--set", "rounds=2")
    assert (code, err) == (0, "")
    (tmp_path / "r").rename(tmp_path / "fine")
    values = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    values[7, 2] = np.nan
    npz(tmp_path / "nan.npz", inputs=values)
    refused(qupel(*run, "data.name=nan.npz"), tmp_path, "nan.npz")
    npz(tmp_path / "labels.npz", targets=np.arange(60) % 3 - 1)
    refused(qupel(*run, "data.name=labels.npz"), tmp_path, "label")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not really")
    refused(qupel(*run, "data.name=broken.npz"), tmp_path, "broken.npz")
    (tmp_path / "empty").mkdir()
    mnist = ("run", "c.toml", "--out", "r", "--set", "data.name=mnist", "--data")
    refused(qupel(*mnist, "empty"), tmp_path, "mnist")
    folder = tmp_path / "corrupt" / "mnist"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}-00000-of-00001.parquet").write_bytes(b"PAR1 but no more")
    refused(qupel(*mnist, "corrupt"), tmp_path, "parquet")


def test_folders_that_cannot_be_used(qupel, tmp_path):
    run = ("run", "c.toml", "--workers", "1", "--set", "rounds=2", "--out")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("mine")
    code, _, err = qupel(*run, "r")
    assert code == 2
    assert "not empty" in err
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    code, _, err = qupel(*run, "file")
    assert (code, err.count("\n")) == (2, 1)
    assert qupel(*run, "done")[0] == 0
    code, _, err = qupel(*run, "done")
    assert code == 2
    assert "--resume" in err
    code, _, err = qupel(*run, "done", "--resume", "--set", "batch=4")
    assert code == 2
    assert "another config" in err
    code, _, err = qupel("run", "c.toml", "--resume")
    assert code == 2
    assert "--out" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(qupel, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        code, _, err = qupel("run", "c.toml", "--workers", "1", "--out", "locked/r")
    finally:
        locked.chmod(stat.S_IRWXU)
    assert (code, err.count("\n")) == (2, 1)
    assert "Permission denied" in err


def test_a_wrong_option_is_refused(qupel):
    code, _, err = qupel("run", "--nonsense")
    assert code == 2
    assert "--nonsense" in err
    assert qupel("run", "--workers", "0")[0] == 2


def test_a_real_process_exits_with_2_and_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "qupel", "run", "none.toml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: cannot read none.toml: No such file or directory\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


# --- what goes wrong while running ---

DIVERGES = """
local_steps = 2
batch = 5
evaluate_every = 1
[model]
name = "mlp"
[split]
clients = 2
train_per_client = 8
test_per_client = 4
[[methods.M.phases]]
rounds = 2
method = "local"
[[methods.M.phases]]
rounds = 2
method = "local"
eta1 = 1e30
"""


def test_a_loss_that_turns_nan_stops_the_run_with_a_hint_and_its_checkpoint(qupel, tmp_path):
    (tmp_path / "d.toml").write_text(DIVERGES)
    code, _, err = qupel("run", "d.toml", "--out", "r", "--workers", "1")
    assert code == 1
    assert err.startswith("error: client 0: round 3, step 1: the loss is ")
    assert "layer '" in err
    assert "try a smaller eta1" in err
    assert err.count("\n") == 1
    cell = tmp_path / "r" / "cells" / "M-s0"
    assert sorted(p.name for p in (cell / "checkpoints").glob("round-*")) == ["round-000001", "round-000002"]
    assert len((cell / "metrics.jsonl").read_text().splitlines()) == 2
    again = qupel("run", "d.toml", "--out", "r", "--workers", "1", "--resume")
    assert again[0] == 1
    assert again[2] == err


def test_refusals_are_said_as_they_happen(qupel, tmp_path):
    """One client's data make its loss infinite; the others go on."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 4)).astype(np.float32)
    groups = np.repeat([0, 1, 2], 20)
    inputs[groups == 1] = 1e38
    targets = np.arange(60) % 3
    np.savez(
        tmp_path / "g.npz", train_inputs=inputs, train_targets=targets, train_groups=groups,
        test_inputs=inputs, test_targets=targets, test_groups=groups,
    )  # fmt: skip
    settings = ("--set", "data.name=g.npz", "--set", "split={kind='groups'}")
    code, _, err = qupel("run", "c.toml", "--out", "r", "--workers", "1", *settings)
    assert code == 0, err
    assert "round 1: refused client 1: round 1, step 1: the loss is" in err
    assert "client 0" not in err
    stop = qupel("run", "c.toml", "--out", "s", "--workers", "1", *settings, "--set", "on_bad_upload=stop")
    assert stop[0] == 1
    assert stop[2].startswith("error: client 1: round 1")


def test_a_full_disk_is_one_line_and_nothing_is_half_written(qupel, tmp_path, monkeypatch):
    """The disk fills up at the n-th flush; afterwards there is room again and the run goes on to the same end."""
    assert qupel("run", "c.toml", "--out", "whole", "--workers", "1")[0] == 0
    real, left = os.fsync, 0

    def full(handle):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        real(handle)

    failures = 0
    for room in (0, 3, 9, 14, 30):
        left = room
        monkeypatch.setattr(os, "fsync", full)
        resume = ["--resume"] if (tmp_path / "r" / "config.json").exists() else []
        code, _, err = qupel("run", "c.toml", "--out", "r", "--workers", "1", *resume)
        monkeypatch.setattr(os, "fsync", real)
        failures += code != 0
        assert (code, err.count("\n")) in {(2, 1), (0, 0)}
        assert code == 0 or "No space left on device" in err
        for file in (tmp_path / "r").rglob("*.json"):
            json.loads(file.read_text())
        assert not list((tmp_path / "r").rglob("*.tmp"))
    assert failures >= 4
    assert qupel("run", "c.toml", "--out", "r", "--workers", "1", "--resume")[0] == 0
    for name in ("QuPeL-s0", "Local-s0"):
        for i in range(3):
            file = f"cells/{name}/models/client-00{i}.safetensors"
            assert (tmp_path / "r" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
