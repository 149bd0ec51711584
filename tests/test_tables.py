"""The comparison: means, spreads and tests by hand; rounds are chosen by validation data only."""

import csv
import io
import math

import pytest

from qupel.report import tables


def line(round, test, *, phase=0, method="qupel", clients=None, validation=None, bits=2.0, **more):
    found = {
        "round": round, "phase": phase, "method": method, "test": test, "bits": bits, "model_bytes": 1000.0,
        "upload_bytes": 0, **more,
    }  # fmt: skip
    if clients is not None:
        found["clients"] = {"test": clients, "bits": [2.0, 3.0] * (len(clients) // 2), "bytes": [1000] * len(clients)}
    if validation is not None:
        found["validation"] = validation
    return found


def cell(label, seed, *lines, seconds=1.0):
    return {"label": label, "seed": seed, "seconds": seconds, "lines": list(lines)}


def test_a_row_by_hand():
    results = [
        cell("A", 0, line(1, 0.2), line(2, 0.5, clients=[0.4, 0.6], upload_bytes=40), seconds=3.0),
        cell("A", 1, line(1, 0.9), line(2, 0.7, clients=[0.7, 0.7], upload_bytes=80), seconds=5.0),
    ]
    (row,) = tables.rows(results)
    assert row.mean == pytest.approx(60)
    assert row.std == pytest.approx(math.sqrt(((50 - 60) ** 2 + (70 - 60) ** 2) / 1))  # over seeds, n - 1
    assert row.worst == pytest.approx((40 + 70) / 2)  # the worst tenth, at least one client, averaged over seeds
    assert row.spread == pytest.approx((10 + 0) / 2)  # over clients
    assert row.by_bits == {2.0: pytest.approx(55), 3.0: pytest.approx(65)}
    assert (row.seeds, row.seconds, row.upload_bytes, row.bits) == (2, 4.0, 40, 2)
    assert (row.p, row.gain, row.selected, row.before_tuning) == (None, None, None, None)


def test_worst_tenth_of_many_clients():
    scores = [k / 20 for k in range(20)]  # 0 .. 0.95
    (row,) = tables.rows([cell("A", 0, line(1, 0.5, clients=scores[::-1]))])
    assert row.worst == pytest.approx(100 * (0 + 0.05) / 2)
    assert row.std == 0


def test_the_last_round_counts_not_the_best():
    (row,) = tables.rows([cell("A", 0, line(1, 0.99, clients=[0.99, 0.99]), line(2, 0.5, clients=[0.5, 0.5]))])
    assert row.mean == 50


def test_selection_by_validation_only():
    """The best round on validation data, although the others are better on test data."""
    lines = [
        line(1, 0.90, validation=0.1),
        line(2, 0.60, validation=0.8),
        line(3, 0.95, validation=0.7),
    ]
    (row,) = tables.rows([cell("A", 0, *lines)])
    assert row.selected == pytest.approx(60)
    assert row.mean == pytest.approx(95)


def test_selection_takes_only_rounds_that_ship_what_the_last_one_ships():
    """A full-precision warm-up is not a round one could deploy at 2 bits."""
    lines = [line(1, 0.9, validation=0.9, bits=32.0, method="fedavg"), line(2, 0.5, validation=0.4)]
    (row,) = tables.rows([cell("A", 0, *lines)])
    assert row.selected == pytest.approx(50)
    assert tables.rows([cell("A", 0, line(1, 0.5))])[0].selected is None


def test_p_value_by_hand():
    """Seeds differ by 1.5, 2.5 and 5 points in the mean of their clients: t = 3 / (sd / sqrt 3), sd = sqrt(3.25);
    two-sided p with 2 degrees of freedom, however many clients there are."""
    ours = [cell("A", s, line(1, 0.5, clients=c)) for s, c in enumerate(([0.51, 0.52], [0.53, 0.52], [0.58, 0.52]))]
    theirs = [cell("B", s, line(1, 0.5, clients=[0.50, 0.50])) for s in range(3)]
    first, second = tables.rows([*ours, *theirs])
    t = 3 / math.sqrt(3.25 / 3)
    assert second.gain == pytest.approx(3)
    assert second.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)
    half = math.sqrt(2 * 0.95**2 / (1 - 0.95**2)) * math.sqrt(3.25 / 3)  # Student's 97.5 % point with 2 degrees
    assert (second.low, second.high) == pytest.approx((3 - half, 3 + half))
    assert (first.p, first.gain, first.low) == (None, None, None)
    flipped = tables.rows([*ours, *theirs], reference="B")
    assert (flipped[0].gain, flipped[0].p) == pytest.approx((-3, second.p))
    assert flipped[1].gain is None


def test_one_seed_has_no_p_however_many_clients():
    ours = cell("A", 0, line(1, 0.5, clients=[0.51 + k / 100 for k in range(20)]))
    row = tables.rows([ours, cell("B", 0, line(1, 0.5, clients=[0.5] * 20))])[1]
    assert (row.gain, row.low, row.p) == (pytest.approx(10.5), None, None)


def test_without_clients_seeds_are_compared_by_their_means():
    a = [cell("A", s, line(1, 0.5 + s / 10)) for s in range(3)]
    b = [cell("B", s, line(1, 0.4)) for s in range(3)]
    row = tables.rows([*a, *b])[1]
    assert row.gain == pytest.approx(20)
    assert row.p is not None
    for line_, who in ((a[0]["lines"][0], [0, 1]), (b[0]["lines"][0], [0, 7])):  # other clients were there to be judged
        line_["clients"] = {"test": [0.9, 0.9], "bits": [2.0, 2.0], "bytes": [1, 1], "number": who}
    assert tables.rows([*a, *b])[1].gain == pytest.approx(20)


def test_pairs_are_matched_by_seed():
    a = [cell("A", s, line(1, 0.5, clients=[0.5 + s / 100, 0.6 + s / 10])) for s in (0, 1)]
    b = [cell("B", s, line(1, 0.5, clients=[0.5 + s / 100, 0.6 + s / 10])) for s in (1, 0)]  # another order
    assert tables.rows([*a, *b])[1].gain == pytest.approx(0)
    assert tables.rows([*a, *b])[1].p == 1.0
    lone = [cell("B", 7, line(1, 0.5, clients=[0.1, 0.2]))]
    assert tables.rows([*a, *lone])[1].p is None


@pytest.mark.parametrize(
    ("learned", "tuned"),
    [
        ({"method": "qupel", "quantizer": "prox"}, {"method": "qupel", "quantizer": "frozen"}),
        ({"method": "qupel"}, {"method": "finetune"}),  # as results of 0.1 have it
    ],
)
def test_before_tuning_is_the_end_of_the_phase_before(learned, tuned):
    lines = [
        line(1, 0.3, phase=0, method="fedavg", float_test=0.3),
        line(2, 0.4, phase=1, float_test=0.8, **learned),
        line(3, 0.55, phase=1, float_test=0.9, **learned),
        line(4, 0.6, phase=2, float_test=0.6, **tuned),
        line(5, 0.7, phase=2, float_test=0.7, **tuned),
    ]
    (row,) = tables.rows([cell("A", 0, *lines)])
    assert row.before_tuning == pytest.approx(55)
    assert row.float_mean == pytest.approx(90)  # fine-tuning has no float model
    assert row.mean == pytest.approx(70)
    (row,) = tables.rows([cell("A", 0, *lines[:3])])
    assert row.before_tuning is None


def test_float_mean_is_the_model_before_quantization():
    (row,) = tables.rows([cell("A", 0, line(1, 0.5, float_test=0.8))])
    assert row.float_mean == pytest.approx(80)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (227_416, "227.4 kB"), (3_193_626, "3.2 MB"), (5e9, "5.0 GB")],
)
def test_sizes(count, text):
    assert tables.size(count) == text


