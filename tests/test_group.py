"""Ranks that hang, do not start, or run another version. Not in `test_ranks`: a process is in one group at a time."""

import os
import signal

import pytest

from qupel.engine import group as groups
from qupel.engine.group import Lost
from qupel.util.errors import UserError


def test_a_rank_that_hangs_is_named_after_the_timeout_and_ended():
    with groups.start(2, timeout=10) as group:
        process = group.started[0]
        os.kill(process.pid, signal.SIGSTOP)
        group.send(1, {"do": "anything"})
        with pytest.raises(Lost, match=r"^rank 1 has said nothing for 10 s$"):
            group.receive({1})
    assert process.returncode == -signal.SIGKILL


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Lost, match=r"^rank 1 died while starting \(exit code 1\)$"):
        groups.start(2)


def test_a_rank_that_runs_another_version_is_refused(monkeypatch):
    """It might give other bits; here this process claims to be of another."""
    started = []
    popen = groups.subprocess.Popen
    monkeypatch.setattr(groups.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    monkeypatch.setattr(groups, "version", lambda package: "0.0")
    with pytest.raises(UserError, match=r"^rank 1 has qupel, torch, numpy \d.*, not 0\.0, 0\.0, 0\.0$"):
        groups.start(2)
    assert started[0].returncode == 0  # sent home
