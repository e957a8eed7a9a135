"""Stops and releases of the robot: tick, reason, and the way on."""

import math

import numpy as np
import pytest
from execution_rig import RAMP, TWO, Rig, alike, assert_held, holding, moving, rig_of

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import ChunkRefusal, CommandKind, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.stopping import StopActions
from vla_runtime.execution.watchdog import WatchdogParameters, tick_timeout

# ---------------------------------------------------------------- start


def test_when_not_started_expect_idle_and_nothing_to_publish():
    rig = rig_of()
    rig.tick(5)
    assert rig.command.kind is CommandKind.IDLE and rig.reason == 'not_started'
    assert rig.submit(RAMP).refusal is ChunkRefusal.NOT_RUNNING
    assert not rig.executor.wants_chunk
    assert rig.executor.stop_at_once().kind is CommandKind.IDLE


def test_when_started_expect_hold_at_the_measured_position():
    rig = rig_of()
    rig.measured[:] = [0.4, -0.3]
    rig.started()
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'waiting_for_chunk'
    assert rig.command.setpoints.tolist() == [0.4, -0.3]


@pytest.mark.parametrize(('came', 'words'), [(False, "'a' and 'b'"), (True, 'max_state_age_s')])
def test_when_no_state_came_or_none_comes_any_more_expect_start_refused(came, words):
    rig = rig_of()
    rig.state_arrives = came
    rig.tick(2)
    rig.state_arrives = False
    rig.tick(30)
    result = rig.start()
    assert not result.started and words in result.text
    assert rig.executor.mode is Mode.IDLE


def test_when_robot_was_moved_by_hand_expect_restart_at_its_new_position():
    rig = moving()
    rig.executor.stop()
    rig.robot_follows = False
    rig.measured[:] = [0.9, 0.1]
    rig.tick(5)
    assert rig.start().started
    # In all joints: once one was moved, none goes back to the last command.
    assert rig.tick().setpoints == pytest.approx([0.9, 0.1])


def test_when_robot_sags_a_little_expect_a_restart_where_it_is_and_then_the_last_command():
    rig = moving()
    held = rig.executor.stop_at_once().setpoints.copy()
    rig.robot_follows = False
    rig.measured[:] = held - 0.02
    rig.tick(5)
    assert rig.start().started
    assert rig.tick().setpoints == pytest.approx(held - 0.02, abs=1e-9)
    at = len(rig.ticks)
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 50)
    assert rig.command.setpoints == pytest.approx(held, abs=1e-9)
    steps = np.diff([tick.command.setpoints for tick in rig.ticks[at - 1 :]], axis=0)
    assert np.abs(steps).max() <= rig.config.start.approach_speed * 0.01 * (1 + 1e-9)


def test_when_started_twice_expect_motion_undisturbed():
    rig = moving()
    assert rig.start().started
    assert rig.tick().kind is CommandKind.TRACK


def test_when_held_for_long_expect_the_next_chunk_to_be_a_new_start():
    rig = moving(start=StartParameters(tolerance=0.1, on_too_far='refuse', cold_after_s=1.0))
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    rig.tick(110)
    assert rig.submit([0.9] * 30).refusal is ChunkRefusal.START_TOO_FAR


def test_when_nobody_measures_a_column_expect_nothing_published_before_its_first_row():
    columns = (Column('x', feedback=False), Column('y', feedback=False))
    rig = rig_of(columns=columns).started()
    assert rig.tick(5).kind is CommandKind.IDLE
    assert rig.submit(np.array([[0.6, 0.3]] * 30)).accepted
    rig.tick()
    assert rig.command.kind is CommandKind.TRACK
    assert rig.command.setpoints == pytest.approx([0.6, 0.3])


# ---------------------------------------------------------------- stop


