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
    assert (row.seeds, row.seconds, row.upload_bytes, row.bits) == (2, 4.0, 80, 2)
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


def test_paired_p_value_by_hand():
    """Differences 1, 2, 3, 4 points: t = 2.5 / (sd / 2), sd = sqrt(5/3); two-sided p with 3 degrees of freedom."""
    ours = cell("A", 0, line(1, 0.5, clients=[0.51, 0.52]))
    ours2 = cell("A", 1, line(1, 0.5, clients=[0.53, 0.54]))
    theirs = cell("B", 0, line(1, 0.5, clients=[0.50, 0.50]))
    theirs2 = cell("B", 1, line(1, 0.5, clients=[0.50, 0.50]))
    first, second = tables.rows([ours, theirs, ours2, theirs2])
    t = 2.5 / (math.sqrt(5 / 3) / 2)
    # Student's distribution with 3 degrees of freedom in closed form
    cdf = 0.5 + (math.atan(t / math.sqrt(3)) + math.sqrt(3) * t / (3 + t * t)) / math.pi
    assert second.gain == pytest.approx(2.5)
    assert second.p == pytest.approx(2 * (1 - cdf), rel=1e-6)
    assert (first.p, first.gain) == (None, None)
    flipped = tables.rows([ours, theirs, ours2, theirs2], reference="B")
    assert flipped[0].gain == pytest.approx(-2.5)
    assert flipped[1].gain is None


def test_pairs_are_matched_by_seed():
    a = [cell("A", s, line(1, 0.5, clients=[0.5 + s / 100, 0.6 + s / 10])) for s in (0, 1)]
    b = [cell("B", s, line(1, 0.5, clients=[0.5 + s / 100, 0.6 + s / 10])) for s in (1, 0)]  # another order
    assert tables.rows([*a, *b])[1].gain == pytest.approx(0)
    assert tables.rows([*a, *b])[1].p == 1.0
    lone = [cell("B", 7, line(1, 0.5, clients=[0.1, 0.2]))]
    assert tables.rows([*a, *lone])[1].p is None


def test_before_tuning_is_the_end_of_the_phase_before():
    lines = [
        line(1, 0.3, phase=0, method="fedavg"),
        line(2, 0.4, phase=1),
        line(3, 0.55, phase=1),
        line(4, 0.6, phase=2, method="finetune"),
        line(5, 0.7, phase=2, method="finetune"),
    ]
    (row,) = tables.rows([cell("A", 0, *lines)])
    assert row.before_tuning == pytest.approx(55)
    assert row.mean == pytest.approx(70)


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
    assert head == ["method", "accuracy %", "selected %", "2-bit", "3-bit", "worst 10%", "spread", "model", "gain", "p"]
    assert body[0] == ["A", "50.0", "50.0", "50.0", "60.0", "50.0", "5.0", "1.0 kB", "", ""]
    assert body[1][:2] == ["B", "50.0"]  # one seed has no spread to tell
    assert body[1][8] == "+30.0"
    text = tables.markdown(head, body).splitlines()
    assert [r.count("|") for r in text] == [11] * 4
    head, body = tables.training_table(rows)
    assert body[0] == ["A", "50.00", "-", "50.00", "2", "1.0 kB"]


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
    assert tables.sentence(rows, 1000) == ""


def test_marks():
    assert [tables.mark(p) for p in (None, 0.2, 0.05, 0.049, 0.009, 0.0009)] == ["", "", "", "*", "**", "***"]


def test_latex_and_markdown_keep_special_characters_apart():
    head, body = ["method", "50%"], [["a|b & $x_1$ ~^\\{", "1.0 ± 0.2"]]
    assert tables.markdown(head, body).splitlines()[2] == "| a\\|b & $x_1$ ~^\\\\{ | 1.0 ± 0.2 |"
    tex = tables.latex(head, body)
    assert r"method & 50\% \\" in tex
    assert r"a|b \& \$x\_1\$ \textasciitilde{}\textasciicircum{}\textbackslash{}\{ & 1.0 $\pm$ 0.2 \\" in tex


def test_csv_has_every_number_in_full():
    results = [cell("A, the first", 0, line(1, 1 / 3, clients=[1 / 3, 0.6]))]
    (first,) = csv.DictReader(io.StringIO(tables.as_csv(tables.rows(results))))
    assert first["label"] == "A, the first"
    assert float(first["mean"]) == pytest.approx(100 / 3, abs=1e-12)
    assert (float(first["3-bit"]), first["p"]) == (60, "")


def test_the_sentence_says_what_the_numbers_say():
    def row(label, test, clients):
        return cell(label, 0, line(1, test, clients=clients))

    many = [0.5 + k / 1000 for k in range(10)]
    worse = [v - 0.1 - k / 10_000 for k, v in enumerate(many)]
    noisy = [v + (-1) ** k * 0.2 for k, v in enumerate(many)]
    rows = tables.rows([row("A", 0.6, many), row("B", 0.5, worse), row("C", 0.7, noisy)])
    said = tables.sentence(rows, 8000)
    assert said == (
        "A ends 10.0 points above B, 10.0 points below C (not significant), with models 1/8 of the full-precision size."
    )
    assert "size" not in tables.sentence(rows, 1000)  # nothing is smaller here
    assert tables.sentence(rows[:1], 1000) == "A reaches 60.0 % with models of 1.0 kB."
