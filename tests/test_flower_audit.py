"""Logs that can only grow: what is cut off, what is found out, what the command says."""

import json
import os
import subprocess
import sys

import pytest

import flower_bench as bench
from flower_bench import Direct
from qupel import cli
from qupel.flower import audit, chain
from qupel.flower.server import conduct
from qupel.util.errors import UserError
from qupel.util.files import Damaged


def entries(path):
    return [line.entry for line in chain.read(path)]


def test_lines_are_chained(tmp_path):
    path = tmp_path / "state" / "log.jsonl"
    heads = [chain.append(path, {"n": n, "text": "\u00e4"}) for n in range(3)]
    lines = list(chain.read(path))
    assert [line.hash for line in lines] == heads
    assert [line.entry["n"] for line in lines] == [0, 1, 2]
    assert chain.linked(heads[1], lines[2].entry) == heads[2]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_being_written_when_the_machine_went_down_is_cut_off(tmp_path):
    """At every byte of the last line."""
    path = tmp_path / "log.jsonl"
    chain.append(path, {"n": 0})
    whole = path.read_bytes()
    chain.append(path, {"n": 1})
    both = path.read_bytes()
    for size in range(len(whole), len(both)):
        path.write_bytes(both[:size])
        assert entries(path) == [{"n": 0}]
        chain.append(path, {"n": 2})
        assert entries(path) == [{"n": 0}, {"n": 2}]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        chain.append(path, {"n": 3})
        assert entries(path) == [{"n": 3}]


def test_a_long_line_is_found_again(tmp_path):
    path = tmp_path / "log.jsonl"
    for n in range(3):
        chain.append(path, {"n": n, "text": "x" * 100_000})
    assert [entry["n"] for entry in entries(path)] == [0, 1, 2]


def changed(text):
    """Every way in which a log of four lines can be other than it was, but for its end."""
    lines = text.splitlines(keepends=True)
    for k in range(4):
        yield "".join([*lines[:k], lines[k].replace(f'"n": {k}', '"n": 9'), *lines[k + 1 :]])
    for k in range(3):
        yield "".join([*lines[:k], *lines[k + 1 :]])
    yield "".join([lines[1], lines[0], *lines[2:]])
    yield "".join([*lines, lines[3]])
    yield text.replace('"entry"', '"entri"', 1)
    yield "\n" + text
    yield lines[0] + "[" * 10_000 + "\n"


def test_a_log_that_was_changed_is_found_out(tmp_path):
    path = tmp_path / "log.jsonl"
    for n in range(4):
        chain.append(path, {"n": n})
    for wrong in changed(path.read_text()):
        path.write_text(wrong)
        with pytest.raises(Damaged):
            entries(path)
    with pytest.raises(UserError, match="cannot read"):
        entries(tmp_path / "none")


def test_several_processes_append(tmp_path):
    path = tmp_path / "log.jsonl"
    code = "import sys; from pathlib import Path; from qupel.flower import chain\n"
    code += "for n in range(20): chain.append(Path(sys.argv[1]), {'who': sys.argv[2], 'n': n})"
    given = [[sys.executable, "-c", code, str(path), who] for who in "ab"]
    started = [subprocess.Popen(command, env=os.environ) for command in given]
    assert [process.wait() for process in started] == [0, 0]
    found = entries(path)
    for who in "ab":
        assert [entry["n"] for entry in found if entry["who"] == who] == list(range(20))


def test_the_command(tmp_path, capsys, monkeypatch):
    """For a client's folder and a run's; one line and exit code 2 for any other, and for a log that was changed."""

    def qupel(*arguments):
        monkeypatch.setattr(sys, "argv", ["qupel", "flower", "audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, " ".join((said.out + said.err).split())

    paths = bench.clients(tmp_path / "c")
    run = bench.request(tmp_path / "run", audit=True)
    conduct(run, Direct(paths))
    folder = tmp_path / "c"
    (folder / "client.toml").write_text(paths[0].read_text())
    code, said = qupel(folder)
    head = list(chain.read(folder / "state-0" / audit.LOG))[-1].hash
    assert code == 0
    assert "job-1" in said
    assert f"none changed; the last hash: {head}" in said
    code, said = qupel(run, "--replay", "--lines")
    assert code == 0
    assert '"round": 4' in said
    assert "replayed: 5 rounds end with the same bits, w " in said
    log = run / "audit.jsonl"
    log.write_text(log.read_text().replace('"client": 2', '"client": 1', 1))
    assert qupel(run)[0] == 2
    assert "line 2" in qupel(run)[1]
    code, said = qupel(tmp_path)
    assert (code, "neither a client's folder" in said) == (2, True)
    assert json.loads((run / "request.json").read_text())["terms"]["audit"] is True
