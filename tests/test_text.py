"""Text from outside - labels, folders, clients' names, files - means itself wherever it is shown or written."""

import csv
import io
import json

import pytest
from rich.console import Console

import qupel
from made_runs import result, write_run
from qupel.deploy import load
from qupel.paper.convergence.config import load as load_theory
from qupel.report import tables
from qupel.report.forms import forms
from qupel.report.runs import load_runs
from qupel.util.errors import UserError
from qupel.util.terminal import number_table, plain, shown
from test_cli import qupel as command

assert command  # a fixture

NASTY = "[red]x[/blue] \x1b[31m\n=1+1 |&_%$#{}~^\\ <b>"


def test_plain_text_prints_in_one_line_and_only_prints():
    assert plain("a\x1b[2J\nb\u202ec\udc80") == r"a\x1b[2J\nb\u202ec\udc80"
    assert plain("é 日本 ± ▁") == "é 日本 ± ▁"
    assert plain("x" * 10**7, 10) == "xxxxxxx..."
    console = Console(file=io.StringIO(), width=200)
    for text in (NASTY, "[/]", "a\\", "[bold", "\\[x]", "[link=file:///]y"):
        console.print(f"[dim]{shown(text)}[/dim]", highlight=False)
        assert plain(text) in console.file.getvalue()
    console.print(number_table(["[m]", "[/b]"], [[NASTY, "[1]"]]))
    assert plain(NASTY)[:40] in console.file.getvalue()


@pytest.fixture
def nasty(tmp_path):
    label = "=cmd|' /C calc'!A0 " + NASTY
    results = [result(name, seed) for name in (label, "[2pt] other") for seed in (0, 1)]
    return write_run(tmp_path / "run[red]\n$x", results)


def test_reports_of_nasty_labels(nasty):
    (form,) = forms(load_runs([nasty]))
    md, tex, text = form.markdown, form.latex, form.csv
    for content in (md, tex, text):
        assert "\x1b" not in content
    rows = [line for line in md.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert {row.replace("\\|", "").count("|") for row in rows} == {rows[1].count("|")}
    assert "<b>" not in md
    (first, second), body = list(csv.reader(io.StringIO(text)))[1:], tex.split("\\midrule")[1]
    assert first[0].startswith("'=cmd|")
    assert second[0] == "[2pt] other"
    assert not any(cell[:1] in "=@+" for row in (first, second) for cell in row if cell)
    assert r"\&\_\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in body
    assert "\n{[}2pt] other" in body  # after \\\\ a bracket would be its argument
    assert all(line.startswith(("%", "\\begin")) for line in tex.split("\\toprule")[0].splitlines())


def test_markdown_and_csv_leave_numbers_alone():
    assert tables.markdown_text("+1.20 [+0.80, +1.60]**") == "+1.20 [+0.80, +1.60]**"
    assert tables.markdown_text("<1e-4") == "<1e-4"
    assert tables.markdown_text("[a](javascript:b) <img src=x>") == r"\[a](javascript:b) &lt;img src=x>"
    assert tables.csv_text(" @SUM(A1)") == "' @SUM(A1)"
    assert tables.csv_text("FedAvg + tuning") == "FedAvg + tuning"


def test_a_run_with_a_nasty_label_and_folder(command, tmp_path):
    """Every line of the run, its summary and its picture."""
    label = json.dumps(NASTY)
    text = (tmp_path / "c.toml").read_text().replace("[methods.QuPeL]", f"[methods.{label}]")
    (tmp_path / "n.toml").write_text(text)
    code, out, err = command("run", "n.toml", "--out", "r[/red]", "--workers", "1", "--set", "rounds=2")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "[red]x[/blue]" in out
    assert "r[/red]" in out
    assert "\n=1+1" not in (tmp_path / "r[/red]" / "summary.md").read_text()
    assert sorted(p.name for p in (tmp_path / "r[/red]" / "cells").iterdir())[1].startswith("red-x-blue-31m-1+1")
    code, out, err = command("report", "r[/red]")
    assert (code, err) == (0, "")
    assert "written to r[/red]/report/index.html" in out


DEEP = "x = " + "[" * 5_000 + "]" * 5_000


def test_impossible_settings_are_one_line(command, tmp_path):
    (tmp_path / "deep.toml").write_text(DEEP)
    dots = ".".join(["a"] * 5_000)
    (tmp_path / "dots.toml").write_text(f"{dots} = 1")
    cases = [
        (("run", "c.toml", "--out", "r", "--set", "model.start=a{b}"), "a{b} cannot be read"),
        (("run", "c.toml", "--out", "r", "--set", "model.start={seed}{0}{"), "0{0}{ cannot be read"),
        (("run", "deep.toml", "--out", "r"), "deeper than any setting is"),
        (("run", "dots.toml", "--out", "r"), "deeper than any setting is"),
        (("run", "c.toml", "--out", "r", "--set", f"{dots}=1"), "deeper than any setting is"),
        (("run", "c.toml", "--out", "r", "--set", DEEP.replace(" = ", "=")), "deeper than any setting is"),
        (("run", "c.toml", "--out", "r", "--set", 'methods."\\u001b[31m\\n[/x]".recipe="y"'), "unknown"),
        (
            ("run", "c.toml", "--out", "r", "--set", "data.name=mnist", "--data", 'a"b\nc'),
            r'folder a"b\nc does not exist',
        ),
    ]
    for words, said in cases:
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (2, 1), (words[-1][:60], err)
        assert said in err, (words[-1][:60], err)
        assert "\x1b" not in err
        assert len(err) < 3_000
    with pytest.raises(UserError, match="deeper than any setting"):
        load_theory(tmp_path / "deep.toml")


def test_a_client_with_a_nasty_name_can_be_saved(tmp_path):
    import numpy as np
    from torch import nn

    x, y = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), np.arange(8) % 2
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    clients = [qupel.Client(x, y, name="[red]\x1b[31m\nAnn"), qupel.Client(x, y, name="Bo")]
    made = qupel.fit(net, clients, bits=2, rounds=10)
    made.save(tmp_path / "models")
    names = [load(p).about.client for p in sorted((tmp_path / "models").iterdir())]
    assert names == [r"[red]\x1b[31m\nAnn", "Bo"]
