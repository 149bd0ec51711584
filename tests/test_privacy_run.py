"""Privacy on the command line: a target finds the noise; metrics, terminal, summary and report say what was spent."""

import json
import sys

import pytest

from qupel import cli

pytest.importorskip("dp_accounting")

CONFIG = """
rounds = 4
local_steps = 1
batch = 5
evaluate_every = 2
bits = 2
[model]
name = "mlp"
args = {hidden = [8, 8]}
[split]
clients = 3
train_per_client = 8
test_per_client = 4
[methods.QuPeL]
method = "fedavg"
"""


@pytest.fixture
def qupel(capsys, monkeypatch):
    """The command line, in this process: exit code, and what it says."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qupel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, " ".join((said.out + said.err).split())

    return run


def test_a_target_finds_the_noise_and_everything_says_what_was_spent(tmp_path, qupel):
    (tmp_path / "c.toml").write_text(CONFIG)
    out = tmp_path / "run"
    options = ("--target-epsilon", 8, "--delta", "1e-5", "--out", out, "--workers", 1)
    code, said = qupel("run", tmp_path / "c.toml", *options)
    assert code == 0, said
    lines = [json.loads(text) for text in (out / "cells/QuPeL-s0/metrics.jsonl").read_text().splitlines()]
    spent = [line["privacy"]["epsilon"] for line in lines]
    assert spent[0] < spent[1]
    assert 7.95 < spent[1] <= 8
    words = f"epsilon {spent[1]:.3g} at delta 1e-05"
    assert f"epsilon {spent[0]:.3g}, delta 1e-05" in said  # after round 2
    assert words in said
    assert words in (out / "summary.md").read_text()
    assert qupel("report", out)[0] == 0
    assert words in (out / "report/index.html").read_text()


def test_a_budget_that_is_spent_is_one_line(tmp_path, qupel):
    """A second run on the same clients, counted in the same file."""
    (tmp_path / "c.toml").write_text(CONFIG)
    given = ["--target-epsilon", 8, "--set", f'privacy.ledger="{tmp_path}/all.json"', "--workers", 1]
    assert qupel("run", tmp_path / "c.toml", "--out", tmp_path / "a", *given)[0] == 0
    before = (tmp_path / "all.json").read_text()
    code, said = qupel("run", tmp_path / "c.toml", "--out", tmp_path / "b", *given)
    assert code == 2
    assert "target_epsilon is 8: give more noise, or fewer rounds" in said
    assert "Traceback" not in said
    assert (tmp_path / "all.json").read_text() == before
