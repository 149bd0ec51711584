"""What a run costs: the interval of a median, energy from a made folder of counters, stretches by turns."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import binom

from qupel.deploy import energy
from qupel.deploy.timing import LEAST, MOST, Stretch, costs, middle, stretch


@pytest.mark.parametrize("n", [6, 7, 8, 9, 20, 21, 200, 2000])
def test_the_interval_is_the_narrowest_of_order_statistics_that_has_95_percent(n):
    """Of the values 1 ... n the ends are the ranks; their coverage from scipy's distribution."""
    told = middle(np.random.default_rng(n).permutation(n) + 1)
    rank = int(told.low)
    assert told.high == n + 1 - rank
    assert told.median == (n + 1) / 2
    assert 1 - 2 * binom.cdf(rank - 1, n, 0.5) >= 0.95 > 1 - 2 * binom.cdf(rank, n, 0.5)


def test_the_interval_covers_the_true_median_of_skewed_times():
    """20 values of a lognormal distribution, whose median is 1: 95.9 % by the binomial sum, here of 4,000 draws."""
    drawn = np.exp(np.random.default_rng(0).normal(size=(4000, MOST)))
    covered = [m.low <= 1 <= m.high for m in map(middle, drawn)]
    assert abs(np.mean(covered) - (1 - 2 * binom.cdf(5, MOST, 0.5))) < 4 * np.sqrt(0.959 * 0.041 / 4000)


def test_five_values_have_no_interval():
    with pytest.raises(ValueError, match="needed are 6"):
        middle([1, 2, 3, 4, 5])
    assert middle([3, 1, 2, 6, 5, 4]).high == 6


# --- energy ---


def zone(folder, name: str, label: str, now: int, most: int = 262_143_328_850):
    (folder / name).mkdir(parents=True)
    for what, value in (("name", label), ("energy_uj", now), ("max_energy_range_uj", most)):
        (folder / name / what).write_text(f"{value}\n")
    return folder / name / "energy_uj"


@pytest.fixture
def powercap(tmp_path, monkeypatch):
    """Two processors, and what must not be counted with them: parts, the same once more, the whole machine."""
    monkeypatch.setattr(energy, "ZONES", tmp_path)
    zone(tmp_path, "intel-rapl:1", "package-1", 0)
    for i, (name, label) in enumerate(
        {"intel-rapl:0:0": "core", "intel-rapl-mmio:0": "package-0", "intel-rapl:2": "psys", "dtpm": "package"}.items()
    ):
        zone(tmp_path, name, label, i)
    return zone(tmp_path, "intel-rapl:0", "package-0", 999_000, most=1_000_000)


def burn(counter, microjoules: int, most: int = 1_000_000) -> None:
    counter.write_text(f"{(int(counter.read_text()) + microjoules) % most}\n")


def test_energy_of_a_run_is_what_the_processors_counters_grew_by(powercap, tmp_path):
    other = tmp_path / "intel-rapl:1" / "energy_uj"

    def run():
        burn(powercap, 1500)  # begins anew after the first
        burn(other, 700, most=10**9)

    before = energy.counters()
    assert before == {"intel-rapl:0": (999_000, 1_000_000), "intel-rapl:1": (0, 262_143_328_850)}
    run()
    assert energy.joules(before, energy.counters()) == pytest.approx(2.2e-3)
    assert stretch(run, 0.01).joules == pytest.approx(2.2e-3)


def test_no_energy_is_told_where_it_cannot_be_read(powercap, tmp_path, monkeypatch):
    before = energy.counters()
    powercap.write_text("nonsense")
    assert energy.counters() == {}
    assert energy.joules(before, energy.counters()) is None
    assert stretch(lambda: None, 0).joules is None
    powercap.unlink()
    powercap.mkdir()  # what not even root can read
    assert energy.counters() == {}
    monkeypatch.setattr(energy, "ZONES", tmp_path / "none")
    assert energy.counters() == {}
    assert energy.joules({}, {}) is None


# --- stretches ---


def test_stretches_go_by_turns_and_the_first_are_not_counted():
    """A machine that slows down over time: both numbers of inputs see the same, and neither its warming up."""
    asked = []

    def timed(batch, seconds):
        asked.append(batch)
        round_ = (len(asked) - 1) // 2
        return Stretch(1000.0 if round_ == 0 else batch * (100.0 + round_), None)

    one, many = costs(timed, (1, 64), 0.1)
    assert asked == [1, 64] * (MOST + 1)
    assert (one.seconds.low, one.seconds.median, one.seconds.high) == (106, 110.5, 115)
    assert many.seconds.median == 64 * one.seconds.median
    assert one.joules is None


def test_slow_runs_get_fewer_stretches():
    asked = []

    def timed(batch, seconds):
        asked.append(batch)
        return stretch(partial(sum, range(200_000)), seconds)

    (found,) = costs(timed, (1,), 1e-6)
    assert len(asked) == LEAST + 1
    assert 0 < found.seconds.low <= found.seconds.median <= found.seconds.high
