"""Significance over seeds: closed forms of Student's distribution, and how often chance is taken for an effect."""

import math

import numpy as np
import pytest
from scipy import stats

from qupel.report.significance import Gain, over_seeds, seed_difference


def student_tail(t, freedom):
    """P(|T| > t) in closed form, with tan(a) = t / sqrt(freedom)."""
    a = math.atan(t / math.sqrt(freedom))
    return 1 - {2: math.sin(a), 4: math.sin(a) * (1 + math.cos(a) ** 2 / 2)}[freedom]


@pytest.mark.parametrize("differences", [(1.0, 2.0, 4.5), (-0.3, 0.1, 0.25, -0.9, -0.4)])
def test_p_and_interval_in_closed_form(differences):
    n = len(differences)
    mean = sum(differences) / n
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    gain = over_seeds(dict(enumerate(differences)))
    assert gain.mean == pytest.approx(mean)
    assert gain.p == pytest.approx(student_tail(abs(mean) / error, n - 1), rel=1e-9)
    assert (gain.low + gain.high) / 2 == pytest.approx(mean)
    assert student_tail((gain.high - mean) / error, n - 1) == pytest.approx(0.05, rel=1e-9)


def test_a_seed_counts_once_however_many_clients_it_has():
    rng = np.random.default_rng(0)
    seeds = {s: rng.normal(0.5, 1, clients) for s, clients in enumerate((3, 20, 400))}
    gain = over_seeds({s: seed_difference(d, np.zeros(len(d))) for s, d in seeds.items()})
    assert gain.mean == pytest.approx(np.mean([d.mean() for d in seeds.values()]))
    assert gain == over_seeds({s: float(d.mean()) for s, d in seeds.items()})


def test_clients_are_paired_and_those_without_test_data_left_out():
    assert seed_difference([3.0, math.nan, 5.0], [1.0, 1.0, 4.0]) == pytest.approx(1.5)
    assert seed_difference([math.nan], [1.0]) is None


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ({}, None),
        ({0: None}, None),
        ({0: 2.0}, Gain(2.0)),  # one seed: neither interval nor p
        ({0: 2.0, 1: None}, Gain(2.0)),
        ({0: 0.25, 1: 0.25}, Gain(0.25)),  # equal by accident of rounding: no spread to judge it by
        ({0: 0.0, 1: 0.0}, Gain(0.0, 0.0, 0.0, 1.0)),
    ],
)
def test_where_there_is_nothing_to_test(differences, expected):
    assert over_seeds(differences) == expected


@pytest.mark.parametrize("seeds", [3, 5])
def test_chance_is_taken_for_an_effect_one_time_in_twenty(seeds):
    """No method is better, clients of a seed correlate by 0.15: p < 0.05 in 5 % of 4,000 comparisons of 20 clients a
    seed, and so often the interval leaves 0 out. A test over (seed, client) pairs would say so in a third of them."""
    rng = np.random.default_rng(seeds)
    shared, own = rng.normal(0, math.sqrt(0.15), (4000, seeds, 1)), rng.normal(0, math.sqrt(0.85), (4000, seeds, 20))
    drawn = shared + own
    gains = [over_seeds({s: seed_difference(d, np.zeros(20)) for s, d in enumerate(case)}) for case in drawn]
    rate = np.mean([gain.p < 0.05 for gain in gains])
    assert rate == pytest.approx(0.05, abs=0.012)  # 3.5 standard errors
    assert np.mean([not gain.low <= 0 <= gain.high for gain in gains]) == rate
    assert np.mean(stats.ttest_1samp(drawn.reshape(4000, -1), 0, axis=1).pvalue < 0.05) > 0.25
