"""Finished cells kept as small files: a new run takes them over, trains nothing again and says the same."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qupel.cli import app
from qupel.report import leaderboard
from qupel.report.write import write_report
from qupel.run import compare, config
from qupel.run.comparing import How, run_comparison
from qupel.run.experiment import run_experiment
from qupel.run.folder import is_done, read_config
from qupel.run.jobs import cells
from qupel.run.kept import keep
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_sealed

RUN = """
seeds = [0, 1]
bits = 2
rounds = 4
local_steps = 2
batch = 10
evaluate_every = 1
split = {clients = 3, classes = 4, train_per_client = 40, test_per_client = 40, unseen = 1}
model = {name = "mlp"}
[methods.QuPeL]
recipe = "qupel-prox"
[methods.FedAvg]
recipe = "fedavg"
[methods."FedAvg, then 2 bits"]
of = "FedAvg"
bits = 2
"""
COMPARISON = """
seeds = [0]
bits = [32, 2]
[search]
trials = 2
settings = {eta1 = [0.1, 1e30]}
[federations.digits]
rounds = 3
local_steps = 2
batch = 10
split = {clients = 3, classes = 4, train_per_client = 40, test_per_client = 40}
model = {name = "mlp"}
[methods.ditto]
method = "ditto"
afterwards = "kmeans"
[methods.local]
method = "local"
bits = [32]
"""


def parsed(text: str = RUN) -> config.Config:
    return config.parse(text, "test")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    run_experiment(parsed(), out)
    return out


@pytest.fixture
def kept(finished, tmp_path) -> Path:
    assert keep(finished, tmp_path / "kept") == 6
    return tmp_path / "kept"


def trained(out: Path) -> set[str]:
    """The cells of a run that were trained there, or made of such: what is kept has neither log nor model."""
    left = [*out.rglob("cells/*/metrics.jsonl"), *out.rglob("cells/*/models/*")]
    return {path.relative_to(out).parts[path.relative_to(out).parts.index("cells") + 1] for path in left}


def texts(out: Path) -> list[str]:
    return [(out / name).read_text() for name in ("summary.json", "summary.md")]


def test_a_new_run_has_all_that_was_kept(finished, kept, tmp_path):
    told = []
    run_experiment(parsed(), tmp_path / "new", reuse=[tmp_path], watch=lambda cell, progress: told.append(cell))
    assert told == []
    assert trained(tmp_path / "new") == set()
    assert texts(tmp_path / "new") == texts(finished)
    for cell in cells(parsed()):
        for run in (kept, tmp_path / "new"):
            assert is_done(run, cell)  # checksums hold
            (before, now) = (read_json(f / "cells" / cell.name / "result.json") for f in (finished, run))
            assert now["lines"][-1] == before["lines"][-1]
            assert [line["test"] for line in now["lines"]] == [line["test"] for line in before["lines"]]
            assert "taken_from" not in now
    assert keep(tmp_path / "new", tmp_path / "twice") == 6
    assert files(tmp_path / "twice") == files(kept)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_kept_is_small_and_enough_for_a_report(finished, kept, tmp_path):
    assert {p.name for p in kept.rglob("*") if p.is_file()} == {"config.json", "identity.json", "result.json"}
    for path in kept.rglob("result.json"):
        assert ["clients" in line for line in read_json(path)["lines"]] == [False, False, False, True]
    pages = [write_report([run], tmp_path / f"report-{k}").parent for k, run in enumerate((finished, kept))]
    tables = list(pages[0].rglob("*.csv"))
    assert tables
    for path in tables:
        assert (pages[1] / path.relative_to(pages[0])).read_text() == path.read_text()


def test_runs_with_settings_that_are_no_more_are_read(finished, kept):
    """Only those: what nobody ever knew is refused, as in a config."""
    raw = read_json(kept / "config.json")
    for name, told in (("fails", None), ("never_was", "unknown key 'never_was'")):
        write_sealed(kept / "config.json", {**raw, "methods": {k: {**m, name: 0.8} for k, m in raw["methods"].items()}})
        if told is None:
            assert read_config(kept) == read_config(finished)
        else:
            with pytest.raises(UserError, match=told):
                read_config(kept)
    with pytest.raises(UserError, match="fails"):
        config.parse(RUN + "fails = 0.8\n", "test")


def test_a_kept_cell_that_is_damaged_is_trained(finished, kept, tmp_path, capsys):
    path = kept / "cells" / "QuPeL-s1" / "result.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed":  1').replace('"test": 0.', '"test": 0.1', 1))
    run_experiment(parsed(), tmp_path / "new", reuse=[kept])
    assert "QuPeL-s1/result.json is damaged" in capsys.readouterr().err
    assert trained(tmp_path / "new") == {"QuPeL-s1"}


def test_scores_beside_a_kept_cell_are_checked(kept, tmp_path, capsys):
    folder = kept / "cells" / "QuPeL-s0"
    (folder / "scores.npz").write_bytes(b"a")
    result = read_json(folder / "result.json")
    write_sealed(folder / "result.json", {**result, "checksums": {"scores.npz": "0" * 64}})
    run_experiment(parsed(), tmp_path / "new", reuse=[kept], wanted=lambda cell: cell.label == "QuPeL")
    assert "scores.npz is damaged: its checksum is wrong; QuPeL-s0 is not taken over" in capsys.readouterr().err
    assert trained(tmp_path / "new") == {"QuPeL-s0"}


def test_what_is_kept_grows_and_is_never_mixed(kept, tmp_path):
    before = files(kept)
    less = RUN.replace("seeds = [0, 1]", "seeds = [0]").replace(
        'recipe = "qupel-prox"', 'recipe = "qupel-prox"\n[methods.Local]\nrecipe = "local"'
    )
    less = less[: less.index("[methods.FedAvg]")]
    run_experiment(parsed(less), tmp_path / "part", reuse=[kept])
    keep(tmp_path / "part", kept)
    told = read_json(kept / "config.json")
    assert (told["seeds"], set(told["methods"])) == ([0, 1], {"QuPeL", "Local", "FedAvg", "FedAvg, then 2 bits"})
    after = files(kept)
    assert set(after) - set(before) == {"cells/Local-s0/result.json"}
    assert {name for name in before if after[name] != before[name]} == {"config.json"}
    run_experiment(parsed(RUN.replace("rounds = 4", "rounds = 3")), tmp_path / "short")
    with pytest.raises(UserError, match="made with other settings"):
        keep(tmp_path / "short", kept)
    assert files(kept) == after


@pytest.mark.parametrize(
    "change", [("rounds = 4", "rounds = 3"), ("batch = 10", "batch = 9"), ("bits = 2\nr", "bits = 3\nr")]
)
def test_other_settings_are_another_cell(kept, tmp_path, change):
    assert change[0] in RUN
    run_experiment(parsed(RUN.replace(*change)), tmp_path / "new", reuse=[kept], wanted=lambda c: c.name == "QuPeL-s0")
    assert "QuPeL-s0" in trained(tmp_path / "new")


def test_other_data_of_the_same_name_are_another_cell(kept, tmp_path):
    path = kept / "cells" / "QuPeL-s0" / "result.json"
    write_sealed(path, {**read_json(path), "data_identity": "other"})
    run_experiment(parsed(), tmp_path / "new", reuse=[kept])
    assert trained(tmp_path / "new") == {"QuPeL-s0"}


def test_other_versions_are_said(kept, tmp_path, capsys):
    for path in kept.rglob("QuPeL-*/result.json"):
        result = read_json(path)
        write_sealed(path, {**result, "machine": {**result["machine"], "torch": "1.0"}})
    run_experiment(parsed(), tmp_path / "new", reuse=[kept])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: 2 cells taken over were made with qupel")
    assert "torch 1.0" in line.split(";")[0]
    assert trained(tmp_path / "new") == set()


def test_a_cell_is_trained_again_for_one_that_is_made_of_its_models(finished, kept, tmp_path, capsys):
    shutil.rmtree(kept / "cells" / "FedAvg-then-2-bits-s1")
    run_experiment(parsed(), tmp_path / "new", reuse=[kept])
    assert "FedAvg-s1 is trained again" in capsys.readouterr().err
    assert trained(tmp_path / "new") == {"FedAvg-s1", "FedAvg-then-2-bits-s1"}
    told, before = (json.loads((run / "summary.json").read_text()) for run in (tmp_path / "new", finished))
    assert [row["mean"] for row in told] == [row["mean"] for row in before]


def test_commands(finished, tmp_path):
    file, run = tmp_path / "c.toml", CliRunner().invoke
    file.write_text(RUN)
    assert run(app, ["keep", str(finished), str(tmp_path / "kept")]).output.startswith("6 cells are in ")
    told = run(app, ["run", str(file), "--out", str(tmp_path / "new"), "--reuse", str(tmp_path / "kept")])
    assert told.exit_code == 0, told.output
    assert trained(tmp_path / "new") == set()
    told = run(app, ["run", str(file), "--out", str(tmp_path / "other"), "--reuse", str(tmp_path / "nowhere")])
    assert (told.exit_code, (tmp_path / "other").exists()) == (2, False)
    with pytest.raises(UserError, match="has no finished cell to keep"):
        keep(file.parent / "nothing", tmp_path / "kept")


def test_a_comparison_s_search_is_not_repeated(tmp_path):
    c = compare.parse(COMPARISON, "test")
    run_comparison(c, tmp_path / "run")
    keep(tmp_path / "run", tmp_path / "kept")
    run_comparison(c, tmp_path / "new", how=How(reuse=[tmp_path / "kept"]))
    assert trained(tmp_path / "new") == set()  # nor are trials that failed
    assert (tmp_path / "new/leaderboard.md").read_text() == (tmp_path / "run/leaderboard.md").read_text()
    assert len(leaderboard.failures(tmp_path / "new/search/digits")) == 2
    numbers = leaderboard.gather(tmp_path / "kept")  # what is kept is enough for the page
    assert numbers == json.loads((tmp_path / "run/leaderboard.json").read_text())
    run_comparison(c, tmp_path / "part", only=["local"], how=How(reuse=[tmp_path / "kept"]))
    keep(tmp_path / "part", tmp_path / "kept")  # a part takes nothing away
    assert leaderboard.gather(tmp_path / "kept") == numbers
    assert len(leaderboard.failures(tmp_path / "kept/search/digits")) == 2
    other = compare.parse(COMPARISON.replace("eta1 = [0.1,", "eta1 = [0.2,"), "test")
    run_comparison(other, tmp_path / "other", how=How(reuse=[tmp_path / "kept"]))
    assert {name for name in trained(tmp_path / "other") if "trial" in name} == {
        "ditto-trial-1-s100", "local-trial-1-s100",
    }  # fmt: skip
