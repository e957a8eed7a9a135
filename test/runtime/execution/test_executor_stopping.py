"""Stops of the robot: tick, reason, and the way on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from execution_rig import Rig, holding
from stopping_rig import RAMP, TWO, assert_held, moving, rig_of

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import ChunkRefusal, CommandKind, Reason
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.watchdog import WatchdogParameters, tick_timeout

# ---------------------------------------------------------------- start


def test_when_not_started_expect_idle_and_nothing_to_publish() -> None:
    rig = rig_of()
    rig.tick(5)
    assert rig.command.kind is CommandKind.IDLE and rig.reason == 'not_started'
    assert rig.submit(RAMP).refusal is ChunkRefusal.NOT_RUNNING
    assert not rig.executor.wants_chunk
    assert rig.executor.stop_at_once().kind is CommandKind.IDLE


def test_when_started_expect_hold_at_the_measured_position() -> None:
    rig = rig_of()
    rig.measured[:] = [0.4, -0.3]
    rig.started()
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'waiting_for_chunk'
    assert rig.command.setpoints.tolist() == [0.4, -0.3]


def test_when_no_state_ever_came_expect_start_refused_naming_the_joints() -> None:
    rig = rig_of()
    rig.state_arrives = False
    rig.tick(2)
    result = rig.executor.start(rig.now_s, rig.ros_ns)
    assert not result.started and "'a' and 'b'" in result.text
    assert rig.executor.mode is Mode.IDLE


def test_when_state_is_stale_expect_start_refused() -> None:
    rig = rig_of()
    rig.tick(2)
    rig.state_arrives = False
    rig.tick(30)
    result = rig.executor.start(rig.now_s, rig.ros_ns)
    assert not result.started and 'max_state_age_s' in result.text


def test_when_robot_was_moved_by_hand_expect_restart_at_its_new_position() -> None:
    rig = moving()
    rig.executor.stop()
    rig.robot_follows = False
    rig.measured[:] = [0.9, 0.1]
    rig.tick(5)
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    # In all joints: once one was moved, none goes back to the last command.
    assert rig.tick().setpoints == pytest.approx([0.9, 0.1])


def test_when_robot_sags_a_little_expect_a_restart_where_it_is_and_then_the_last_command() -> None:
    rig = moving()
    held = rig.executor.stop_at_once().setpoints.copy()
    rig.robot_follows = False
    rig.measured[:] = held - 0.02
    rig.tick(5)
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert rig.tick().setpoints == pytest.approx(held - 0.02, abs=1e-9)
    at = len(rig.ticks)
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 50)
    assert rig.command.setpoints == pytest.approx(held, abs=1e-9)
    steps = np.diff([tick.command.setpoints for tick in rig.ticks[at - 1 :]], axis=0)
    assert np.abs(steps).max() <= rig.config.start.approach_speed * 0.01 * (1 + 1e-9)


def test_when_started_twice_expect_motion_undisturbed() -> None:
    rig = moving()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert rig.tick().kind is CommandKind.TRACK


def test_when_held_for_long_expect_the_next_chunk_to_be_a_new_start() -> None:
    rig = moving(start=StartParameters(tolerance=0.1, on_too_far='refuse', cold_after_s=1.0))
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    rig.tick(110)
    assert rig.submit([0.9] * 30).refusal is ChunkRefusal.START_TOO_FAR


def test_when_nobody_measures_a_column_expect_nothing_published_before_its_first_row() -> None:
    columns = (Column('x', feedback=False), Column('y', feedback=False))
    rig = rig_of(columns=columns).started()
    assert rig.tick(5).kind is CommandKind.IDLE
    assert rig.submit(np.array([[0.6, 0.3]] * 30)).accepted
    rig.tick()
    assert rig.command.kind is CommandKind.TRACK
    assert rig.command.setpoints == pytest.approx([0.6, 0.3])


# ---------------------------------------------------------------- stop


def test_when_stopped_expect_hold_at_once_and_until_start() -> None:
    rig = moving()
    last = rig.executor.stop_at_once()
    assert last.kind is CommandKind.HOLD
    assert (last.setpoints == rig.command.setpoints).all()
    rig.tick(10)
    assert_held(rig, Reason.STOPPED)
    assert rig.submit(RAMP).refusal is ChunkRefusal.NOT_RUNNING
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    rig.tick()
    assert rig.submit([0.05] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK


def test_when_stopped_expect_velocity_columns_at_zero() -> None:
    columns = (Column('a'), Column('w', kind='velocity'))
    rig = rig_of(columns=columns).started()
    rig.submit(np.array([[0.1, 0.8]] * 30))
    rig.tick(10)
    assert rig.command.setpoints[1] == pytest.approx(0.8)
    last = rig.executor.stop_at_once()
    assert last.setpoints[1] == 0.0 and last.setpoints[0] > 0.0


def test_when_started_and_stopped_a_thousand_times_expect_no_trace_of_it() -> None:
    rig = rig_of().started()
    for _ in range(1000):
        rig.executor.stop()
        assert rig.executor.start(rig.now_s, rig.ros_ns).started
    rig.tick()
    assert_held(rig, Reason.WAITING_FOR_CHUNK)
    assert rig.submit(RAMP).accepted
    assert rig.tick().kind is CommandKind.TRACK


# ---------------------------------------------------------------- clocks and ticks


def test_when_a_tick_is_late_expect_hold_and_the_plan_dropped() -> None:
    rig = moving(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    rig.now_s += 0.2
    rig.ros_ns += 200_000_000
    rig.tick()
    assert_held(rig, Reason.TICK_LATE)
    assert rig.tick().reason is Reason.WAITING_FOR_CHUNK
    assert rig.executor.wants_chunk
    assert rig.executor.counters.late_ticks == 1


def test_when_ticks_stop_coming_expect_the_dead_man_to_give_the_hold() -> None:
    rig = moving(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    assert rig.executor.dead_man(rig.now_s + 0.04) is None
    command = rig.executor.dead_man(rig.now_s + 0.06)
    assert command is not None
    assert command.kind is CommandKind.HOLD and command.reason is Reason.TICK_LATE
    assert (command.setpoints == rig.command.setpoints).all()
    again = rig.executor.dead_man(rig.now_s + 0.5)
    assert again is not None and again.kind is CommandKind.HOLD
    rig.now_s += 0.5
    rig.ros_ns += 500_000_000
    rig.tick()
    assert_held(rig, Reason.TICK_LATE)


def test_when_no_tick_follows_the_start_expect_the_dead_man_to_give_the_hold() -> None:
    rig = rig_of(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    rig.tick(2)
    # Ticks had stopped long before the start, which begins anew.
    rig.now_s += 60.0
    rig.ros_ns += 60_000_000_000
    rig.report()
    rig.measure()
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert rig.executor.dead_man(rig.now_s + 0.04) is None
    command = rig.executor.dead_man(rig.now_s + 0.06)
    assert command is not None
    assert command.kind is CommandKind.HOLD and command.reason is Reason.TICK_LATE
    rig.tick(2)
    assert rig.reason == 'waiting_for_chunk'


def test_when_the_dead_man_held_expect_nothing_left_of_the_plan() -> None:
    rig = moving(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    rig.executor.poll_request(rig.now_s, rig.ros_ns)
    assert rig.executor.status().chunk != -1
    assert rig.executor.dead_man(rig.now_s + 0.06) is not None
    assert rig.executor.status().chunk == -1
    assert not rig.executor.status().open_requests
    # A tick that finds no gap by itself does not go on with it either.
    rig.tick()
    assert rig.command.kind is CommandKind.HOLD
    assert (rig.command.setpoints == rig.ticks[-2].command.setpoints).all()


def test_when_never_ticked_or_idle_expect_the_dead_man_to_publish_nothing() -> None:
    rig = rig_of()
    assert rig.executor.dead_man(1e9) is None
    rig.tick()
    command = rig.executor.dead_man(rig.now_s + 9)
    assert command is not None and command.kind is CommandKind.IDLE


@pytest.mark.parametrize('jump_s', [-3600.0, -1.0, 1.0, 3600.0])
def test_when_ros_clock_jumps_expect_hold_and_recovery_with_new_data(jump_s: float) -> None:
    rig = moving()
    in_flight_ns = rig.ros_ns
    rig.ros_ns += round(jump_s * 1e9)
    rig.tick()
    assert_held(rig, Reason.CLOCK_JUMP)
    assert f'{jump_s:+.3f}' in rig.executor.detail
    rig.tick(3)
    assert_held(rig, Reason.WAITING_FOR_CHUNK)
    assert not rig.submit(RAMP, observation_ns=in_flight_ns).accepted
    assert rig.submit([rig.ticks[-1].position] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK
    assert rig.executor.counters.clock_jumps == 1


def test_when_simulated_clock_is_paused_expect_nothing_to_move_and_to_go_on_after() -> None:
    rig = moving(watchdog=WatchdogParameters(motion_clock='ros', clock_timeout_s=0.1))
    at = rig.command.setpoints.copy()
    for _ in range(30):
        rig.now_s += 0.01
        rig.measure()
        rig.tick_now()
        assert (rig.command.setpoints == at).all()
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'clock_stopped'
    step = rig.executor.status().step
    rig.tick()
    assert rig.command.kind is CommandKind.TRACK and rig.command.step == step


@pytest.mark.parametrize('now_s', [math.nan, math.inf])
def test_when_steady_clock_is_not_a_number_expect_hold(now_s: float) -> None:
    rig = moving()
    rig.executor.tick(now_s, rig.ros_ns)
    rig.now_s += 0.01
    assert rig.executor.status().reason is Reason.CLOCK_INVALID


def test_when_tick_is_given_garbage_expect_hold_until_started_again() -> None:
    rig = moving()
    command = rig.executor.tick('noon', rig.ros_ns)  # type: ignore[arg-type]
    assert command.kind is CommandKind.HOLD and command.reason is Reason.INTERNAL_ERROR
    assert 'TypeError' in rig.executor.detail
    assert rig.tick().reason is Reason.INTERNAL_ERROR
    assert rig.executor.counters.internal_errors == 1


def test_when_a_tick_is_a_little_late_expect_no_command_further_than_the_period_allows() -> None:
    limits = make_limits(TWO, dict.fromkeys(TWO, ColumnLimits(velocity=0.3)))
    rig = moving(limits=limits, control_period_s=0.01)
    before = rig.command.setpoints[0]
    rig.now_s += 0.015
    rig.ros_ns += 15_000_000
    rig.tick()
    assert rig.command.kind is CommandKind.TRACK
    assert rig.command.setpoints[0] - before == pytest.approx(0.3 * 0.015)
    rig.tick(40)
    assert not rig.command.limited


@pytest.mark.parametrize('pause_s', [0.015, 0.02, 0.04, 0.1, 0.5])
@pytest.mark.parametrize('acceleration', [1.0, 4.0])
def test_when_the_executor_pauses_in_motion_expect_no_command_that_makes_up_the_way(
    acceleration: float, pause_s: float
) -> None:
    """A controller has come to rest by then, and goes to the next command in one period."""
    limits = make_limits(
        TWO, dict.fromkeys(TWO, ColumnLimits(velocity=0.3, acceleration=acceleration))
    )
    rig = moving(limits=limits, control_period_s=0.01)
    rig.tick(40)
    before = rig.command.setpoints[0]
    rig.now_s += pause_s
    rig.ros_ns += round(pause_s * 1e9)
    ways = []
    for _ in range(200):
        rig.tick()
        ways.append(rig.command.setpoints[0] - before)
        before = rig.command.setpoints[0]
    assert 0.0 <= ways[0] <= 0.3 * 0.015 * (1 + 1e-9)
    assert max(ways[1:]) <= 0.3 * 0.01 * (1 + 1e-9)


# ---------------------------------------------------------------- limits and latch


def test_when_clamped_chunks_come_in_a_row_expect_the_latch_until_reset() -> None:
    limits = make_limits(TWO, {'a': ColumnLimits(-1, 0.05)})
    rig = rig_of(limits=limits, clamp_latch=3).started()
    results = []
    for _ in range(3):
        results.append(rig.submit([0.1] * 30))
        rig.tick(4)
    assert rig.submit([0.0] * 30).refusal is ChunkRefusal.CLAMP_LATCH
    assert [result.accepted for result in results] == [True, True, False]
    assert results[0].clamped and 'position' in results[0].text
    assert results[2].refusal is ChunkRefusal.CLAMP_LATCH
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'clamp_latch'
    rig.executor.stop()
    refused = rig.executor.start(rig.now_s, rig.ros_ns)
    assert not refused.started and '3 chunks in a row' in refused.text
    rig.tick()
    assert rig.reason == 'stopped'
    rig.executor.reset(1)
    rig.started()
    assert rig.submit([0.0] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK


def test_when_a_good_chunk_comes_between_clamped_ones_expect_no_latch() -> None:
    rig = rig_of(limits=make_limits(TWO, {'a': ColumnLimits(-1, 0.05)}), clamp_latch=2).started()
    for value in (0.1, 0.0, 0.1, 0.0):
        assert rig.submit([value] * 30).accepted
        rig.tick(4)
    assert rig.executor.counters.clamped == 2


def test_when_chunk_violates_a_rejecting_limit_expect_none_of_it_executed() -> None:
    limits = make_limits(
        TWO, {'b': ColumnLimits(-1, 0.05)}, actions=LimitActions(position='reject')
    )
    rig = rig_of(limits=limits).started()
    result = rig.submit([0.0] * 29 + [0.06])
    assert result.refusal is ChunkRefusal.LIMIT and "'b' in row 29" in result.text
    rig.tick(20)
    assert rig.executed() == []


# ---------------------------------------------------------------- dry run


def test_when_dry_run_expect_everything_computed_and_flagged() -> None:
    rig = rig_of(dry_run=True).started()
    assert rig.submit(RAMP).accepted
    rig.tick(60)
    assert rig.command.kind is CommandKind.TRACK and rig.command.dry_run
    assert rig.command.setpoints[0] > 0.1
    assert (rig.measured == 0.0).all()


def test_when_dry_run_is_switched_off_expect_nothing_of_it_to_reach_the_robot() -> None:
    rig = rig_of(dry_run=True).started()
    rig.submit(RAMP)
    rig.tick(60)
    rig.executor.set_dry_run(False)
    assert rig.tick().kind is CommandKind.IDLE
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert rig.tick().setpoints.tolist() == [0.0, 0.0]


def test_when_dry_run_is_switched_on_in_motion_expect_a_hold_to_publish_last() -> None:
    rig = moving()
    rig.executor.set_dry_run(True)
    rig.tick()
    assert_held(rig, Reason.STOPPED)
    assert not rig.command.dry_run
    assert rig.tick().dry_run
    assert rig.command.kind is CommandKind.IDLE


def test_when_dry_run_is_set_to_what_it_is_expect_stop_only() -> None:
    rig = moving()
    rig.executor.set_dry_run(False)
    rig.tick(2)
    assert_held(rig, Reason.STOPPED)
    assert not rig.command.dry_run


# ---------------------------------------------------------------- configuration


def test_when_limits_are_for_other_columns_expect_error() -> None:
    with pytest.raises(ValueError, match='limits'):
        ExecutorConfig((Column('a'),), limits=make_limits(['b']))


@pytest.mark.parametrize(
    ('bad', 'said'),
    [
        ({'tolerance': 0.0}, 'field start.tolerance: 0 where more than 0 is expected'),
        ({'approach_speed': -1.0}, 'field start.approach_speed: -1 where more than 0 is expected'),
        (
            {'on_too_far': 'jump'},
            "field start.on_too_far: 'jump' where one of refuse, approach is expected",
        ),
    ],
)
def test_when_a_start_parameter_makes_no_sense_expect_error_naming_it(
    bad: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as error:
        StartParameters(**bad)
    assert str(error.value) == said


def test_when_control_period_is_zero_expect_error() -> None:
    with pytest.raises(ValueError, match='control_period_s'):
        ExecutorConfig((Column('a'),), control_period_s=0.0)


def test_when_latch_is_negative_expect_error() -> None:
    with pytest.raises(ValueError, match='clamp_latch'):
        ExecutorConfig((Column('a'),), clamp_latch=-1)


@pytest.mark.parametrize('rate_hz', [10, 50, 100, 500])
@pytest.mark.parametrize('phase', [0.0, 0.3, 0.99])
def test_when_ticks_stop_expect_the_hold_a_period_after_the_time_out_at_most(
    rate_hz: int, phase: float
) -> None:
    period_s = 1.0 / rate_hz
    timeout_s = tick_timeout(WatchdogParameters(), period_s)
    rig = rig_of(
        period_ns=round(1e9 * period_s),
        watchdog=WatchdogParameters(tick_timeout_s=timeout_s, clock_jump_s=1.0),
    ).started()
    assert rig.submit(RAMP).accepted
    rig.tick()
    look_s = rig.now_s + phase * period_s
    while rig.executor.dead_man(look_s) is None:
        look_s += period_s
    late_s = look_s - rig.now_s
    assert timeout_s < late_s <= timeout_s + period_s + 1e-9
    assert late_s <= max(4.0 * period_s, 0.02 + period_s) + 1e-9
    assert rig.executor.status().kind is CommandKind.HOLD


def test_when_stopped_and_reset_beyond_a_limit_expect_the_wheel_to_stop() -> None:
    """The hold gives way to an arm that cannot be followed; that must not keep the wheel going."""
    limits = make_limits(
        ('arm', 'wheel'),
        {
            'arm': ColumnLimits(lower=-1.0, upper=1.0, velocity=1.0, step_from_measured=0.1),
            'wheel': ColumnLimits(velocity=1.0, acceleration=1.0),
        },
    )
    columns = (Column('arm'), Column('wheel', kind='velocity'))
    rig = Rig(holding(replan_interval=20), columns, limits=limits)
    rig.measured[0] = 0.95
    rig.started()
    rig.submit(np.array([[0.95, 0.5]] * 50))
    rig.run_until(lambda command: command.setpoints[1] == 0.5)
    rig.robot_follows = False
    rig.measured[0] = 1.2
    rig.executor.stop()
    rig.tick()
    rig.executor.reset(1)
    rig.tick(60)
    assert rig.command.setpoints[1] == 0.0
