"""The report: its numbers by hand, its files, and runs that are unfinished, old, huge, odd or no runs at all."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from PIL import Image

from made_runs import LAYERS, line, result, write_run
from qupel.paper.forms import FORMS
from qupel.report import charts, figures, forms, page
from qupel.report.runs import load_runs
from qupel.report.write import write_report
from qupel.util.errors import UserError

METHODS = ("QuPeL", "Local", "FedAvg + tuning")


def results(seeds=(0, 1, 2), labels=METHODS, **more):
    return [result(label, seed, **more) for label in labels for seed in seeds]


def compared(*folders):
    return charts.compare(load_runs(list(folders)))


class Page(HTMLParser):
    """The texts, tags and embedded numbers of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.attributes, self.inside = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id", tag) if tag in {"script", "style"} else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "data":
            self.data = json.loads(data)
        elif not self.inside:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def read_page(*folders):
    """The page of these runs; nothing is written."""
    runs = load_runs(list(folders))
    c = charts.compare(runs)
    return Page(page.page(runs, c, charts.all_charts(c), forms.forms(runs, FORMS), ["table.md"]))


# --- numbers ---


def test_curves_are_means_with_the_lowest_and_the_highest_seed(tmp_path):
    told = results()
    c = compared(write_run(tmp_path / "r", told))
    drawn = charts.accuracy(c)["lines"]
    assert [c.series[d["series"]].label for d in drawn] == list(METHODS)
    for d in drawn:
        mine = [r for r in told if r["label"] == c.series[d["series"]].label]
        for k in range(10):
            values = [100 * r["lines"][k]["test"] for r in mine]
            assert d["x"][k] == 2.0 * (k + 1)
            assert d["y"][k] == pytest.approx(sum(values) / 3, rel=1e-5)
            assert (d["low"][k], d["high"][k]) == pytest.approx((min(values), max(values)), rel=1e-5)


def test_only_rounds_that_all_seeds_have_are_drawn(tmp_path):
    told = results(seeds=(0, 1), labels=["A"])
    del told[1]["lines"][2]
    (d,) = charts.accuracy(compared(write_run(tmp_path / "r", told)))["lines"]
    assert d["x"] == [2, 4, 8, 10, 12, 14, 16, 18, 20]


def test_every_client_is_a_dot_of_its_bit_width(tmp_path):
    told = results(seeds=(0, 1))
    rows = charts.clients(compared(write_run(tmp_path / "r", told)))["rows"]
    assert [r["name"] for r in rows[:2]] == ["QuPeL, 2-bit", "QuPeL, 3-bit"]
    assert [len(r["values"]) for r in rows] == [20] * 6  # ten clients of a width, two seeds
    last = {r["seed"]: r["lines"][-1]["clients"]["test"] for r in told if r["label"] == "QuPeL"}
    expected = [100 * last[s][i] for i, s in zip(rows[1]["clients"], rows[1]["seeds"], strict=True)]
    assert rows[1]["values"] == pytest.approx(expected, rel=1e-5)
    assert set(rows[1]["clients"]) == set(range(1, 20, 2))
    assert rows[1]["mean"] == pytest.approx(sum(expected) / 20, rel=1e-5)


def test_size_points_by_hand(tmp_path):
    told = results(seeds=(0, 1), labels=["A"])
    two, three = charts.sizes(compared(write_run(tmp_path / "r", told)))["points"]
    assert (two["name"], two["x"]) == ("A, 2-bit", 33_000)
    means = [100 * np.mean(r["lines"][-1]["clients"]["test"][1::2]) for r in told]
    assert three["y"] == pytest.approx(np.mean(means), rel=1e-5)
    assert three["std"] == pytest.approx(np.std(means, ddof=1), rel=1e-4)
    saved = [{**r, "files": [34_000 + 15_000 * (i % 2) for i in range(20)]} for r in told]
    points = charts.sizes(compared(write_run(tmp_path / "saved", saved)))["points"]
    assert [p["x"] for p in points] == [34_000, 49_000]  # the files themselves


