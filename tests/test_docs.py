"""Pages that are made from the code are what the code makes now."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_page_of_parts_is_that_of_the_registries():
    made = subprocess.run(
        [sys.executable, "-m", "qupel", "methods", "--markdown"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "parts.md").read_text() == made.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_and_headings_lead_somewhere(page):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"[{text}]({target})"
        if heading and file.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            known = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert heading in known, f"[{text}]({target}): {sorted(known)}"
