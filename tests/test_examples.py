"""The notebooks in examples/: each runs from top to bottom, as a plain script in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qupel

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
QUIET = ("-W", "error", "-W", "ignore:'click.utils:DeprecationWarning")  # as the tests have it in pyproject.toml
SAYS = {  # what its last words are
    "01_first_federation": "client-009.safetensors",
    "02_own_network_and_data": "'second.weight': 2",
    "03_own_method": "'method': 'local'",
    "04_to_onnx": "every file gives its client's score",
    "05_compare_honestly": "QuPeL - Local:",
}


def test_there_are_five():
    assert [path.stem for path in EXAMPLES] == list(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    if path.stem == "04_to_onnx":
        pytest.importorskip("onnxruntime")
    source = str(Path(qupel.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": source}
    given = [sys.executable, *QUIET, str(path)]
    done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert SAYS[path.stem] in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_has_cells(path):
    text = path.read_text()
    assert text.startswith("# %% [markdown]\n# # ")
    assert text.count("\n") <= 72
