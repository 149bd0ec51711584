"""`qupel new DIR`, `qupel --version`, shell completion: what a newcomer meets first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import qupel
from qupel.run.project import FILES, write_project
from qupel.util.errors import UserError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(qupel.__file__).parents[1])}


def python(*arguments, cwd, **more):
    given = [sys.executable, *map(str, arguments)]
    return subprocess.run(given, cwd=cwd, env={**ENVIRONMENT, **more}, capture_output=True, text=True, check=False)


def test_a_new_project_passes_its_own_test_and_runs(tmp_path):
    made = python("-m", "qupel", "new", "mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert {path.name for path in (tmp_path / "mine").iterdir()} == set(FILES)
    tested = python("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", cwd=tmp_path / "mine")
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
    short = ("--set", "seeds=[0]", "--set", "rounds=5", "--workers", 1, "--out", tmp_path / "run")
    ran = python("-m", "qupel", "run", "mine/federation.toml", *short, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "run/cells/QuPeL-s0/models").iterdir())) == 6


def test_a_project_says_what_flower_needs():
    named = {name.removesuffix(".py") for name in FILES if name.startswith("my_")}
    for module in named - {"my_data"}:  # data are the client's own business
        assert f'"{module}"' in FILES["README.md"]
        assert f'"{module}:' in FILES["federation.toml"]


def test_a_folder_with_something_in_it_is_left_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UserError, match="is not an empty folder"):
            write_project(place)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_version(tmp_path):
    done = python("-m", "qupel", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"qupel {qupel.__version__}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands(tmp_path, shell):
    """The script that the shell gets, and what the program answers to it."""
    words = "qupel flo"
    asked = {"_QUPEL_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['qupel']; from qupel.cli import main; main()"
    answer = python("-c", program, cwd=tmp_path, **asked, _TYPER_COMPLETE_ARGS=words)
    assert "flower" in answer.stdout, answer.stderr
    assert "report" not in answer.stdout
    script = python("-c", program, cwd=tmp_path, _QUPEL_COMPLETE=f"source_{shell}")
    assert "_QUPEL_COMPLETE=complete_" in script.stdout


@pytest.mark.slow
def test_a_new_project_runs_on_flower_as_it_is(tmp_path):
    """Its README's commands, with two clients: own network, data and metric, with nothing edited."""
    pytest.importorskip("flwr")
    write_project(folder := tmp_path / "mine")

    def flower(*arguments):
        done = python("-m", "qupel", "flower", *arguments, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert 'allow = ["my_metrics", "my_nets"]' in flower("init", "fleet", "--clients", 2, "--config", "federation.toml")
    try:
        flower("up", "fleet")
        short = ("--set", "rounds=5", "--set", "methods.QuPeL.warmup=0.4")
        flower("run", "fleet", "federation.toml", "--cell", "QuPeL-s0", "--name", "first", *short)
    finally:
        ended = flower("down", "fleet")
    assert "superlink" in ended
    last = json.loads((folder / "fleet/runs/first/metrics.jsonl").read_text().splitlines()[-1])
    assert last["test"] > 0.4  # by chance a third
    assert len(last["clients"]["my_metrics:worst_class"]) == 2
    assert len(list((folder / "fleet/clients").glob("*/state/*/model.safetensors"))) == 2
