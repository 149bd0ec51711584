"""The documentation site: what is made for it from the code is whole, and it builds without a warning or a stranger."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qupel
from qupel.run.config import _all_keys

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_config_key_is_told(hooks):
    """Those of the models, against those of the schema that finds misspelt keys; each says what it means."""
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \| (.*?) \| (.+) \|$", hooks.keys_page(), re.M)
    told = {key for key, *_ in rows}
    assert told == {key for key, _ in hooks.all_keys()}
    assert {part for key in told for part in key.split(".")} >= _all_keys() - {"settings"}
    assert [key for key, _, _, meaning in rows if not meaning.strip()] == []


def test_defaults_and_types_are_in_the_words_of_a_config(hooks):
    page = hooks.keys_page()
    assert '| `store` | `"memory", "disk"` | `"memory"` |' in page
    assert "| `save_models` | `true, false` | `true` |" in page
    assert "| `seeds` | `list of whole numbers` | `[0]` |" in page
    assert "| `methods.LABEL.lambda_p` | `number` |" in page


def test_every_public_name_has_a_place_and_a_docstring(hooks):
    page = hooks.names_page()
    for name in qupel.__all__:
        assert f"::: qupel.{name}\n" in page
        assert getattr(qupel, name).__doc__


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages += [f"tutorials/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")]
    assert [page for page in pages if not re.search(rf"[ -]{re.escape(page)}$", listed, re.M)] == []


@pytest.mark.slow
def test_the_site_builds_and_asks_for_nothing_from_elsewhere(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(qupel.__file__).parents[1]), "NO_MKDOCS_2_WARNING": "1"}
    given = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        assert not re.search(r'<(script|img|iframe)[^>]+src="(https?:)?//', text), page
        assert not re.search(r'<link[^>]+rel="(stylesheet|preconnect)"[^>]+href="(https?:)?//', text), page
    assert "lambda_p" in (tmp_path / "site/keys.html").read_text()
    assert "HalfWay" in (tmp_path / "site/tutorials/03_own_method.html").read_text()
