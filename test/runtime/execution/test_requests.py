"""Steps in the past, plans between knots, requests and their delay: the parts of the timeline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from thorough import examples

from vla_runtime.execution.history import StepHistory
from vla_runtime.execution.parameters import DelayParameters
from vla_runtime.execution.plan import Plan, Sampler, make_plan
from vla_runtime.execution.requests import DelayEstimator, FrameAge, Requests


def observed(delays: list[int], parameters: DelayParameters) -> int:
    estimator = DelayEstimator()
    for delay in delays:
        estimator.observe(delay, parameters)
    return estimator.estimate(parameters)


def test_when_nothing_is_observed_expect_the_floor():
    assert observed([], DelayParameters(floor_steps=3)) == 3


def test_when_only_the_warm_up_is_observed_expect_it_not_to_count():
    assert observed([90], DelayParameters(floor_steps=2, ceiling_steps=100)) == 2
    assert observed([90, 4], DelayParameters(ceiling_steps=100)) == 4


@pytest.mark.parametrize(
    ('quantile', 'expected'), [(0.1, 1), (0.5, 5), (0.75, 8), (0.9, 9), (1.0, 10)]
)
def test_when_delays_vary_expect_the_quantile_that_covers_them(quantile, expected):
    delays = [0, 7, 3, 10, 1, 8, 5, 2, 9, 4, 6]
    assert observed(delays, DelayParameters(quantile=quantile, window=10)) == expected


def test_when_the_window_is_full_expect_old_delays_forgotten():
    assert observed([0, 9, 9, 9, 2, 2, 2], DelayParameters(window=3)) == 2


def test_when_delays_leave_the_bounds_expect_floor_and_ceiling():
    assert observed([0, 50], DelayParameters(ceiling_steps=12)) == 12
    assert observed([5, 0], DelayParameters(floor_steps=2)) == 2


def test_when_cleared_expect_warm_up_again():
    estimator, parameters = DelayEstimator(), DelayParameters()
    for delay in (0, 8):
        estimator.observe(delay, parameters)
    estimator.clear()
    estimator.observe(15, parameters)
    assert estimator.estimate(parameters) == parameters.floor_steps


def test_when_a_request_is_open_for_too_long_expect_time_out():
    requests = Requests()
    assert requests.expire(99.0, 1.0) == 0
    requests.ask(10.0, 0)
    requests.ask(10.5, 0)
    assert requests.expire(10.9, 1.0) == 0 and len(requests.open) == 2
    assert requests.expire(11.1, 1.0) == 1
    assert [one.number for one in requests.open] == [2]
    requests.close(2)
    assert not requests.open


def test_when_a_newer_request_is_answered_expect_older_ones_not_to_be_awaited():
    requests = Requests()
    for number in range(4):
        requests.ask(10.0 + number, 0)
    requests.answer(3)
    assert [one.number for one in requests.open] == [4]
    assert requests.silent_since_s == 13.0
    requests.flush()
    assert not requests.open and not requests.answered and requests.silent_since_s is None


def test_when_an_answer_names_no_request_expect_the_oldest_to_be_meant():
    requests = Requests()
    requests.ask(10.0, 0)
    requests.ask(11.0, 0)
    requests.close(None)
    assert [one.number for one in requests.open] == [2]


MS = 1_000_000


def ages_of(*milliseconds: int) -> FrameAge:
    ages = FrameAge()
    for age in milliseconds:
        ages.observe(age * MS)
    return ages


def test_frame_age_is_the_longer_of_two_and_the_longest_of_thirty_two():
    assert ages_of().longest_of_many_ns == ages_of().longest_ns == 0
    assert ages_of(7).longest_of_many_ns == ages_of(7).longest_ns == 7 * MS
    ages = ages_of(30, 25, *[5] * 30)
    assert (ages.longest_ns, ages.longest_of_many_ns) == (5 * MS, 30 * MS)
    ages.observe(5 * MS)
    assert ages.longest_of_many_ns == 10 * MS
    ages.clear()
    assert ages.longest_of_many_ns == ages.longest_ns == 0


def test_one_late_frame_counts_for_two_answers_and_then_for_twice_the_second_longest():
    assert ages_of(20, 30, 25, 450, 10).longest_of_many_ns == 450 * MS
    assert ages_of(20, 30, 25, 450, 10, 10).longest_of_many_ns == 60 * MS


def test_open_request_is_sent_again_every_tenth_of_a_second_under_its_number():
    requests = Requests()
    assert requests.send_again(0.0) is None
    asked = requests.ask(1.0, 0)
    assert requests.send_again(1.05) is None
    assert requests.send_again(1.1) is asked
    assert requests.send_again(1.15) is None
    assert requests.send_again(1.25) is asked
    assert requests.number == 1
    newer = requests.ask(1.2, 0)
    assert requests.send_again(1.3) is None
    assert requests.send_again(1.36) is newer


@pytest.mark.parametrize('rate_hz', [50, 100, 250])
def test_many_open_requests_are_sent_again_in_turn_and_no_oftener_than_one(rate_hz):
    requests = Requests()
    asked = [requests.ask(0.0, 0).number for _ in range(28)]
    ticks = range(1, 6 * rate_hz)
    sent = [one.number for tick in ticks if (one := requests.send_again(tick / rate_hz))]
    assert 50 <= len(sent) <= 60
    assert sent == (asked * 3)[: len(sent)]


def test_answered_request_is_not_sent_again():
    requests = Requests()
    requests.ask(1.0, 0)
    requests.answer(1)
    assert requests.send_again(5.0) is None


def test_when_times_are_forgotten_expect_none_for_them_only():
    history = StepHistory(4)
    history.record(100, 1, 1)
    history.record(200, 2, 2)
    history.forget_before(150)
    assert history.at(149) is None
    assert history.at(200) == (2, 2)
    history.clear()
    assert history.at(200) is None


@given(
    st.lists(st.integers(-30, 30), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(-200, 500),
)
def test_when_stamps_wander_expect_what_a_list_of_the_newest_moments_would_say(
    steps, capacity, asked
):
    history, kept, stamp = StepHistory(capacity), [], 0
    for number, step in enumerate(steps):
        stamp += step
        consumed = (5 * number, 9 * number)
        history.record(stamp, *consumed)
        kept = [*(entry for entry in kept if entry[0] <= stamp), (stamp, consumed)][-capacity:]
    found = [index for index, entry in enumerate(kept) if entry[0] <= asked]
    if not found:
        assert history.at(asked) is None
        return
    at, consumed = kept[found[-1]]
    if found[-1] + 1 < len(kept):
        # A robot that held since then consumed less than the time that went by.
        after = kept[found[-1] + 1][1]
        consumed = tuple(
            min(count + asked - at, end) for count, end in zip(consumed, after, strict=True)
        )
    assert history.at(asked) == consumed


# --- A plan is sampled as a pure function of time: values and velocities

knot_rows = st.integers(2, 8).flatmap(
    lambda n: arrays(np.float64, (n, 2), elements=st.floats(-10, 10, width=32))
)


def sampled(plan: Plan, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Setpoints and derivatives at step times within a plan, (times, columns) each."""
    positions, velocities = (np.zeros((len(times), plan.knots.shape[1])) for _ in range(2))
    for row, time in enumerate(times - plan.first_step):
        interval = min(int(time), len(plan.coefficients) - 1)
        Sampler().sample_into(plan, interval, time - interval, positions[row], velocities[row])
    return positions, velocities


