"""Clocks that jump, stand still or are late, and a plan whose time is a simulated clock's."""

import math

import pytest
from execution_rig import SWITCH, Rig, alike, holding

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Reason
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.watchdog import ClockWatch, WatchdogParameters, tick_timeout

MS = 1_000_000


def watch_of(**parameters: object) -> ClockWatch:
    made = WatchdogParameters(**parameters)
    return ClockWatch(made, tick_timeout(made, math.inf))


def test_when_both_clocks_run_expect_plan_time_to_pass_with_the_steady_one():
    watch = watch_of()
    assert watch.advance(5.0, 100 * MS) is None and watch.dt_ns == 0
    assert watch.advance(5.01, 110 * MS + 5000) is None
    assert watch.dt_ns == 10 * MS


def test_when_simulated_expect_plan_time_to_pass_with_the_ros_clock():
    watch = watch_of(motion_clock='ros')
    watch.advance(5.0, 100 * MS)
    assert watch.advance(5.01, 120 * MS) is None
    assert watch.dt_ns == 20 * MS
    assert watch.advance(5.02, 120 * MS) is None
    assert watch.dt_ns == 0


@pytest.mark.parametrize('jump_ms', [-5000, -250, 250, 5000])
@pytest.mark.parametrize('motion_clock', ['steady', 'ros'])
def test_when_ros_clock_jumps_expect_clock_jump_and_no_plan_time(jump_ms, motion_clock):
    watch = watch_of(motion_clock=motion_clock)
    watch.advance(5.0, 10_000 * MS)
    assert watch.advance(5.01, (10_010 + jump_ms) * MS) is Reason.CLOCK_JUMP
    assert watch.dt_ns == 0
    assert 'ROS clock jumped' in watch.detail
    assert watch.advance(5.02, (10_020 + jump_ms) * MS) is None


def test_when_simulated_clock_goes_back_at_all_expect_clock_jump():
    watch = watch_of(motion_clock='ros')
    watch.advance(5.0, 10_000 * MS)
    assert watch.advance(5.01, 9_999 * MS) is Reason.CLOCK_JUMP


def test_when_ros_clock_is_slewed_expect_no_jump():
    watch = watch_of()
    for tick in range(1000):
        assert watch.advance(5.0 + tick * 0.01, round(tick * 10.005 * MS)) is None


def test_when_ros_clock_stands_still_on_a_robot_expect_clock_jump():
    watch = watch_of()
    found = [watch.advance(5.0 + tick * 0.01, 7 * MS) for tick in range(40)]
    assert Reason.CLOCK_JUMP in found


def test_when_simulated_clock_stands_still_expect_clock_stopped_until_it_runs():
    watch = watch_of(motion_clock='ros', clock_timeout_s=0.1)
    found = [watch.advance(5.0 + tick * 0.01, 7 * MS) for tick in range(20)]
    assert found[9] is None and found[19] is Reason.CLOCK_STOPPED
    assert watch.advance(5.2, 8 * MS) is None
    assert watch.dt_ns == MS


def test_when_steady_clock_goes_back_expect_clock_jump():
    watch = watch_of()
    watch.advance(5.0, 0)
    assert watch.advance(4.0, 10 * MS) is Reason.CLOCK_JUMP


def test_when_steady_clock_is_not_a_number_expect_clock_invalid_and_recovery():
    watch = watch_of()
    watch.advance(5.0, 0)
    assert watch.advance(math.nan, 10 * MS) is Reason.CLOCK_INVALID
    assert watch.advance(5.01, 10 * MS) is None


# --- Under `use_sim_time` plan time is the ROS clock's: slow or fast, the robot gets to the end

STEPS = 20
SLOPE = 0.03  # a step, so 0.75 a second
PERIOD_NS = 10_000_000


class SimulatedClock:
    """Lets a rig tick at 100 Hz of steady time while `/clock` comes at its own rate and speed."""

    def __init__(self, rig: Rig, rate_hz: float, factor: float) -> None:
        self._rig, self._rate_hz, self._factor = rig, rate_hz, factor
        self._ticks, self._messages = 0, 0

    def tick(self) -> None:
        rig = self._rig
        self._ticks += 1
        rig.now_s += PERIOD_NS * 1e-9
        messages = int(self._ticks * PERIOD_NS * 1e-9 * self._rate_hz + 1e-9)
        rig.ros_ns += round((messages - self._messages) * self._factor / self._rate_hz * 1e9)
        self._messages = messages
        rig.measure()
        rig.tick_now()


