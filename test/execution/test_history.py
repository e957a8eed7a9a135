"""Which step was current at a moment of the past."""

from __future__ import annotations

import pytest

from vla_runtime.execution.history import StepHistory


def test_when_nothing_is_recorded_expect_none() -> None:
    assert StepHistory(4).at(10) is None


def test_when_time_is_before_the_oldest_tick_expect_none() -> None:
    history = StepHistory(4)
    history.record(100, 0, 0)
    assert history.at(99) is None
    assert history.at(100) == (0, 0)


def test_when_time_is_between_two_ticks_expect_plan_time_to_have_run_on() -> None:
    history = StepHistory(4)
    history.record(100, 50, 70)
    history.record(110, 60, 80)
    assert history.at(104) == (54, 74)


def test_when_the_robot_held_between_two_ticks_expect_no_plan_time_consumed() -> None:
    history = StepHistory(4)
    history.record(100, 50, 50)
    history.record(110, 53, 60)
    assert history.at(108) == (53, 58)


def test_when_time_is_after_the_last_tick_expect_what_it_left() -> None:
    history = StepHistory(4)
    history.record(100, 50, 70)
    assert history.at(10_000) == (50, 70)


@pytest.mark.parametrize('ticks', range(1, 14))
def test_when_the_ring_is_full_expect_the_newest_ticks_kept(ticks: int) -> None:
    history = StepHistory(4)
    for tick in range(ticks):
        history.record(tick * 10, tick, tick)
    for tick in range(ticks):
        assert history.at(tick * 10) == ((tick, tick) if tick >= ticks - 4 else None)


def test_when_times_are_forgotten_expect_none_for_them_only() -> None:
    history = StepHistory(4)
    history.record(100, 1, 1)
    history.record(200, 2, 2)
    history.forget_before(150)
    assert history.at(149) is None
    assert history.at(200) == (2, 2)
    history.clear()
    assert history.at(200) is None