def test_when_stopped_expect_hold_at_once_and_until_start():
    rig = moving()
    last = rig.executor.stop_at_once()
    assert last.kind is CommandKind.HOLD
    assert (last.setpoints == rig.command.setpoints).all()
    rig.tick(10)
    assert_held(rig, Reason.STOPPED)
    assert rig.submit(RAMP).refusal is ChunkRefusal.NOT_RUNNING
    assert rig.start().started
    rig.tick()
    assert rig.submit([0.05] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK


def test_when_stopped_expect_velocity_columns_at_zero():
    columns = (Column('a'), Column('w', kind='velocity'))
    rig = rig_of(columns=columns).started()
    rig.submit(np.array([[0.1, 0.8]] * 30))
    rig.tick(10)
    assert rig.command.setpoints[1] == pytest.approx(0.8)
    last = rig.executor.stop_at_once()
    assert last.setpoints[1] == 0.0 and last.setpoints[0] > 0.0


def test_when_started_and_stopped_again_and_again_expect_no_trace_of_it():
    rig = rig_of().started()
    for _ in range(200):
        rig.executor.stop()
        assert rig.start().started
    rig.tick()
    assert_held(rig, Reason.WAITING_FOR_CHUNK)
    assert rig.submit(RAMP).accepted
    assert rig.tick().kind is CommandKind.TRACK


# ---------------------------------------------------------------- clocks and ticks


def test_when_a_tick_is_late_expect_hold_and_the_plan_dropped():
    rig = moving(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    rig.now_s += 0.2
    rig.ros_ns += 200_000_000
    rig.tick()
    assert_held(rig, Reason.TICK_LATE)
    assert '0.210 s' in rig.executor.detail
    assert rig.tick().reason is Reason.WAITING_FOR_CHUNK
    assert rig.executor.wants_chunk
    assert rig.executor.counters.late_ticks == 1


def test_when_ticks_stop_coming_expect_the_dead_man_to_give_the_hold_and_drop_the_plan():
    rig = moving(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    rig.poll()
    assert rig.executor.dead_man(rig.now_s + 0.04) is None
    assert rig.executor.status().chunk != -1
    command = rig.executor.dead_man(rig.now_s + 0.06)
    assert command is not None
    assert command.kind is CommandKind.HOLD and command.reason is Reason.TICK_LATE
    assert (command.setpoints == rig.command.setpoints).all()
    assert rig.executor.status().chunk == -1 and not rig.executor.status().open_requests
    again = rig.executor.dead_man(rig.now_s + 0.5)
    assert again is not None and again.kind is CommandKind.HOLD
    # Neither does a tick that finds no gap by itself go on with it.
    rig.tick()
    assert rig.command.kind is CommandKind.HOLD
    assert (rig.command.setpoints == rig.ticks[-2].command.setpoints).all()


def test_when_no_tick_follows_the_start_expect_the_dead_man_to_give_the_hold():
    rig = rig_of(watchdog=WatchdogParameters(tick_timeout_s=0.05))
    rig.tick(2)
    # Ticks had stopped long before the start, which begins anew.
    rig.now_s += 60.0
    rig.ros_ns += 60_000_000_000
    rig.report()
    rig.measure()
    assert rig.start().started
    assert rig.executor.dead_man(rig.now_s + 0.04) is None
    command = rig.executor.dead_man(rig.now_s + 0.06)
    assert command is not None
    assert command.kind is CommandKind.HOLD and command.reason is Reason.TICK_LATE
    rig.tick(2)
    assert rig.reason == 'waiting_for_chunk'


def test_when_never_ticked_or_idle_expect_the_dead_man_to_publish_nothing():
    rig = rig_of()
    assert rig.executor.dead_man(1e9) is None
    rig.tick()
    command = rig.executor.dead_man(rig.now_s + 9)
    assert command is not None and command.kind is CommandKind.IDLE


@pytest.mark.parametrize('jump_s', [-3600.0, -1.0, 1.0, 3600.0])
def test_when_ros_clock_jumps_expect_hold_and_recovery_with_new_data(jump_s):
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


def test_when_simulated_clock_is_paused_expect_nothing_to_move_and_to_go_on_after():
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
def test_when_steady_clock_is_not_a_number_expect_hold(now_s):
    rig = moving()
    rig.executor.tick(now_s, rig.ros_ns)
    rig.now_s += 0.01
    assert rig.executor.status().reason is Reason.CLOCK_INVALID


def test_when_tick_is_given_garbage_expect_hold_until_started_again():
    rig = moving()
    command = rig.executor.tick('noon', rig.ros_ns)
    assert command.kind is CommandKind.HOLD and command.reason is Reason.INTERNAL_ERROR
    assert 'TypeError' in rig.executor.detail
    assert rig.tick().reason is Reason.INTERNAL_ERROR
    assert rig.executor.counters.internal_errors == 1


def test_when_a_tick_is_a_little_late_expect_no_command_further_than_the_period_allows():
    limits = alike(TWO, ColumnLimits(velocity=0.3))
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
    acceleration, pause_s
):
    """A controller has come to rest by then, and goes to the next command in one period."""
    limits = alike(TWO, ColumnLimits(velocity=0.3, acceleration=acceleration))
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


def test_when_a_good_chunk_comes_between_clamped_ones_expect_no_latch():
    rig = rig_of(limits=make_limits(TWO, {'a': ColumnLimits(-1, 0.05)}), clamp_latch=2).started()
    for value in (0.1, 0.0, 0.1, 0.0):
        assert rig.submit([value] * 30).accepted
        rig.tick(4)
    assert rig.executor.counters.clamped == 2


def test_when_chunk_violates_a_rejecting_limit_expect_none_of_it_executed():
    limits = make_limits(
        TWO, {'b': ColumnLimits(-1, 0.05)}, actions=LimitActions(position='reject')
    )
    rig = rig_of(limits=limits).started()
    result = rig.submit([0.0] * 29 + [0.06])
    assert result.refusal is ChunkRefusal.LIMIT and "'b' in row 29" in result.text
    rig.tick(20)
    assert rig.executed() == []


# ---------------------------------------------------------------- dry run


def test_when_dry_run_expect_everything_computed_and_flagged_and_nothing_to_reach_the_robot():
    rig = rig_of(dry_run=True).started()
    assert rig.submit(RAMP).accepted
    rig.tick(60)
    assert rig.command.kind is CommandKind.TRACK and rig.command.dry_run
    assert rig.command.setpoints[0] > 0.1
    assert (rig.measured == 0.0).all()
    rig.executor.set_dry_run(False)
    assert rig.tick().kind is CommandKind.IDLE
    assert rig.start().started
    assert rig.tick().setpoints.tolist() == [0.0, 0.0]


@pytest.mark.parametrize('dry_run', [True, False])
def test_when_dry_run_is_set_in_motion_expect_a_hold_to_publish_last(dry_run):
    rig = moving()
    rig.executor.set_dry_run(dry_run)
    rig.tick()
    assert_held(rig, Reason.STOPPED)
    assert not rig.command.dry_run
    assert rig.tick().dry_run is dry_run
    assert rig.command.kind is (CommandKind.IDLE if dry_run else CommandKind.HOLD)


@pytest.mark.parametrize('rate_hz', [10, 50, 100, 500])
@pytest.mark.parametrize('phase', [0.0, 0.3, 0.99])
def test_when_ticks_stop_expect_the_hold_a_period_after_the_time_out_at_most(rate_hz, phase):
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


def test_when_stopped_and_reset_beyond_a_limit_expect_the_wheel_to_stop():
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


# --- A release: the robot comes to rest, then nothing is commanded until a start

ACCELERATION = 2.0
PERIOD_S = 0.01


def released(rig: Rig) -> Rig:
    """The same rig once it commands nothing."""
    rig.executor.release()
    for _ in range(200):
        if rig.tick().kind is CommandKind.IDLE:
            return rig
    raise AssertionError('it goes on commanding')


def test_when_released_in_motion_expect_braking_within_limits_then_a_hold_then_nothing():
    limits = {name: ColumnLimits(acceleration=ACCELERATION) for name in 'ab'}
    rig = moving(limits=make_limits(('a', 'b'), limits))
    first = len(rig.ticks) - 2
    released(rig)
    sent = [tick.command.setpoints[0] for tick in rig.ticks[first:-1]]
    velocities = np.diff(sent) / PERIOD_S
    assert np.abs(np.diff(velocities)).max() <= ACCELERATION * PERIOD_S * 1.01
    # The hold was commanded: it is the last of them.
    last = rig.ticks[-2].command
    assert (last.kind, last.reason) == (CommandKind.HOLD, Reason.RELEASED)
    assert not last.velocities.any() and sent[-1] == sent[-2]
    assert rig.reason == 'released' and rig.executor.mode is Mode.STOPPED
    assert rig.tick(50).kind is CommandKind.IDLE


def test_when_released_a_second_time_meanwhile_expect_it_to_come_to_rest_all_the_same():
    rig = moving()
    for _ in range(100):
        rig.executor.release()
        rig.tick()
    assert rig.command.kind is CommandKind.IDLE


@pytest.mark.parametrize('way', ['stopped', 'holding'])
def test_when_it_stands_already_expect_one_more_hold_at_most(way):
    rig = rig_of().started()
    if way == 'stopped':
        rig.executor.stop()
    rig.tick(3)
    rig.executor.release()
    assert [rig.tick().kind for _ in range(3)] == [CommandKind.HOLD] + 2 * [CommandKind.IDLE]


def test_when_started_after_others_moved_it_expect_it_to_set_out_from_where_it_is():
    rig = released(moving())
    rig.measured[:] = [0.9, -0.7]
    rig.tick()
    assert rig.start().started
    assert rig.tick().setpoints.tolist() == [0.9, -0.7]
    assert rig.reason == 'waiting_for_chunk'


def test_when_never_started_expect_a_release_to_change_nothing():
    rig = rig_of()
    rig.tick(2)
    rig.executor.release()
    rig.tick(2)
    assert (rig.command.kind, rig.reason) == (CommandKind.IDLE, 'not_started')


def test_when_started_while_it_comes_to_rest_expect_it_to_stay_started():
    limits = {name: ColumnLimits(acceleration=ACCELERATION) for name in 'ab'}
    rig = moving(limits=make_limits(('a', 'b'), limits))
    rig.executor.release()
    rig.tick()
    assert rig.start().started
    rig.tick(100)
    assert (rig.command.kind, rig.executor.mode) == (CommandKind.HOLD, Mode.RUNNING)


@pytest.mark.parametrize('action', ['brake', 'freeze'])
def test_a_velocity_is_commanded_to_zero_before_the_release(action):
    rig = Rig(
        columns=(Column('a', 'velocity'), Column('b', 'velocity')),
        on_stop=StopActions(released=action),
    ).started()
    assert rig.submit([0.5] * 30).accepted
    rig.tick(10)
    assert rig.command.setpoints[0] > 0.0
    released(rig)
    assert rig.ticks[-2].command.kind is CommandKind.HOLD
    assert not rig.ticks[-2].command.setpoints.any()