@pytest.mark.parametrize(
    ('rate_hz', 'factor'), [(20, 1.0), (30, 1.0), (60, 1.0), (60, 2.0), (100, 2.0), (60, 5.0)]
)
def test_when_the_clock_is_slow_or_fast_expect_the_plan_followed_to_its_end(rate_hz, factor):
    limits = alike(('a', 'b'), ColumnLimits(velocity=1.0))
    rig = Rig(
        holding(replan_interval=STEPS, overrun='hold', interpolation='linear', handover=SWITCH),
        limits=limits,
        control_period_s=PERIOD_NS * 1e-9,
        watchdog=WatchdogParameters(motion_clock='ros'),
    ).started()
    clock = SimulatedClock(rig, rate_hz, factor)
    assert rig.submit([SLOPE * (row + 1) for row in range(STEPS)]).accepted
    begun_ns = rig.ros_ns
    while rig.reason != 'starved':
        clock.tick()
        passed = (rig.ros_ns - begun_ns) / 40_000_000
        assert rig.ticks[-1].position == pytest.approx(SLOPE * min(passed, STEPS), abs=1e-9)
        assert passed < STEPS + 10
    assert rig.command.reason is Reason.STARVED
    assert not any(tick.command.limited for tick in rig.ticks)


ONE_JOINT = (Column('a'),)
ONE_LIMIT = make_limits(('a',), {'a': ColumnLimits(-9.0, 9.0, 2.0, 5.0, step_from_measured=0.3)})


def one_joint(max_tracking_error: float = 1.0) -> Rig:
    watchdog = WatchdogParameters(motion_clock='ros', max_tracking_error=max_tracking_error)
    return Rig(
        holding(replan_interval=30), columns=ONE_JOINT, limits=ONE_LIMIT, watchdog=watchdog
    ).started()


def tick_between(rig: Rig) -> None:
    """Tick before the next message on /clock comes."""
    rig.now_s += PERIOD_NS * 1e-9
    rig.tick_now()


def speed(rig: Rig) -> float:
    """Speed of the last tick that the clock had moved for, a second."""
    moved = [tick.position for tick in rig.ticks if tick.ros_ns == rig.ros_ns]
    before = [tick.position for tick in rig.ticks if tick.ros_ns < rig.ros_ns]
    return (moved[0] - before[-1]) / (PERIOD_NS * 1e-9)


@pytest.mark.parametrize('reset', [True, False])
def test_when_a_tick_comes_between_two_clock_messages_expect_a_stop_to_brake_on(reset):
    rig = one_joint()
    rig.submit([0.05 * row for row in range(40)])
    rig.tick(60)
    rig.executor.stop()
    rig.tick(5)
    if reset:
        rig.executor.reset(1)
    slow = speed(rig)
    assert slow > 0.5
    tick_between(rig)
    assert rig.ticks[-1].position == rig.ticks[-2].position
    rig.tick()
    assert speed(rig) == pytest.approx(slow - 5.0 * PERIOD_NS * 1e-9, abs=1e-6)


def test_when_the_clock_stops_while_a_hold_brakes_expect_velocity_columns_at_zero():
    limits = make_limits(('a',), {'a': ColumnLimits(velocity=1.0, acceleration=0.5)})
    rig = Rig(
        holding(replan_interval=30),
        columns=(Column('a', kind='velocity', feedback=False),),
        limits=limits,
        watchdog=WatchdogParameters(motion_clock='ros'),
    ).started()
    rig.submit([1.0] * 40)
    rig.tick(100)
    rig.executor.stop()
    rig.tick(2)
    assert rig.ticks[-1].position > 0.1
    while rig.ticks[-1].position and len(rig.ticks) < 1000:
        tick_between(rig)
    assert rig.ticks[-1].position == 0.0


def test_when_the_clock_is_slower_than_the_ticks_expect_a_hold_to_give_way_all_the_same():
    rig = one_joint(max_tracking_error=0.3)
    rig.submit([0.01 * row for row in range(40)])
    rig.tick(30)
    rig.robot_follows = False
    for tick in range(275):
        # No faster than the joint can be told from a wrong reading.
        rig.measured -= 0.02 * (tick < 75)
        tick_between(rig)
        rig.tick()
    assert rig.reason == 'tracking_error'
    assert rig.ticks[-1].position == pytest.approx(rig.measured[0], abs=0.02)