def test_when_linear_expect_straight_lines_between_knots():
    plan = make_plan(np.array([[0.0], [2.0], [1.0]]), interpolation='linear')
    positions, velocities = sampled(plan, np.array([0.25, 1.5]))
    assert positions[:, 0] == pytest.approx([0.5, 1.5])
    assert velocities[:, 0] == pytest.approx([2.0, -1.0])


def test_when_knots_lie_on_a_line_expect_cubic_to_be_that_line():
    plan = make_plan(np.arange(6.0)[:, None] * 0.3)
    positions, velocities = sampled(plan, np.linspace(0, 5, 41))
    assert positions[:, 0] == pytest.approx(np.linspace(0, 5, 41) * 0.3)
    assert velocities[:, 0] == pytest.approx(np.full(41, 0.3))


@examples(150)
@given(knot_rows, st.sampled_from(['linear', 'cubic']))
def test_when_sampled_anywhere_expect_knots_met_and_never_overshot(values, interpolation):
    plan = make_plan(values, 5, interpolation)
    times = np.linspace(5, 4 + len(values), 20 * len(values))
    found, _ = sampled(plan, times)
    interval = np.clip((times - 5).astype(int), 0, max(len(values) - 2, 0))
    following = np.minimum(interval + 1, len(values) - 1)
    low = np.minimum(values[interval], values[following])
    high = np.maximum(values[interval], values[following])
    slack = 1e-9 * (1 + np.abs(values).max())
    assert (found >= low - slack).all() and (found <= high + slack).all()
    at_knots, _ = sampled(plan, 5.0 + np.arange(len(values)))
    assert at_knots == pytest.approx(values, abs=slack)


@examples(100)
@given(knot_rows)
def test_when_cubic_expect_continuous_velocity_at_every_knot(values):
    plan = make_plan(values)
    for knot in range(1, len(values) - 1):
        _, (before, after) = sampled(plan, knot + np.array([-1e-7, 1e-7]))
        assert after == pytest.approx(before, abs=1e-4)