def test_sizes_of_files_are_read_from_the_folder_of_an_older_run(tmp_path):
    folder = write_run(tmp_path / "r", results(seeds=(0,), labels=["A"]))
    models = folder / "cells" / "000" / "models"
    models.mkdir()
    for i in range(20):
        (models / f"client-{i:03d}.safetensors").write_bytes(b"x" * (100 + i))
    (run,) = load_runs([folder])
    assert run.results[0]["files"] == list(range(100, 120))


def test_centers_and_histograms_of_the_first_seed(tmp_path):
    panels = charts.weights(compared(write_run(tmp_path / "r", results())))["panels"]
    assert len(panels) == len(METHODS) * 2 * len(LAYERS)
    first = panels[0]
    assert (first["client"], first["bits"], first["layer"]) == (0, "2-bit", LAYERS[0])
    assert first["epochs"] == [2.0 * r for r in range(1, 11)]
    assert np.array(first["centers"]).shape == (10, 4)
    assert first["histogram"]["epoch"] == 18  # the round that told its weights
    assert first["histogram"]["centers"] == first["centers"][8]
    assert len(first["histogram"]["counts"]) == 200


def test_short_ways_of_centers_are_magnified_but_never_meet():
    still = np.array([[-1.0, 0.0, 1.0]] * 3)
    assert charts._magnified(still) == 1
    moved = still.copy()
    moved[0, 1] = 0.03  # 0.4 gaps leave room for ten times as far, not for twenty
    assert charts._magnified(moved) == 10
    moved[0, 1] = 0.3
    assert charts._magnified(moved) == 1
    assert charts._magnified(np.array([[0.5], [0.4]])) == 1  # one center has no neighbor to measure by


def test_diagnostics_are_drawn_whatever_they_are_called(tmp_path):
    told = results(seeds=(0, 1))
    for r in told:
        for at in r["lines"]:
            at["diagnostics"] = {"G_x": 10.0 ** -at["round"], "kappa <b>": 2.0, "words": "no number", "gap": None}
    del told[0]["lines"][0]["diagnostics"]
    told[1]["lines"][3]["diagnostics"]["kappa <b>"] = float("nan")
    run = write_run(tmp_path / "r", told)
    small = charts.diagnostics(compared(run))
    assert [(d["y"], d["log"]) for d in small] == [("G x", True), ("kappa <b>", False), ("dead centers", False)]
    assert small[0]["lines"][0]["x"][0] == 4  # the round that one seed does not tell is left out
    assert small[1]["lines"][0]["y"][2] is None  # not a number
    assert "Diagnostics" in read_page(run).text
    pictures = figures.report_pictures(compared(run), {f"diagnostics-{k}": d for k, d in enumerate(small)}, "")
    assert sorted(pictures) == ["diagnostics.png", "diagnostics.svg"]


def test_an_average_is_drawn_with_its_bound(tmp_path):
    told = results(seeds=(0,), labels=["Local"])
    for at in told[0]["lines"]:
        at["diagnostics"] = {"step": 5 * at["round"], "G2_average": 0.5, "G2_bound": 2000.0}
    chart, dead = charts.diagnostics(compared(write_run(tmp_path / "r", told)))
    assert dead["y"] == "dead centers"
    assert (chart["y"], chart["log"]) == ("G2 average, its bound above", True)
    assert [line["y"][-1] for line in chart["lines"]] == [0.5, 2000.0]


def test_colors_belong_to_methods_and_dashes_to_runs(tmp_path):
    a = write_run(tmp_path / "a", results())
    b = write_run(tmp_path / "b", results(labels=["Local", "New"]))
    c = compared(a, b)
    assert c.families == (*METHODS, "New")
    assert c.variants == ("a", "b")
    by_label = {s.label: s for s in c.series}
    assert by_label["Local (a)"].color == by_label["Local (b)"].color
    assert by_label["Local (a)"].dash != by_label["Local (b)"].dash
    many = compared(write_run(tmp_path / "m", results(seeds=(0,), labels=[f"m{k}" for k in range(20)])))
    assert len({(s.color, s.dash) for s in many.series}) == 20


