"""What a fit is to look at and to work with; every public name, with an example that runs."""

import doctest
import os
import pty
import subprocess
import sys

import numpy as np
import pytest
import torch

import qupel
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.phase import Phase
from qupel.report.page import facts
from qupel.report.runs import load_run
from qupel.util import terminal
from qupel.util.errors import UserError
from tiny import CLASSES, INPUTS, mlp


def people(sizes=(8, 8, 8), seed=0):
    rng = np.random.default_rng(seed)

    def some(n):
        x = rng.standard_normal((n, INPUTS)).astype(np.float32)
        return x, x[:, :CLASSES].argmax(1)

    return [(*some(n), *some(6)) for n in sizes]


QUICK = {"rounds": 5, "local_steps": 2, "batch": 4, "evaluate_every": 2}


@pytest.fixture(scope="module")
def done():
    return qupel.fit(mlp(), people(), bits=[2, 3, 32], unseen=people((9,), seed=5), **QUICK)


@pytest.mark.parametrize("name", qupel.__all__)
def test_every_public_name_has_an_example_that_runs(name):
    thing = getattr(qupel, name)
    examples = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    assert any(test.examples for test in examples), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_a_fit_is_told_in_a_line_a_table_and_a_page(done):
    first, second = repr(done).split("\n")
    assert first.startswith("Fit: 3 clients, qupel, 5 rounds; test ")
    assert "2 and 3 and 32 bits" in first
    assert second.startswith("unseen: Fit: 1 client, qupel, adapted")
    rows = done.table()
    assert [row["bits"] for row in rows] == [2.0, 3.0, 32.0]
    assert [row["test"] for row in rows] == done.test
    assert set(done.unseen.table()[0]) == {"client", "bits", "bytes", "test", "global"}
    page = done._repr_html_()
    assert page.count("<tr>") == 4
    assert "client 2" in page


def test_names_are_shown_as_text(done):
    from dataclasses import replace

    page = replace(done, names=["<b>x</b>", "y", "z"])._repr_html_()
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page


def test_the_figure_shows_scores_and_losses(done):
    left, right = done.plot().axes
    assert left.lines[0].get_xdata().tolist() == [line["round"] for line in done.metrics]
    assert left.lines[0].get_ydata() == pytest.approx([100 * line["test"] for line in done.metrics])
    assert {line.get_label() for line in right.lines} == {"f(x)", "f(Q(x))"}


def test_without_test_data_there_is_still_something_to_see():
    found = qupel.fit(mlp(), [c[:2] for c in people()], **QUICK)
    assert "test" not in repr(found)
    assert "<td>-</td>" in found._repr_html_()
    assert found.plot().axes[0].lines == [] or found.plot().axes
    numbers = [(x, np.eye(CLASSES, dtype=np.float32)[y]) * 2 for x, y, *_ in people()]
    found = qupel.fit(mlp(), numbers, **QUICK)
    assert "%" not in repr(found)


def test_a_report_and_files_of_a_fit(done, tmp_path):
    page = done.report(tmp_path / "report")
    assert page == tmp_path / "report/index.html"
    assert "qupel" in page.read_text()
    with pytest.raises(UserError, match="not of adapted clients"):
        done.unseen.report(tmp_path)


def test_export_writes_another_format(done, tmp_path):
    packed = done.export("packed", tmp_path / "a", rest="fp16")
    assert [f.name for f in packed] == [f"client-00{i}.safetensors" for i in range(3)]
    assert packed[0].stat().st_size < done.save(tmp_path / "b")[0].stat().st_size


@pytest.mark.slow
def test_export_to_onnx(done, tmp_path):
    files = done.export("onnx", tmp_path)
    assert [f.name for f in files] == [f"client-00{i}.onnx" for i in range(3)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "ranks"}, 'allowed are "inline" and "workers"'),
        ({"engine": "inline", "workers": 2}, "is this process"),
        ({"device": "tpu"}, "allowed are cpu, cuda"),
        ({"bits": 2, "budget": "9 KiB"}, "either bits or budget"),
        ({"unseen": 3}, "unseen = 3 is 3 of 3 clients; allowed are 1 to 2"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        qupel.fit(mlp(), people(), **QUICK, **options)


@pytest.mark.parametrize(
    "options", [{"store": "disk"}, pytest.param({"engine": "workers", "workers": 2}, marks=pytest.mark.slow)]
)
def test_engines_and_stores_give_the_same_bits(options):
    plain, other = (qupel.fit(mlp(), people(), seed=3, **QUICK, **o) for o in ({}, options))
    for a, b in zip(plain.models, other.models, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


SCRIPT = """
import numpy as np, qupel
from torch import nn
x, y = np.random.default_rng(0).random((8, 4), np.float32), np.arange(8) % 2
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
qupel.fit(net, [(x, y, x, y)] * 2, rounds=5)
print("quiet from here")
qupel.fit(net, [(x, y, x, y)] * 2, rounds=5, quiet=True)
"""


def test_a_bar_on_a_terminal():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env=environment, check=True)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # how a terminal says that its other end is closed
        pass
    os.close(ours)
    assert said.count(b"qupel, seed 0") >= 1  # of the two, the second is quiet
    assert b"quiet from here" in said
    assert b"seed 0" not in said.partition(b"quiet from here")[2]


def test_nothing_is_said_where_there_is_no_terminal(capfd):
    qupel.fit(mlp(), people(), **QUICK)
    assert capfd.readouterr() == ("", "")


def test_a_notebook_sees_one_line_that_changes(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "out", type("Console", (), {"is_terminal": False, "is_jupyter": True})())
    monkeypatch.setattr(terminal, "Progress", lambda *_, **__: None)
    qupel.fit(mlp(), people(), method=[Phase(FedAvg(), 3)], local_steps=2, batch=4)
    said = capsys.readouterr().out
    assert said.count("\r") == 3
    assert said.endswith("3/3\n")


def test_the_page_of_clients_with_data_of_their_own_says_so(tmp_path):
    text = 'rounds = 5\nlocal_steps = 1\n[data]\nname = "own_page_data:clients"\n[model]\nname = "mlp"\n'
    data = "import numpy as np\ndef clients(): return [(np.zeros((4, 2), 'f4'), np.arange(4) % 2) * 2] * 3\n"
    (tmp_path / "own_page_data.py").write_text(data)
    (tmp_path / "c.toml").write_text(f'{text}[methods.Q]\nrecipe = "qupel"\n')
    command = [sys.executable, "-m", "qupel", "run", "c.toml", "--out", "run", "--workers", "1"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    said = facts(load_run(tmp_path / "run", "run"), named=False)
    assert "3 clients, each with its own data" in said
    assert "classes each" not in said