def test_tables_and_markdown():
    results = [
        cell("A", 0, line(1, 0.5, clients=[0.5, 0.6], validation=0.5)),
        cell("B", 0, line(1, 0.5, clients=[0.4, 0.1], validation=0.5)),
    ]
    rows = tables.rows(results)
    head, body = tables.federation_table(rows)
    assert head[:7] == ["method", "accuracy %", "selected %", "2-bit", "3-bit", "worst 10%", "spread"]
    assert head[7:] == ["floor", "gain", "95 % interval", "p"]
    assert body[0] == ["A", "50.0", "50.0", "50.0", "60.0", "50.0", "5.0", "1.0 kB", "", "", ""]
    assert body[1][:2] == ["B", "50.0"]  # one seed has no spread to tell
    assert body[1][8] == "+30.0"
    text = tables.markdown(head, body).splitlines()
    assert [r.count("|") for r in text] == [12] * 4
    narrow = tables.federation_table(rows, intervals=False)
    assert (narrow[0][8:], narrow[1][1][8:]) == (["gain", "p"], ["+30.0", ""])
    head, body = tables.training_table(rows)
    assert body[0] == ["A", "50.00", "-", "50.00", "2", "1.0 kB"]


def test_sizes_are_those_of_the_files_where_all_methods_have_them():
    results = [cell(name, 0, line(1, 0.5, clients=[0.5, 0.6])) for name in "AB"]
    files = [{**r, "files": [2000, 4000]} for r in results]
    for made, name, shown in ((files, "file", "3.0 kB"), ([files[0], results[1]], "floor", "1.0 kB")):
        for head, body in (tables.federation_table(tables.rows(made)), tables.training_table(tables.rows(made))):
            assert [cells[head.index(name)] for cells in body] == [shown] * 2
    assert "models of 3.0 kB" in tables.sentence(tables.rows(files[:1]))


