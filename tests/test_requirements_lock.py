"""requirements.lock is constraints.txt with hashes: nothing more, nothing less, and in a form that pip takes."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def entries():
    """name -> (version, hashes) of the lock file."""
    found = {}
    for line in (HERE / "requirements.lock").read_text().replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        requirement, *hashes = line.split()
        name, version = requirement.split("==")
        assert normal(name) not in found, name
        found[normal(name)] = version, hashes
    return found


def test_the_lock_is_of_the_tested_set():
    lines = (HERE / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {name: version for name, (version, _) in entries().items()} == {normal(n): v for n, v in pinned.items()}


def test_every_file_is_named_by_its_hash_and_by_no_place():
    for name, (_, hashes) in entries().items():
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in hashes), name
        assert len(set(hashes)) == len(hashes), name
    assert "://" not in (HERE / "requirements.lock").read_text()


def test_pip_takes_it(tmp_path):
    """Of what is installed here, which is the tested set, nothing would change; pip is in its mode of hashes."""
    installed = {normal(d.metadata["Name"]) for d in importlib.metadata.distributions() if d.metadata["Name"]}
    here = {name: entry for name, entry in entries().items() if name in installed}
    assert {"torch", "numpy", "pydantic"} <= set(here)
    lines = [f"{name}=={version} {' '.join(hashes)}\n" for name, (version, hashes) in here.items()]
    (tmp_path / "lock.txt").write_text("".join(lines))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "--require-hashes"]
    done = subprocess.run([*command, "-r", str(tmp_path / "lock.txt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout
