"""Current step at a moment of the past."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_when_the_clock_steps_back_a_little_expect_the_newer_of_two_moments() -> None:
    history = StepHistory(8)
    for stamp, consumed in ((100, 0), (110, 10), (120, 20), (105, 30), (115, 40)):
        history.record(stamp, consumed, consumed)
    assert history.at(100) == (0, 0)
    assert history.at(104) == (4, 4)
    assert history.at(105) == (30, 30)
    assert history.at(112) == (37, 37)
    assert history.at(118) == (40, 40)


def test_when_the_clock_steps_back_before_all_that_is_kept_expect_only_what_is_new() -> None:
    history = StepHistory(3)
    for stamp in (100, 110, 120, 130):
        history.record(stamp, stamp, stamp)
    history.record(90, 200, 200)
    assert history.at(89) is None
    assert history.at(125) == (200, 200)


@given(
    st.lists(st.integers(-30, 30), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(-200, 500),
)
def test_when_stamps_wander_expect_what_a_list_of_the_newest_moments_would_say(
    steps: list[int], capacity: int, asked: int
) -> None:
    history, kept, stamp = StepHistory(capacity), [], 0
    for number, step in enumerate(steps):
        stamp += step
        history.record(stamp, 50 * number, 50 * number)
        kept = [*(entry for entry in kept if entry[0] <= stamp), (stamp, 50 * number)][-capacity:]
    found = [index for index, entry in enumerate(kept) if entry[0] <= asked]
    if not found:
        assert history.at(asked) is None
        return
    at, consumed = kept[found[-1]]
    if found[-1] + 1 < len(kept):
        consumed = min(consumed + asked - at, kept[found[-1] + 1][1])
    assert history.at(asked) == (consumed, consumed)
