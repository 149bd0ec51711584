"""Tables, page and board of runs that tell more than accuracy: metrics over clients, another score, unseen clients."""

import csv
import io
import json

import numpy as np
import pytest

import browser as chromium
from made_runs import result, with_metrics, write_run
from qupel.report import charts, tables
from qupel.report.board import Board
from qupel.report.forms import forms
from qupel.report.measure import Measure, main_measure, other_measures
from qupel.report.runs import load_runs
from qupel.report.show import show
from qupel.report.summary import write_summary
from qupel.report.write import write_report
from qupel.util.errors import UserError

LABELS = ("QuPeL", "FedAvg + tuning")


def made(judge_by="accuracy", unseen=0, labels=LABELS, seeds=(0, 1, 2)):
    return [with_metrics(result(label, seed), judge_by, unseen) for label in labels for seed in seeds]


def last(results, label, key):
    return [r["lines"][-1]["clients"][key] for r in results if r["label"] == label]


def test_a_row_of_another_metric_by_hand():
    results = made()
    assert [m.name for m in other_measures(results)] == ["macro_f1", "mae", "each.0", "each.1"]
    mae = Measure("mae", higher=False, percent=False, key="mae")
    first, second = tables.rows(results, measure=mae)
    mine, theirs = (np.array(last(results, label, "mae")) for label in LABELS)  # (seeds, clients)
    counts = np.arange(20) + 10
    assert first.mean == pytest.approx(mine.mean())
    assert first.weighted == pytest.approx(np.mean([np.average(v, weights=counts) for v in mine]))
    assert first.worst == pytest.approx(np.mean([np.sort(v)[-2:].mean() for v in mine]))  # most is worst
    assert first.spread == pytest.approx(mine.std(1).mean())
    assert second.gain == pytest.approx((theirs - mine).mean())  # what is better is above 0
    assert second.gain > 0
    assert tables.rows(results)[1].gain > 0


def test_numbers_that_are_not_defined_everywhere():
    """each.1 is known for every second client only."""
    results = made()
    (row, _) = tables.rows(results, measure=other_measures(results)[-1])
    assert row.mean == pytest.approx(100 * np.mean([v for seed in last(results, "QuPeL", "each.1") for v in seed if v]))


def test_selection_goes_the_way_that_is_better():
    results = made("mae", seeds=(0,), labels=("QuPeL",))
    for line in results[0]["lines"]:
        line["validation"] = abs(line["round"] - 4) + 1.0
    (row,) = tables.rows(results)
    assert row.selected == pytest.approx(results[0]["lines"][3]["test"])


def test_tables_of_a_run_judged_by_an_error(tmp_path, capsys):
    results = made("mae", unseen=4)
    assert main_measure(results) == Measure("mae", higher=False, percent=False)
    head, body = tables.federation_table(tables.rows(results), measure=main_measure(results))
    assert head[:2] == ["method", "mae"]
    assert (
        body[0][head.index("unseen")]
        == f"{np.mean([0.6 + 0.01 * i + 0.02 * s for i in range(4) for s in range(3)]):.4g}"
    )
    said = tables.sentence(tables.rows(results), main_measure(results))
    assert "better than FedAvg + tuning" in said
    write_summary(results, tmp_path)
    summary = (tmp_path / "summary.md").read_text()
    assert "gain: the method minus QuPeL, with its 95 %" in summary
    assert "unseen: clients kept out of training, after adaptation." in summary
    assert "| QuPeL | macro_f1 % | " in summary
    (first, _) = json.loads((tmp_path / "summary.json").read_text())
    assert list(first["metrics"]) == ["macro_f1", "each.0", "each.1"]
    assert first["metrics"]["macro_f1"]["unseen"] == pytest.approx(90 * np.mean(results[0]["unseen"]["test"]) + 1.8)


def test_every_metric_fits_a_terminal(tmp_path, capsys):
    show(made(unseen=3), tmp_path, one=False, seconds=1)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    rows = [line.split() for line in shown]
    assert any(row[:3] == ["QuPeL", "macro_f1", "%"] for row in rows)
    assert not any("each.0" in row for row in rows)  # a vector has its numbers in the files


def test_nothing_new_is_said_where_nothing_was_asked(tmp_path):
    results = [result(label, seed) for label in LABELS for seed in (0, 1)]
    write_summary(results, tmp_path)
    (first, _) = json.loads((tmp_path / "summary.json").read_text())
    assert not {"weighted", "unseen", "metrics"} & set(first)
    (form,) = forms(load_runs([write_run(tmp_path / "run", results)]))
    assert form.markdown.count("\n| --- |") == 1
    assert form.csv.splitlines()[0].endswith(",p,2-bit,3-bit")


