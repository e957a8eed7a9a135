"""The delay estimate, in steps, and the parameters that bound it."""

from __future__ import annotations

import pytest

from vla_runtime.execution.parameters import DelayParameters, ExecutorParameters
from vla_runtime.execution.requests import DelayEstimator, FrameAge, Requests


def observed(delays: list[int], parameters: DelayParameters) -> int:
    estimator = DelayEstimator()
    for delay in delays:
        estimator.observe(delay, parameters)
    return estimator.estimate(parameters)


def test_when_nothing_is_observed_expect_the_floor() -> None:
    assert observed([], DelayParameters(floor_steps=3)) == 3


def test_when_only_the_warm_up_is_observed_expect_it_not_to_count() -> None:
    assert observed([90], DelayParameters(floor_steps=2, ceiling_steps=100)) == 2
    assert observed([90, 4], DelayParameters(ceiling_steps=100)) == 4


@pytest.mark.parametrize(
    ('quantile', 'expected'), [(0.1, 1), (0.5, 5), (0.75, 8), (0.9, 9), (1.0, 10)]
)
def test_when_delays_vary_expect_the_quantile_that_covers_them(
    quantile: float, expected: int
) -> None:
    delays = [0, 7, 3, 10, 1, 8, 5, 2, 9, 4, 6]
    assert observed(delays, DelayParameters(quantile=quantile, window=10)) == expected


def test_when_the_window_is_full_expect_old_delays_forgotten() -> None:
    assert observed([0, 9, 9, 9, 2, 2, 2], DelayParameters(window=3)) == 2


def test_when_delays_leave_the_bounds_expect_floor_and_ceiling() -> None:
    assert observed([0, 50], DelayParameters(ceiling_steps=12)) == 12
    assert observed([5, 0], DelayParameters(floor_steps=2)) == 2


def test_when_cleared_expect_warm_up_again() -> None:
    estimator, parameters = DelayEstimator(), DelayParameters()
    for delay in (0, 8):
        estimator.observe(delay, parameters)
    estimator.clear()
    estimator.observe(15, parameters)
    assert estimator.estimate(parameters) == parameters.floor_steps


def test_when_a_request_is_open_for_too_long_expect_time_out() -> None:
    requests = Requests()
    assert requests.expire(99.0, 1.0) == 0
    requests.ask(10.0, 0)
    requests.ask(10.5, 0)
    assert requests.expire(10.9, 1.0) == 0 and len(requests.open) == 2
    assert requests.expire(11.1, 1.0) == 1
    assert [one.number for one in requests.open] == [2]
    requests.close(2)
    assert not requests.open


def test_when_a_newer_request_is_answered_expect_older_ones_not_to_be_awaited() -> None:
    requests = Requests()
    for number in range(4):
        requests.ask(10.0 + number, 0)
    requests.answer(3)
    assert [one.number for one in requests.open] == [4]
    assert requests.silent_since_s == 13.0
    requests.flush()
    assert not requests.open and not requests.answered and requests.silent_since_s is None


def test_when_an_answer_names_no_request_expect_the_oldest_to_be_meant() -> None:
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


def test_frame_age_is_the_longer_of_two_and_the_longest_of_thirty_two() -> None:
    assert ages_of().longest_of_many_ns == ages_of().longest_ns == 0
    assert ages_of(7).longest_of_many_ns == ages_of(7).longest_ns == 7 * MS
    ages = ages_of(30, 25, *[5] * 30)
    assert (ages.longest_ns, ages.longest_of_many_ns) == (5 * MS, 30 * MS)
    ages.observe(5 * MS)
    assert ages.longest_of_many_ns == 10 * MS
    ages.clear()
    assert ages.longest_of_many_ns == ages.longest_ns == 0


def test_one_late_frame_counts_for_two_answers_and_then_for_twice_the_second_longest() -> None:
    assert ages_of(20, 30, 25, 450, 10).longest_of_many_ns == 450 * MS
    assert ages_of(20, 30, 25, 450, 10, 10).longest_of_many_ns == 60 * MS


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('replan_interval', 0),
        ('replan_mode', 'sometimes'),
        ('overrun', 'panic'),
        ('max_overrun_steps', -1),
        ('interpolation', 'quintic'),
        ('request_timeout_s', 0.0),
        ('max_observation_age_s', float('nan')),
    ],
)
def test_when_a_parameter_makes_no_sense_expect_error_naming_it(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f'{field} is'):
        ExecutorParameters(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    'bad', [{'quantile': 0.0}, {'quantile': 1.1}, {'window': 0}, {'floor_steps': 30}]
)
def test_when_a_delay_parameter_makes_no_sense_expect_error(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match='delay'):
        DelayParameters(**bad)  # type: ignore[arg-type]


def test_when_interval_exceeds_the_horizon_expect_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match='steps'):
        ExecutorParameters(replan_interval=12).require_horizon(10)


def test_open_request_is_sent_again_every_tenth_of_a_second_under_its_number() -> None:
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
def test_many_open_requests_are_sent_again_in_turn_and_no_oftener_than_one(rate_hz: int) -> None:
    requests = Requests()
    asked = [requests.ask(0.0, 0).number for _ in range(28)]
    ticks = range(1, 6 * rate_hz)
    sent = [one.number for tick in ticks if (one := requests.send_again(tick / rate_hz))]
    assert 50 <= len(sent) <= 60
    assert sent == (asked * 3)[: len(sent)]


def test_answered_request_is_not_sent_again() -> None:
    requests = Requests()
    requests.ask(1.0, 0)
    requests.answer(1)
    assert requests.send_again(5.0) is None