def luminance(color):
    v = np.array([int(color[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    v = np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
    return v @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize(("colors", "background"), [(charts.LIGHT, "#ffffff"), (charts.DARK, "#14171c")])
def test_colors_stand_out_from_the_page(colors, background):
    """WCAG asks for 3:1 for parts of graphics."""
    for color in colors:
        low, high = sorted((luminance(color), luminance(background)))
        assert (high + 0.05) / (low + 0.05) >= 3, color


# --- files ---


def test_a_report_is_complete_and_the_same_every_time(tmp_path):
    told = results()
    told[0]["data_note"] = "JPEG copy of cifar10"
    run = write_run(tmp_path / "r", told)
    target = write_report([run])
    assert target == run / "report" / "index.html"
    pictures = [f"{name}.{kind}" for name in ("accuracy", "clients", "sizes", "weights") for kind in ("png", "svg")]
    found = sorted(p.name for p in target.parent.iterdir())
    assert found == sorted([*pictures, "index.html", "table.csv", "table.md", "table.tex"])
    for name in pictures:
        path = target.parent / name
        if name.endswith("png"):
            with Image.open(path) as image:
                image.load()
                assert min(image.size) > 300
        else:
            assert ET.parse(path).getroot().tag.endswith("svg")
    head, _, *rows = [text for text in (target.parent / "table.md").read_text().splitlines() if "|" in text]
    assert head.startswith("| method | accuracy % | 2-bit | 3-bit |")
    assert [row.split(" | ")[0] for row in rows] == [f"| {label}" for label in METHODS]
    assert (target.parent / "table.tex").read_text().count(r"\\") == 4
    numbers = list(csv.DictReader(io.StringIO((target.parent / "table.csv").read_text())))
    last = [r["lines"][-1]["test"] for r in told if r["label"] == "Local"]
    assert float(numbers[1]["mean"]) == pytest.approx(100 * np.mean(last))
    shown = Page(target.read_text())
    assert shown.text.count("JPEG copy of cifar10.") == 5  # next to the table and every figure
    assert f"{100 * np.mean(last):.1f} ± " in shown.text
    before = {p.name: p.read_bytes() for p in target.parent.iterdir()}
    assert write_report([run]) == target
    assert {p.name: p.read_bytes() for p in target.parent.iterdir()} == before


def test_marks_of_paired_significance_are_explained(tmp_path):
    (form,) = forms.forms(load_runs([write_run(tmp_path / "r", results())]))
    assert "***</td>" in form.html
    assert "*** p < 0.001" in form.legend
    assert "***" in form.markdown
    assert "$^*$$^*$$^*$" in form.latex


def test_the_page_asks_for_nothing(tmp_path):
    """No address in any attribute but links to files beside it, and a policy that forbids requests."""
    shown = read_page(write_run(tmp_path / "r", results()))
    assert not {"img", "link", "iframe", "object", "embed"} & set(shown.tags)
    for tag, attributes in shown.attributes:
        assert "src" not in attributes
        if "href" in attributes:
            assert (tag, attributes["href"]) == ("a", "table.md")
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": page.POLICY}) in shown.attributes
    for kind in ("js", "css"):
        text = (files("qupel.report") / f"page.{kind}").read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"://|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", text)


# --- runs of every kind ---


def test_labels_are_text_not_markup(tmp_path):
    label = """</script><b onclick="x">&amp; '"|$_%<!--"""
    run = write_run(tmp_path / "r", results(seeds=(0,), labels=[label, "_hidden"], weights=False))
    write_report([run])  # pictures, too: a $ begins no formula
    shown = read_page(run)
    assert "b" not in shown.tags
    assert shown.tags.count("script") == 2
    assert shown.data["series"][0]["label"] == label
    assert label in shown.text


def test_a_run_that_is_not_finished_says_so(tmp_path):
    told = results()
    run = write_run(tmp_path / "r", told)
    for cell in ("000", "004", "006", "007", "008"):  # one seed of the first, one of the second, all of the third
        (run / "cells" / cell / "result.json").unlink()
    shown = read_page(run)
    assert "4 of 9 cells are finished" in shown.text
    assert [s["label"] for s in shown.data["series"]] == ["QuPeL", "Local"]
    buttons = [a["data-index"] for tag, a in shown.attributes if tag == "button" and "data-index" in a]
    assert buttons == ["0", "1"]  # what is not there is not switched


def test_colors_stay_while_a_run_goes_on(tmp_path):
    run = write_run(tmp_path / "r", results(seeds=(0,)))
    whole = {s.label: s.color for s in compared(run).series}
    (run / "cells" / "000" / "result.json").unlink()
    assert {s.label: s.color for s in compared(run).series} == {k: whole[k] for k in METHODS[1:]}


def test_a_run_that_is_not_finished_says_so_in_its_settings(tmp_path):
    run = write_run(tmp_path / "r", results(seeds=(0,)))
    (run / "cells" / "002" / "result.json").unlink()
    shown = read_page(run)
    assert "not finished" in shown.text  # in the settings


def test_one_seed_and_one_method(tmp_path):
    run = write_run(tmp_path / "r", [result("QuPeL", 7)])
    shown = read_page(run)
    assert "QuPeL reaches" in shown.text
    assert "±" not in shown.text.replace("mean ± std", "")
    assert "low" not in shown.data["charts"]["accuracy"]["lines"][0]  # no band
    assert not any(a.get("class") == "switches" for _, a in shown.attributes)  # nothing to switch


def test_training_in_one_place(tmp_path):
    told = [result(label, s, clients=1, bits=(2.0,)) for label in ("learned", "k-means") for s in (0, 1)]
    shown = read_page(write_run(tmp_path / "r", told, kind="one"))
    assert "bits/weight" in shown.text
    assert "clients" not in shown.data["charts"]
    assert "Every client" not in shown.text


def test_old_results_without_centers(tmp_path):
    shown = read_page(write_run(tmp_path / "r", results(weights=False)))
    assert "weights" not in shown.data["charts"]
    assert "Not shown: no client is quantized" in shown.text


def test_thousands_of_clients_have_no_list(tmp_path):
    told = results(clients=3000)
    for r in told:
        for at in r["lines"]:
            del at["clients"]
    shown = read_page(write_run(tmp_path / "r", told))
    assert "too many of them, or the runs keep no list" in shown.text
    assert "nan" not in shown.text
    assert [p["name"] for p in shown.data["charts"]["sizes"]["points"]] == list(METHODS)


def test_values_that_are_no_numbers(tmp_path):
    told = results()
    for at in told[0]["lines"][3:]:
        at["test"] = at["train_loss"] = float("nan")
        at["clients"]["test"] = [float("nan")] * 10 + [None] * 10
    shown = read_page(write_run(tmp_path / "r", told))  # the page's numbers are JSON without NaN
    first = shown.data["charts"]["accuracy"]["lines"][0]
    assert first["y"][3:] == [None] * 7
    assert None not in first["y"][:3]
    assert "nan" not in shown.text.lower()


def test_runs_on_the_same_data_share_a_table(tmp_path):
    a = write_run(tmp_path / "a", results(labels=["QuPeL"]))
    b = write_run(tmp_path / "b", results(labels=["Local"]))
    other = write_run(tmp_path / "c", results(labels=["Local"]), data={"name": "mnist", "folder": None})
    together = forms.forms(load_runs([a, b, other]))
    assert [form.title for form in together] == ["After the last round: a, b", "After the last round: c"]
    assert "Local (b)" in together[0].html
    assert together[0].markdown.count("***") > 0  # paired across the runs
    shown = read_page(a, b, other)
    assert shown.data["series"][1]["label"] == "Local (b)"
    assert any(attributes.get("data-kind") == "variant" for _, attributes in shown.attributes)


def test_a_run_given_twice_counts_once_and_equal_names_are_told_apart(tmp_path):
    a = write_run(tmp_path / "x" / "r", results(labels=["A"]))
    b = write_run(tmp_path / "y" / "r", results(labels=["A"]))
    assert [run.name for run in load_runs([a, b, a])] == ["x/r", "y/r"]


def test_a_reproduced_table_has_the_papers_numbers_beside_ours(tmp_path):
    labels = [
        f"{row} @ {bits}" for row in ("QuPeL, paper's method", "Local, paper's method") for bits in ("2 bits", "3 bits")
    ]
    run = write_run(tmp_path / "r", results(labels=labels))
    (run / "reproduce.json").write_text(
        json.dumps({"table": "table2", "scale": "smoke", "rows": ["QuPeL, paper's method"]})
    )
    (form,) = forms.forms(load_runs([run]), FORMS)
    assert "77.88 ± 0.16" in form.html
    ours = np.mean([100 * r["lines"][-1]["test"] for r in results(labels=labels[:1])])
    assert f"{ours:.2f} ± " in form.html
    assert f"{ours - 77.88:+.2f}" in form.html
    c = compared(run)
    assert c.families == ("QuPeL, paper's method", "Local, paper's method")
    assert c.variants == ("2 bits", "3 bits")
    assert "77.88" in form.latex
    shown = read_page(run)
    assert "Table 2" in shown.text
    assert "scale smoke" in shown.text


def test_several_runs_are_written_beside_the_first(tmp_path):
    a, b = (write_run(tmp_path / name, [result("A", 0, rounds=3, clients=4, weights=False)]) for name in "ab")
    (b / "config.json").write_text((b / "config.json").read_text().replace("digits", "mnist"))
    assert write_report([a, b]) == a / "comparison" / "index.html"
    assert {"table.csv", "table-2.csv", "sizes.png"} <= {p.name for p in (a / "comparison").iterdir()}


@pytest.mark.parametrize("kind", ["nothing", "empty", "config only", "other config", "broken result"])
def test_what_is_no_run_is_said_in_one_line(tmp_path, kind):
    folder = tmp_path / "r"
    if kind != "nothing":
        folder.mkdir()
    if kind == "other config":
        (folder / "config.json").write_text("[1]")
    if kind in {"config only", "broken result"}:
        write_run(tmp_path / "w", [result("A", 0)])
        folder.rmdir()
        (tmp_path / "w").rename(folder)
        (cell,) = folder.glob("cells/*/result.json")
        cell.unlink() if kind == "config only" else cell.write_text('{"label"')
    with pytest.raises(UserError) as caught:
        write_report([folder])
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_line_is_what_the_engine_writes():
    """These tests' lines have the keys of real ones, so that they cannot pass on a format that is gone."""
    from tiny import make_job, recipe, run_inline

    finished, _ = run_inline(make_job(recipe(), bits=(1, 2), evaluate_every=1))
    real = finished.lines[5]
    made = line("A", 0, 5, 6, 2)
    assert set(made) <= set(real)
    assert set(made["clients"]) == set(real["clients"])
    assert set(made["weights"][0]) == set(real["weights"][0])
    (mine,), (theirs,) = (list(v["weights"][0]["histograms"].values())[:1] for v in (made, real))
    assert set(mine) == set(theirs)


# --- the command ---


def test_the_command_opens_the_page(tmp_path):
    """A browser that writes down what it is asked to show."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > "{tmp_path}/shown"\n')
    browser.chmod(0o755)
    run = write_run(tmp_path / "r", [result("A", 0, rounds=3, clients=4, weights=False)])
    command = [sys.executable, "-m", "qupel", "report", str(run), "--open", "--out", str(tmp_path / "o")]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == f"written to {tmp_path / 'o' / 'index.html'}"
    assert (tmp_path / "shown").read_text() == (tmp_path / "o" / "index.html").as_uri()
    assert not (run / "report").exists()


def test_the_command_refuses_what_is_no_run(tmp_path, monkeypatch, capsys):
    with warnings.catch_warnings():  # typer imports names that its dependency click has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from qupel import cli
    monkeypatch.setattr(sys, "argv", ["qupel", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is no run directory: it has no config.json\n"
