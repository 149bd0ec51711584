"""The table of clients that joined later, against numbers by hand."""

import importlib.util
import json
from pathlib import Path

import pytest

from made_runs import result, with_metrics, write_run
from qupel.report import later
from qupel.report.significance import over_seeds

ROOT = Path(__file__).parents[1]


def cell(label, seed, adapted, shared, **more):
    return {**result(label, seed), "unseen": {"test": adapted, "global": shared, "bytes": [100, 300], **more}}


def cells():
    """Two methods, two seeds, two clients; one of B's has no test data in seed 1."""
    return [
        cell("A", 0, [0.9, 0.8], [0.8, 0.8]),
        cell("A", 1, [1.0, 0.6], [0.7, 0.8]),
        cell("B", 0, [0.8, 0.9], [0.8, 0.9]),
        cell("B", 1, [0.7, None], [0.7, None], files=[1000, 2000]),
    ]


def test_differences_are_client_by_client_and_tested_over_seeds():
    a, b = later.rows(cells())
    assert (a.mean, a.shared, a.clients) == pytest.approx((82.5, 77.5, 2))
    assert a.adapting.gain.mean == pytest.approx(5)
    assert a.adapting.clients == (1.0, 0.5, 0.5)  # seed 0: one better, one the same; seed 1: one better, one worse
    assert a.first is None
    assert (b.mean, b.std) == pytest.approx((77.5, 15 / 2**0.5))
    assert b.adapting.clients == (0.0, 1.5, 0.0)
    assert b.first.gain.mean == pytest.approx((0 + 30) / 2)  # +10 and -10; +30 at the client that has a score
    assert b.first.gain.p == pytest.approx(over_seeds({0: 0.0, 1: 30.0}).p)
    assert b.first.clients == (1.0, 0.0, 0.5)
    assert (a.file_bytes, b.file_bytes) == (200, (200 + 1500) / 2)


def test_where_less_is_better_a_gain_is_less():
    found = [with_metrics(c, judge_by="mae", unseen=2) for c in cells()[:2]]
    for c in found:
        c["unseen"] |= {"test": [1.0, 2.0], "global": [1.5, 2.0], "bytes": [1, 1]}
    (row,) = later.rows(found)
    assert row.adapting.gain.mean == pytest.approx(0.25)
    assert row.adapting.clients == (1.0, 1.0, 0.0)


def test_the_table_says_it_and_a_published_page_has_it_from_its_own_numbers(tmp_path):
    head, body = later.table(cells())
    assert head[:5] == ["method", "adapted: accuracy %", "shared", "file", "gain"]
    assert body[0][1:4] == ["82.5 ± 3.5", "77.5", "200 B"]
    assert body[1][head.index("A minus")] == "+15.0"
    spec = importlib.util.spec_from_file_location("publish_script", ROOT / "experiments" / "publish.py")
    publish = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(publish)
    runs = [with_metrics(c, unseen=2) for c in cells()]
    for c in runs:
        c["unseen"] |= {"global": [0.5, 0.6], "bytes": [1, 1]}
        c["machine"] |= {"processor": "p", "torch": "2"}
    folder = write_run(tmp_path / "r", runs)
    told = {"command": "qupel adapt", "made_by": "x", "clients": 2, "seconds": 2.0, "least": 1.0, "most": 3.0}
    told |= {"adapting": 0.5, "peak_MB": 300, "torch_MB": 200, "file_bytes": 12345}
    (folder / "adaptation.json").write_text(json.dumps(told))
    raw = {"r": publish.section(folder)}
    publish.write("r", raw, tmp_path)
    page = (tmp_path / "r.md").read_text()
    assert page == publish.page("r", json.loads((tmp_path / "r.json").read_text()))
    for line in later.table(runs)[1]:
        assert " | ".join(line) in page
    assert "| A | mae |" in page
    assert "12,345 bytes" in page
