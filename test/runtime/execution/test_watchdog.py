"""Clocks that jump, stand still or are late, and what they do to plan time."""

from __future__ import annotations

import math

import pytest

from vla_runtime.execution.command import Reason
from vla_runtime.execution.watchdog import ClockWatch, WatchdogParameters, tick_timeout

MS = 1_000_000


def watch_of(**parameters: object) -> ClockWatch:
    made = WatchdogParameters(**parameters)  # type: ignore[arg-type]
    return ClockWatch(made, tick_timeout(made, math.inf))


def test_when_both_clocks_run_expect_plan_time_to_pass_with_the_steady_one() -> None:
    watch = watch_of()
    assert watch.advance(5.0, 100 * MS) is None and watch.dt_ns == 0
    assert watch.advance(5.01, 110 * MS + 5000) is None
    assert watch.dt_ns == 10 * MS


def test_when_simulated_expect_plan_time_to_pass_with_the_ros_clock() -> None:
    watch = watch_of(motion_clock='ros')
    watch.advance(5.0, 100 * MS)
    assert watch.advance(5.01, 120 * MS) is None
    assert watch.dt_ns == 20 * MS
    assert watch.advance(5.02, 120 * MS) is None
    assert watch.dt_ns == 0


@pytest.mark.parametrize('jump_ms', [-5000, -250, 250, 5000])
@pytest.mark.parametrize('motion_clock', ['steady', 'ros'])
def test_when_ros_clock_jumps_expect_clock_jump_and_no_plan_time(
    jump_ms: int, motion_clock: str
) -> None:
    watch = watch_of(motion_clock=motion_clock)
    watch.advance(5.0, 10_000 * MS)
    assert watch.advance(5.01, (10_010 + jump_ms) * MS) is Reason.CLOCK_JUMP
    assert watch.dt_ns == 0
    assert 'ROS clock jumped' in watch.detail
    assert watch.advance(5.02, (10_020 + jump_ms) * MS) is None


def test_when_simulated_clock_goes_back_at_all_expect_clock_jump() -> None:
    watch = watch_of(motion_clock='ros')
    watch.advance(5.0, 10_000 * MS)
    assert watch.advance(5.01, 9_999 * MS) is Reason.CLOCK_JUMP


def test_when_ros_clock_is_slewed_expect_no_jump() -> None:
    watch = watch_of()
    for tick in range(1000):
        assert watch.advance(5.0 + tick * 0.01, round(tick * 10.005 * MS)) is None


def test_when_ros_clock_stands_still_on_a_robot_expect_clock_jump() -> None:
    watch = watch_of()
    found = [watch.advance(5.0 + tick * 0.01, 7 * MS) for tick in range(40)]
    assert Reason.CLOCK_JUMP in found


def test_when_simulated_clock_stands_still_expect_clock_stopped_until_it_runs() -> None:
    watch = watch_of(motion_clock='ros', clock_timeout_s=0.1)
    found = [watch.advance(5.0 + tick * 0.01, 7 * MS) for tick in range(20)]
    assert found[9] is None and found[19] is Reason.CLOCK_STOPPED
    assert watch.advance(5.2, 8 * MS) is None
    assert watch.dt_ns == MS


def test_when_a_tick_is_late_expect_tick_late_with_the_numbers() -> None:
    watch = watch_of(tick_timeout_s=0.05)
    watch.advance(5.0, 0)
    assert watch.advance(5.08, 80 * MS) is Reason.TICK_LATE
    assert '0.080 s' in watch.detail and watch.dt_ns == 0


def test_when_steady_clock_goes_back_expect_clock_jump() -> None:
    watch = watch_of()
    watch.advance(5.0, 0)
    assert watch.advance(4.0, 10 * MS) is Reason.CLOCK_JUMP


def test_when_steady_clock_is_not_a_number_expect_clock_invalid_and_recovery() -> None:
    watch = watch_of()
    watch.advance(5.0, 0)
    assert watch.advance(math.nan, 10 * MS) is Reason.CLOCK_INVALID
    assert watch.advance(5.01, 10 * MS) is None


@pytest.mark.parametrize('field', ['tick_timeout_s', 'max_state_age_s', 'max_tracking_error'])
def test_when_a_threshold_is_not_positive_expect_error_naming_it(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WatchdogParameters(**{field: 0.0})  # type: ignore[arg-type]


def test_when_motion_clock_is_unknown_expect_error() -> None:
    with pytest.raises(ValueError, match='motion_clock'):
        WatchdogParameters(motion_clock='sundial')  # type: ignore[arg-type]
