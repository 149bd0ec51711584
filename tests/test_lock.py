"""A run folder belongs to one process, one set of data and one set of packages."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import qupel
from qupel.engine.identity import check_identity
from qupel.engine.rounds import Stopped
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.util.errors import UserError
from qupel.util.files import locked, read_json, write_sealed
from tiny import mlp

HOLDER = """
import sys, time
from pathlib import Path
from qupel.util.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def config(*overrides):
    text = "rounds = 4\nlocal_steps = 1\nevaluate_every = 1\n[split]\nclients = 2\ntrain_per_client = 8\n"
    return configs.parse(text + '[model]\nname = "mlp"\n[methods.L]\nrecipe = "local"\n', "c", overrides)


def clients(shift=0.0):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 10, 6)).astype(np.float32), rng.integers(0, 3, (2, 10))
    return [(a, b, a + np.float32(shift), b) for a, b in zip(x, y, strict=True)]


def test_a_folder_in_use_is_refused_with_its_holder(holder, tmp_path):
    for use in (
        lambda: run_experiment(config(), tmp_path),
        lambda: qupel.fit(mlp(), clients(), method="fedavg", rounds=2, out=tmp_path),
    ):
        with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on "):
            use()
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_the_command_says_it_in_one_line(holder, tmp_path):
    command = [sys.executable, "-m", "qupel", "run", "--out", str(tmp_path), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path} is in use by process {holder.pid} on ")
    assert done.stderr.count("\n") == 1


def test_the_lock_of_a_killed_process_is_gone(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with locked(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "), locked(tmp_path):
        pass


def stop(out, *overrides):
    seen = []
    with pytest.raises(Stopped):
        run_experiment(config(*overrides), out, watch=lambda *told: seen.append(told), should_stop=lambda: bool(seen))


def arrays(path, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.random((40, 6), np.float32), np.arange(40) % 4
    np.savez(path, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])


def test_other_data_under_the_same_name_are_refused(tmp_path):
    from qupel.run.jobs import load_data

    path, out = tmp_path / "d.npz", tmp_path / "r"
    mine = f'data.name="{path}"'
    arrays(path, 0)
    stop(out, mine)
    arrays(path, 1)
    load_data.cache_clear()  # as in a new process
    with pytest.raises(UserError, match="began with other data") as said:
        run_experiment(config(mine), out, resume=True)
    assert "\n" not in str(said.value)
    arrays(path, 0)
    load_data.cache_clear()
    (result,) = run_experiment(config(mine), out, resume=True)
    assert result["data_identity"] == read_json(out / "identity.json")["data"]


def test_other_versions_are_refused_until_the_user_says_so(tmp_path, capsys):
    out = tmp_path / "r"
    stop(out)
    began = read_json(out / "identity.json")
    assert set(began["versions"]) == {"qupel", "torch", "numpy"}
    write_sealed(out / "identity.json", {**began, "versions": {**began["versions"], "torch": "1.0"}})
    with pytest.raises(UserError, match=r"began with .*torch 1\.0.*--other-versions"):
        run_experiment(config(), out, resume=True)
    run_experiment(config(), out, resume=True, other_versions=True)
    assert capsys.readouterr().err.startswith(f"warning: {out} began with ")
    assert read_json(out / "identity.json")["before"][0]["torch"] == "1.0"
    run_experiment(config(), out, resume=True)  # that was said once


def test_a_fit_with_other_test_data_does_not_go_on(tmp_path):
    qupel.fit(mlp(), clients(), method="fedavg", rounds=2, out=tmp_path)
    with pytest.raises(UserError, match="other data"):
        qupel.fit(mlp(), clients(shift=1.0), method="fedavg", rounds=2, out=tmp_path)
    qupel.fit(mlp(), clients(), method="fedavg", rounds=2, out=tmp_path)


def test_a_run_of_a_version_without_identity_gets_one(tmp_path):
    check_identity(tmp_path, "digits", "abc", False)
    assert json.loads((tmp_path / "identity.json").read_text())["data"] == "abc"
    check_identity(tmp_path, "digits", "abc", False)