def test_the_files_of_a_report_have_every_metric(tmp_path):
    page = write_report([write_run(tmp_path / "run", made(unseen=2))])
    text = page.read_text()
    assert '<select id="measure"><option value="">accuracy</option><option value="1">macro_f1</option>' in text
    assert "Score while they learn" in text
    assert "<h3>Every metric</h3>" in text
    (first, _) = csv.DictReader(io.StringIO((page.parent / "table.csv").read_text()))
    assert float(first["unseen"]) == pytest.approx(62.5)
    assert float(first["mae weighted"]) < float(first["mae worst"])
    assert (page.parent / "table.tex").read_text().count("\\begin{tabular}") == 2
    assert "macro\\_f1 \\%" in (page.parent / "table.tex").read_text()
    assert "| QuPeL | each.1 % |" in (page.parent / "table.md").read_text()


def test_charts_of_every_metric_and_of_unseen_clients(tmp_path):
    results = made(unseen=2)
    told = charts.all_charts(charts.compare(load_runs([write_run(tmp_path / "run", results)])))
    assert {f"{name}:{k}" for name in ("accuracy", "clients", "sizes") for k in (1, 2, 3, 4)} < set(told)
    assert (told["accuracy:2"]["y"], told["accuracy:2"]["unit"]) == ("test mae", "")
    expected = np.mean([r["lines"][4]["test_mae"] for r in results if r["label"] == "QuPeL"])
    assert told["accuracy:2"]["lines"][0]["y"][4] == pytest.approx(expected, rel=1e-5)
    names = [row["name"] for row in told["clients"]["rows"]]
    assert names[:3] == ["QuPeL, 2-bit", "QuPeL, 3-bit", "QuPeL, unseen"]
    assert told["clients"]["rows"][2]["values"][:2] == pytest.approx([60, 61])


def test_runs_judged_by_different_metrics_are_apart(tmp_path):
    folders = [write_run(tmp_path / name, made(name)) for name in ("accuracy", "mae")]
    with pytest.raises(UserError, match="judged by accuracy and mae, which cannot be compared"):
        write_report(folders)


def test_the_board_has_every_metric_over_clients(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from qupel.engine.rounds import Progress

    class Cell:
        name = "cell"

    (found,) = made("mae", labels=("QuPeL",), seeds=(0,))
    board = Board(tmp_path, lambda *_: None)
    for line in found["lines"]:
        board.tell(Cell(), Progress(line["round"], 10, 0.0, 0.0, line, ()))
    events = EventAccumulator(str(tmp_path / "cell"))
    events.Reload()
    for key, name in (("mean", "mean"), ("worst", "worst tenth"), ("weighted", "mean by test samples")):
        shown = [e.value for e in events.Scalars(f"macro_f1/{name}")]
        assert shown == pytest.approx([line["over_clients"]["macro_f1"][key] for line in found["lines"]])
    assert events.Scalars("mae/test")[-1].value == pytest.approx(found["lines"][-1]["test"])
    assert "accuracy/test" not in events.Tags()["scalars"]


@pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "there is a browser")
def test_a_metric_is_chosen_for_all_figures(tmp_path):
    results = made(unseen=3)
    page = write_report([write_run(tmp_path / "run", results)])
    window = chromium.Browser()
    try:
        for width in (390, 1100):
            window.open(page, width=width, height=844)
            assert window.run("return document.documentElement.scrollWidth") == width
        axis = "return [...document.querySelectorAll('.chart svg text')].map(t => t.textContent)"
        assert "test accuracy, %" in window.run(axis)
        window.click("#accuracy summary")
        window.run("""
            const s = document.getElementById('measure');
            s.value = '2';
            s.dispatchEvent(new Event('change'))""")
        words = window.run(axis)
        assert "test mae" in words
        assert "test accuracy, %" not in words
        window.click("#accuracy summary")
        window.run("return new Promise(done => setTimeout(done, 50))")
        rows = window.run("return [...document.querySelectorAll('#accuracy details tr')].map(r => r.innerText)")
        mean = np.mean([r["lines"][-1]["test_mae"] for r in results if r["label"] == "QuPeL"])
        assert f"{mean:.4g}" in rows[-1]
        assert window.logs("browser") == []
    finally:
        window.close()
