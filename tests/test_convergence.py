"""The theorems against runs, and the command `qupel theory`."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from qupel.paper.convergence.config import ProblemConfig, load
from qupel.paper.convergence.page import publish
from qupel.paper.convergence.problem import build
from qupel.paper.convergence.run import run_theorem1, run_theorem2
from qupel.paper.convergence.study import study, theorem1_row
from qupel.paper.theory import theorem2_bound, theorem2_sharp
from qupel.util.errors import UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SOFTMAX = ProblemConfig(P=3.0, lam=0.3, mu=0.1, center_bound=0.8, samples=60, features=4)
TANH = SOFTMAX.model_copy(update={"hidden": (4,), "points": 3})


@pytest.mark.parametrize("config", [SOFTMAX, TANH], ids=["softmax", "tanh"])
def test_algorithm_1_with_the_theorems_steps_decreases_and_stays_below_the_bound(config):
    m = run_theorem1(build(config), 300, "exact")
    row = theorem1_row(m, config.center_bound)
    assert row["increases"] == row["insufficient"] == 0
    assert row["constants_hold"]
    assert 0 < row["of_bound"] <= row["of_sharp"] <= 1
    assert m.objective[-1] < m.objective[0] - 0.1


@pytest.mark.parametrize(("rule", "lam", "rises"), [("first_order", 0.3, 1), ("paper", 0.12, 30)])
def test_the_first_order_step_and_the_printed_sign_break_the_decrease(rule, lam, rises):
    m = run_theorem1(build(SOFTMAX.model_copy(update={"lam": lam})), 300, rule)
    assert (m.increases > 0).sum() >= rises
    assert (m.missing > 0).sum() >= (m.increases > 0).sum()


def test_theorem_2_holds_and_kappa_grows_with_heterogeneity():
    config = SOFTMAX.model_copy(update={"samples": 20, "classes": 5, "lam": 0.02})
    found = []
    for share in (0.0, 0.5, 1.0):
        m = run_theorem2(build(config, [share] * 3), 64, 4, 0.5)
        kappa, fallen = float(m.kappa.max(0).mean()), m.objective[0] - m.objective[-1]
        assert m.average[-1] <= theorem2_sharp(m.steps, 64, fallen, kappa) <= theorem2_bound(m.steps, 64, fallen, kappa)
        assert m.slope_x <= m.steps.L_x
        assert m.slope_c <= m.steps.L_c
        found.append(kappa)
    assert found[0] < 1e-25  # the same data: the same models
    assert found[0] < found[1] < found[2]


def test_clients_share_what_is_not_their_own():
    config = SOFTMAX.model_copy(update={"classes": 3})
    a, b = (loss.batches[0] for loss in build(config, [0.25, 0.25]).losses)
    assert torch.equal(a[0][:45], b[0][:45])
    assert set(a[1][45:].tolist()) == {0}
    assert set(b[1][45:].tolist()) == {1}
    with pytest.raises(UserError, match="no class of its own"):
        build(config, [0.5] * 4)


# --- the command ---

TINY = """
theorem = {theorem}
steps = {steps}
{more}
P = 3.0
lam = 0.1
mu = 0.1
center_bound = 0.8
samples = 20
features = 3
"""


def qupel(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "qupel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_writes_table_numbers_and_pictures(tmp_path):
    config = tmp_path / "t.toml"
    config.write_text(TINY.format(theorem=1, steps=20, more="[problems.softmax]"))
    done = qupel("theory", config, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"theorem.{s}" for s in ("json", "md", "png", "svg")}
    told = json.loads((tmp_path / "out" / "theorem.json").read_text())
    assert [r["rule"] for r in told["rows"]] == ["exact", "first_order", "paper"]
    assert told["rows"][0]["increases"] == 0
    assert (tmp_path / "out" / "theorem.png").read_bytes()[:4] == b"\x89PNG"
    done = qupel("theory", config, "--out", tmp_path / "out", "--publish", tmp_path / "docs")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "docs").iterdir()} == {"theory.md", "theory1.json", "theory1.png"}
    page = (tmp_path / "docs" / "theory.md").read_text()
    assert (tmp_path / "out" / "theorem.md").read_text() in page
    assert f"qupel theory {config} --out {tmp_path / 'out'}" in page
    assert "(theory1.png)" in page


def test_a_study_of_theorem_2(tmp_path):
    config = tmp_path / "t.toml"
    config.write_text(
        TINY.format(
            theorem=2, steps="[4, 16]", more="lambda_p = 0.5\ntau = 2\nclients = 2\nshares = [0.0, 1.0]\n[problem]"
        )
    )
    head, body = study(load(config), tmp_path / "out")
    assert len(body) == 2
    assert len(body[0]) == len(head)
    assert (tmp_path / "out" / "theorem.svg").exists()
    publish(tmp_path / "out", tmp_path / "docs", "qupel theory t.toml")
    assert "## Theorem 2" in (tmp_path / "docs" / "theory.md").read_text()
    with pytest.raises(UserError, match="no finished run"):
        publish(tmp_path, tmp_path / "docs", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("theorem = 3", "allowed are 1 and 2"),
        (TINY.format(theorem=1, steps=20, more="[problems.a]") + "speed = 1", "unknown key 'speed'"),
        (TINY.format(theorem=1, steps=20, more="[problems.a]").replace("P = 3.0", "P = inf"), "P"),
        (TINY.format(theorem=2, steps="[4, 8]", more="lambda_p = 0.5\ntau = 4\n[problem]"), "sqrt"),
    ],
)
def test_what_the_command_refuses(tmp_path, text, message):
    config = tmp_path / "t.toml"
    config.write_text(text)
    with pytest.raises(UserError, match=message):
        study(load(config), tmp_path / "out")


@pytest.mark.slow
def test_theorem_1_as_published(tmp_path):
    """10,000 steps: F never rises, the average of |G|^2 is below the bound at every T and falls like 1/T."""
    study(load(EXPERIMENTS / "theory1.toml"), tmp_path)
    for row in json.loads((tmp_path / "theorem.json").read_text())["rows"]:
        if row["rule"] == "exact":
            assert (row["increases"], row["insufficient"], row["constants_hold"]) == (0, 0, True)
            assert row["of_bound"] <= row["of_sharp"] <= 1
            assert row["slope"] <= -0.9999  # an average of squares cannot fall faster than 1/T
        else:
            assert row["increases"] > 0


@pytest.mark.slow
def test_theorem_2_as_published(tmp_path):
    study(load(EXPERIMENTS / "theory2.toml"), tmp_path)
    rows = json.loads((tmp_path / "theorem.json").read_text())["rows"]
    for row in rows:
        assert row["constants_hold"]
        assert all(a <= s <= b for a, s, b in zip(row["average"], row["sharp"], row["bound"], strict=True))
        assert row["slope"] <= -0.5
    assert all(a["floor"] < b["floor"] and a["kappa"][-1] < b["kappa"][-1] for a, b in pairwise(rows))
    assert np.log(rows[-1]["floor"] / rows[-1]["kappa"][-1]) < np.log(10)