def test_two_seeds_tell_their_spread():
    results = [cell("A", seed, line(1, 0.5 + seed / 50, clients=[0.5, 0.6])) for seed in (0, 1)]
    rows = tables.rows(results)
    assert tables.federation_table(rows)[1][0][1] == "51.0 ± 1.4"
    assert tables.training_table(rows)[1][0][3] == "51.00 ± 1.41"


def test_what_is_no_number_is_a_dash():
    nan = math.nan
    results = [cell("A", 0, line(1, nan, clients=[nan, 0.5])), cell("B", 0, line(1, 0.5, clients=[0.5, 0.6]))]
    rows = tables.rows(results)
    head, body = tables.federation_table(rows)
    assert "nan" not in tables.markdown(head, body)
    assert body[0][1] == "-"
    assert tables.sentence(rows) == ""


def test_latex_and_markdown_keep_special_characters_apart():
    head, body = ["method", "50%"], [["a|b & $x_1$ ~^\\{", "1.0 ± 0.2"]]
    assert tables.markdown(head, body).splitlines()[2] == "| a\\|b & $x_1$ ~^\\\\{ | 1.0 ± 0.2 |"
    tex = tables.latex(head, body)
    assert r"method & 50\% \\" in tex
    assert r"a|b \& \$x\_1\$ \textasciitilde{}\textasciicircum{}\textbackslash{}\{ & 1.0 $\pm$ 0.2 \\" in tex


def test_csv_has_every_number_in_full():
    results = [cell("A, the first", 0, line(1, 1 / 3, clients=[1 / 3, 0.6]))]
    (first,) = csv.DictReader(io.StringIO(tables.as_csv(tables.told_rows(results))))
    assert first["label"] == "A, the first"
    assert float(first["mean"]) == pytest.approx(100 / 3, abs=1e-12)
    assert (float(first["3-bit"]), first["p"]) == (60, "")


def test_the_sentence_says_what_the_numbers_say():
    def row(label, seed, test, **more):
        return cell(label, seed, line(1, test + seed / 100, clients=[test + seed / 100] * 2, **more))

    results = [row("A", s, 0.6, upload_bytes=8000) for s in range(3)]
    results += [row("B", s, 0.5 + (s - 1) / 1000) for s in range(3)]
    results += [row("C", s, 0.7 + (s - 1) / 10) for s in range(3)]
    assert tables.sentence(tables.rows(results)) == (
        "A ends 10.0 points above B, 10.0 points below C (not significant), with models 1/8 of the full-precision size."
    )
    alone = tables.sentence(tables.rows([r for r in results if r["seed"] == 0]))
    assert alone.startswith("A ends 10.1 points above B (not tested), ")  # one seed
    plain = [cell(label, 0, line(1, test, clients=[test] * 2)) for label, test in (("A", 0.6), ("B", 0.5))]
    assert "size" not in tables.sentence(tables.rows(plain))  # nothing is smaller here
    assert tables.sentence(tables.rows(plain[:1])) == "A reaches 60.0 % with models of 1.0 kB."
