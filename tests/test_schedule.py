"""Schedules against their formulas; relative prox strengths mean what they say, whatever the budget."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qupel.core.prox import prox_centers, prox_weights
from qupel.core.schedule import Clock, Follow, Schedule, Travel, center_pull, half_gap, weight_pull


def test_epochs_count_from_one():
    assert [Clock(step, 10, 3).epoch for step in range(7)] == [1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule(0.5), [0.5, 0.5, 0.5, 0.5]),
        (Schedule(growth=1e-4), [1e-4, 2e-4, 3e-4, 4e-4]),  # the paper's lambda(t) = 1e-4 t
        (Schedule(0.1, decay=0.99), [0.1, 0.1 * 0.99, 0.1 * 0.99**2, 0.1 * 0.99**3]),
        (Schedule(1.0, drops=(1, 3)), [1.0, 0.1, 0.1, 0.01]),  # a drop at k holds from k + 1 on
        (Schedule(1.0, drops=(2,), factor=0.5), [1.0, 1.0, 0.5, 0.5]),
        (Schedule(1.0, cosine=2), [1.0, 0.5, 0.0, 0.0]),
        (Schedule(1.0, growth=1.0, decay=2.0), [2.0, 6.0, 16.0, 40.0]),
    ],
)
def test_by_hand(schedule, values):
    assert [schedule(e) for e in (1, 2, 3, 4)] == pytest.approx(values, abs=1e-15)


schedules = st.builds(
    Schedule,
    start=st.floats(0.001, 1),
    growth=st.floats(0, 0.1),
    decay=st.floats(0.5, 1),
    drops=st.lists(st.integers(1, 30), max_size=3).map(tuple),
    factor=st.floats(0.05, 1),
    cosine=st.integers(0, 40),
    offset=st.integers(0, 5),
)


@settings(max_examples=100, deadline=None)
@given(schedules, st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_later_is_the_same_curve_moved(schedule, a, b, epoch):
    assert schedule.later(a)(epoch) == schedule(epoch + a)
    assert schedule.later(a).later(b) == schedule.later(a + b)


@settings(max_examples=100, deadline=None)
@given(schedules, st.integers(1, 60))
def test_formula(schedule, epoch):
    e = epoch + schedule.offset
    expected = (schedule.start + schedule.growth * e) * schedule.decay ** (e - 1)
    for drop in schedule.drops:
        expected *= schedule.factor if e > drop else 1
    if schedule.cosine:
        expected *= (1 + math.cos(math.pi * min(1, (e - 1) / schedule.cosine))) / 2
    assert schedule(epoch) == pytest.approx(expected, rel=1e-12, abs=1e-15)


# --- relative strengths ---


@settings(max_examples=100, deadline=None)
@given(
    schedules,
    st.floats(0.01, 5),
    st.integers(1, 60),
    st.integers(1, 9),
    st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=8).map(sorted),
)
def test_travel_is_the_total_way_in_half_gaps(eta1, travel, steps, epoch_steps, centers):
    """sum over the phase of t/2 = travel * half-gap, for any eta1 that is not 0 throughout."""
    assume(eta1(1) > 1e-9)
    c = torch.tensor(centers)
    pulls = [weight_pull(Travel(travel), eta1, Clock(s, steps, epoch_steps), c) for s in range(steps)]
    gap = float(c[-1] - c[0]) / (len(c) - 1)
    assert sum(pulls) / 2 == pytest.approx(travel * gap / 2, rel=1e-6, abs=1e-12)
    # and each step's share grows as eta1 * epoch
    clocks = [Clock(s, steps, epoch_steps) for s in range(steps)]
    ramp = [eta1(k.time) * k.epoch for k in clocks]
    i, j = 0, steps - 1
    assert pulls[i] * ramp[j] == pytest.approx(pulls[j] * ramp[i], rel=1e-6, abs=1e-12)


def test_a_travel_of_one_brings_the_farthest_weight_to_its_center():
    c = torch.tensor([-1.0, 0.0, 1.0])
    x = torch.tensor([0.5, -0.4999, 0.25, -1.5])  # half-gap 0.5
    for step in range(24):
        x = prox_weights(x, c, weight_pull(Travel(1.0001), Schedule(0.1, decay=0.9), Clock(step, 24, 5), c))
    assert x.tolist() == [0.0, 0.0, 0.0, -1.0]


def test_travel_with_a_step_size_of_zero_moves_nothing():
    assert weight_pull(Travel(1.0), Schedule(0.0), Clock(0, 10, 2), torch.tensor([0.0, 1.0])) == 0.0


def test_absolute_strength_is_eta1_times_lambda():
    clock = Clock(7, 100, 2)  # epoch 4
    assert weight_pull(Schedule(growth=1e-3), Schedule(0.5), clock, torch.zeros(2)) == 0.5 * 4e-3
    assert center_pull(Schedule(growth=1e-3), Schedule(0.25), clock, torch.zeros(2), 9) == 0.25 * 4e-3


@pytest.mark.parametrize("m", [2, 4, 8])
def test_follow_bounds_the_way_of_an_average_center(m):
    """All weights far away on one side: a center with n/m weights moves exactly `follow` half-gaps."""
    c = torch.arange(float(m)).double()
    n, follow = 64, 0.05
    x = c.repeat_interleave(n // m) + 0.4  # n/m weights each, all above their center
    t = center_pull(Follow(follow), Schedule(1e-4), Clock(0, 1, 1), c, n)
    moved = prox_centers(c, c, x, t)
    torch.testing.assert_close(moved - c, torch.full_like(c, follow * 0.5))


def test_follow_never_passes_the_weights():
    c = torch.tensor([0.0, 1.0]).double()
    x = torch.tensor([0.01] * 30 + [1.02] * 30).double()
    moved = prox_centers(c, c, x, center_pull(Follow(10.0), Schedule(1e-4), Clock(0, 1, 1), c, 60))
    assert moved.tolist() == [x[0], x[-1]]


def test_half_gap():
    assert half_gap(torch.tensor([-1.0, 0.0, 3.0])) == 1.0
    assert half_gap(torch.tensor([2.0])) == 0.0
