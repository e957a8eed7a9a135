"""A stop brakes along the plan within the limits; a hold gives way to a robot pushed from it."""

import itertools

import numpy as np
import pytest
from execution_rig import SWITCH, Rig, alike, chunk_of, holding
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import EXAMPLES

from vla_runtime.execution.column_model import ColumnModel, StartParameters
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.limits import ColumnLimits, LimitActions, OnViolation, make_limits
from vla_runtime.execution.stopping import StopActions
from vla_runtime.execution.watchdog import WatchdogParameters

ACCELERATION = 20.0
SPEED = 1.3
STEP_S = 0.04
PERIOD_S = 0.01
LIMIT = ColumnLimits(-6.0, 6.0, 3.14, ACCELERATION, 0.4)
NAMES = ('a', 'b')
# A hold gives way to a blocked joint too: so late that no test here runs into that.
WATCHDOG = WatchdogParameters(max_tracking_error=0.5, blocked_after_s=60.0)
# What a hold follows a robot by at most (`hold_follows`).
FOLLOWS = 0.05


def rig_of(on_stop: StopActions | None = None, columns: tuple[Column, ...] | None = None) -> Rig:
    return Rig(
        holding(replan_interval=30, handover=SWITCH),
        columns or tuple(Column(name) for name in NAMES),
        limits=alike(NAMES, LIMIT),
        start=StartParameters(tolerance=0.2),
        watchdog=WATCHDOG,
        on_stop=on_stop or StopActions(),
        control_period_s=PERIOD_S,
    ).started()


def moving(rig: Rig) -> Rig:
    """Joint a at 1.3 rad/s, joint b at half of it: the plan is a straight line."""
    rows = np.arange(1, 41)[:, None] * SPEED * STEP_S * np.array([1.0, 0.5])
    assert rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S)).accepted
    rig.run_until(lambda command: command.setpoints[0] > 0.5)
    assert speeds(rig)[-1, 0] == pytest.approx(SPEED, rel=1e-3)
    return rig


def speeds(rig: Rig) -> np.ndarray:
    """(ticks, columns) velocity of the commands by the times they were given at."""
    values = np.array([tick.command.setpoints for tick in rig.ticks])
    times = np.array([tick.now_s for tick in rig.ticks])
    return np.diff(values, axis=0) / np.diff(times)[:, None]


def hardest(rig: Rig) -> float:
    """The largest acceleration of the commands, by the times they were given at."""
    times = np.array([tick.now_s for tick in rig.ticks])
    return float((np.abs(np.diff(speeds(rig), axis=0)) / np.diff(times)[1:, None]).max())


def silence(rig: Rig) -> None:
    rig.state_arrives = False


def lie(rig: Rig) -> None:
    rig.robot_follows = False
    rig.measured[1] = np.nan


def set_the_clock(rig: Rig) -> None:
    rig.ros_ns += 2_000_000_000


def stop(rig: Rig) -> None:
    rig.executor.stop()


def dry_run(rig: Rig) -> None:
    rig.executor.set_dry_run(True)


def reset(rig: Rig) -> None:
    rig.executor.reset(1)


@pytest.mark.parametrize('cause', [stop, dry_run, silence, reset, lie, set_the_clock])
def test_when_stopped_in_motion_expect_braking_within_the_acceleration_along_the_plan(cause):
    rig = moving(rig_of())
    cause(rig)
    rig.run_until(lambda command: command.kind is not CommandKind.TRACK, 60)
    assert hardest(rig) <= ACCELERATION * (1 + 1e-6)
    if cause in (stop, dry_run, silence):
        assert rig.command.kind is CommandKind.HOLD
        a, b = rig.command.setpoints
        assert a > 0.5 and b == pytest.approx(0.5 * a, abs=1e-9)


def test_when_stopped_expect_the_shortest_way_the_acceleration_allows():
    rig = moving(rig_of())
    begins_s, begins = rig.now_s, rig.command.setpoints[0]
    rig.executor.stop()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    assert rig.reason == 'stopped'
    assert rig.now_s - begins_s <= SPEED / ACCELERATION + 3 * PERIOD_S
    assert rig.command.setpoints[0] - begins <= SPEED**2 / (2 * ACCELERATION) + SPEED * PERIOD_S


def test_when_another_fault_is_found_while_braking_expect_the_hold_to_name_the_first():
    rig = moving(rig_of())
    rig.ros_ns += 2_000_000_000
    rig.state_arrives = False
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    assert rig.reason == 'clock_jump'
    assert rig.executor.counters.holds[Reason.CLOCK_JUMP] == 1
    assert rig.tick().reason is Reason.STATE_MISSING


def test_when_the_robot_file_says_freeze_expect_the_hold_at_once():
    rig = moving(rig_of(StopActions(stopped='freeze')))
    before = rig.command.setpoints.copy()
    rig.executor.stop()
    assert rig.tick().kind is CommandKind.HOLD
    assert (rig.command.setpoints == before).all()


def test_when_a_velocity_column_is_stopped_expect_it_ramped_to_zero():
    rig = rig_of(columns=(Column('a'), Column('b', kind='velocity')))
    rows = np.tile([0.0, 0.8], (40, 1))
    assert rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S)).accepted
    rig.tick(20)
    rig.executor.stop()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    wheel = np.array([tick.command.setpoints[1] for tick in rig.ticks])
    assert wheel[-1] == 0.0
    assert np.abs(np.diff(wheel)).max() <= ACCELERATION * PERIOD_S * (1 + 1e-6)


# A Franka's fourth joint: what its velocity is as a position lies outside of these limits.
FOURTH = ColumnLimits(-3.07, -0.07, 2.6, ACCELERATION, 0.4)


def moving_by_velocity() -> Rig:
    """A column in the middle of its range at 1.3 rad/s, with measured positions."""
    rig = Rig(
        holding(replan_interval=30, handover=SWITCH),
        (Column('a', kind='velocity'),),
        limits=make_limits(('a',), {'a': FOURTH}),
        control_period_s=PERIOD_S,
    )
    rig.measured[0] = -1.58
    rig.started()
    assert rig.submit(chunk_of(np.full((40, 1), SPEED), rig.names, rig.kinds, STEP_S)).accepted
    rig.run_until(lambda command: command.setpoints[0] == SPEED)
    return rig


@pytest.mark.parametrize('cause', [stop, silence, lie, set_the_clock])
def test_when_a_velocity_column_is_measured_no_more_expect_it_ramped_to_zero(cause):
    rig = moving_by_velocity()
    if cause is lie:
        rig.measured[0] = np.nan
    else:
        cause(rig)
    rig.state_arrives = rig.state_arrives and cause is not stop
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    velocities = np.array([tick.command.setpoints[0] for tick in rig.ticks])
    assert velocities[-1] == 0.0
    assert np.abs(np.diff(velocities)).max() <= ACCELERATION * PERIOD_S * (1 + 1e-6)


def test_when_ticks_stop_expect_the_dead_man_to_ramp_a_velocity_column_to_zero():
    rig = moving_by_velocity()
    now_s, velocity = rig.now_s, SPEED
    while velocity > 0.0:
        now_s += 0.06
        command = rig.executor.dead_man(now_s)
        assert command is not None
        assert velocity - command.setpoints[0] <= ACCELERATION * 0.06 * (1 + 1e-6)
        assert command.setpoints[0] < velocity
        velocity = float(command.setpoints[0])
    assert velocity == 0.0


def test_when_a_joint_is_blocked_while_it_brakes_expect_it_pushed_no_further():
    slow = ColumnLimits(-6.0, 6.0, 3.14, 0.5)
    rig = Rig(
        holding(replan_interval=90, handover=SWITCH),
        (Column('a'),),
        limits=make_limits(('a',), {'a': slow}),
        watchdog=WatchdogParameters(max_tracking_error=0.5),
        control_period_s=PERIOD_S,
    ).started()
    rows = np.cumsum(np.minimum(np.arange(1, 100) * 0.01, 1.0) * STEP_S)
    assert rig.submit(chunk_of(rows[:, None], rig.names, rig.kinds, STEP_S)).accepted
    rig.run_until(lambda command: command.velocities[0] > 0.9, 900)
    rig.robot_follows = False
    blocked_at = float(rig.measured[0])
    rig.executor.stop()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 400)
    # By a tick's way at most; to brake it would take 0.8.
    assert 0.4 < rig.command.setpoints[0] - blocked_at <= 0.5 + PERIOD_S
    assert rig.executor.counters.holds[Reason.TRACKING_ERROR] == 1


def test_when_ticks_stop_in_motion_expect_the_dead_man_to_brake():
    rig = moving(rig_of())
    now_s, last, speed = rig.now_s, rig.command.setpoints.copy(), SPEED
    for _ in range(30):
        now_s += 0.06
        command = rig.executor.dead_man(now_s)
        assert command is not None
        slower = (command.setpoints[0] - last[0]) / 0.06
        assert abs(slower - speed) <= ACCELERATION * 0.06 * (1 + 1e-6)
        last, speed = command.setpoints.copy(), slower
    assert command.kind is CommandKind.HOLD and speed == 0.0


def test_when_started_again_while_it_brakes_expect_it_to_come_to_rest_first():
    rig = moving(rig_of())
    rig.executor.stop()
    rig.tick(2)
    result = rig.start()
    assert result.started and 'comes to rest' in result.text
    rig.run_until(lambda command: command.reason is Reason.WAITING_FOR_CHUNK, 60)
    assert hardest(rig) <= ACCELERATION * (1 + 1e-6)


# ---------------------------------------------------------------- a push against the arm


def push(rig: Rig, by: float, seconds: float) -> None:
    """Push joint a away from where it is, against its controller, and keep it there."""
    rig.robot_follows = False
    goal = rig.measured[0] + by
    for _ in range(round(seconds / PERIOD_S)):
        rig.measured[0] += np.clip(goal - rig.measured[0], -0.05, 0.05)
        rig.tick()


def is_near(rig: Rig) -> bool:
    """Return whether the command of joint a has come to where the joint is."""
    return abs(rig.command.setpoints[0] - rig.measured[0]) <= 0.05 * LIMIT.step_from_measured


def let_go(rig: Rig, seconds: float) -> np.ndarray:
    """Joint a follows its command again, as a servo does: the way it goes, tick by tick."""
    way = [rig.measured[0]]
    for _ in range(round(seconds / PERIOD_S)):
        rig.measured[0] += 0.2 * (rig.command.setpoints[0] - rig.measured[0])
        rig.tick()
        way.append(rig.measured[0])
    return np.array(way)


@pytest.mark.parametrize('by', [-1.0, 1.0])
def test_when_a_joint_was_pushed_away_expect_it_held_near_where_it_is(by):
    """The command of a stopped robot is set to where it rests in one step: nothing moves by it."""
    rig = moving(rig_of())
    at = len(rig.ticks)
    push(rig, by, 2.0)
    assert rig.reason == 'tracking_error' and '~/start' in rig.executor.detail
    held = [tick.command for tick in rig.ticks[at:] if tick.command.kind is CommandKind.HOLD]
    assert any(command.seats for command in held)
    for before, command in itertools.pairwise(held):
        step = abs(command.setpoints[0] - before.setpoints[0])
        if command.seats and step:
            assert command.setpoints[0] == pytest.approx(rig.measured[0], abs=1e-9)
        else:
            assert step <= rig.config.start.approach_speed * PERIOD_S * (1 + 1e-9)
    way = let_go(rig, 2.0)
    # The last command before the push was 1 rad away.
    assert np.abs(way - way[0]).max() <= 0.05 * LIMIT.step_from_measured


def test_when_two_joints_were_pushed_away_and_rest_one_after_the_other_expect_both_held():
    rig = moving(rig_of())
    rig.executor.stop()
    rig.tick(80)
    rig.robot_follows = False
    for tick in range(200):
        rig.measured[0] -= 0.01 * (tick < 20)
        rig.measured[1] -= 0.01 * (tick < 65)
        rig.tick()
    assert rig.command.setpoints == pytest.approx(rig.measured, abs=0.02)


def test_when_a_hold_gives_way_at_a_limit_expect_it_to_stay_inside():
    rig = moving(rig_of())
    push(rig, 6.5, 4.0)
    assert rig.measured[0] > 6.0
    assert max(tick.command.setpoints[0] for tick in rig.ticks) <= 6.0
    assert rig.command.setpoints[0] == pytest.approx(6.0)


def test_when_an_encoder_lies_once_expect_the_value_refused_and_the_way_of_braking_only():
    """A value that no motion explains is not taken: it is no tracking error, and heals alone."""
    rig = moving(rig_of())
    before = rig.command.setpoints[0]
    rig.measured[0] += 1.0
    rig.tick()
    assert rig.reason == 'braking'
    rig.run_until(lambda command: command.reason is Reason.STATE_IMPLAUSIBLE, 20)
    rig.run_until(lambda command: command.reason is Reason.WAITING_FOR_CHUNK, 60)
    assert rig.executor.counters.states_implausible == 1
    way = rig.command.setpoints[0] - before
    assert 0.0 <= way <= SPEED**2 / (2 * ACCELERATION) + SPEED * PERIOD_S


# ---------------------------------------------------------------- how far is too far


def test_when_a_range_is_small_expect_a_tracking_error_that_means_something():
    columns = CommandColumns([Column('arm'), Column('gripper'), Column('wrist', continuous=True)])
    limits = make_limits(
        columns.names, {'arm': ColumnLimits(-3.0, 3.0), 'gripper': ColumnLimits(0.021, 0.057)}
    )
    allowed = ColumnModel(columns, limits).tracking_error
    assert allowed == pytest.approx([0.5, 0.027, 0.5])


def test_when_the_limits_name_a_tracking_error_expect_it_to_have_precedence():
    columns = CommandColumns([Column('arm'), Column('gripper'), Column('wheel', kind='velocity')])
    limits = make_limits(
        columns.names,
        {
            'arm': ColumnLimits(-3.0, 3.0, tracking_error=0.9),
            'gripper': ColumnLimits(0.0, 0.036, tracking_error=0.036),
        },
    )
    assert ColumnModel(columns, limits).tracking_error.tolist() == [0.9, 0.036, np.inf]


def test_when_a_gripper_is_jammed_expect_a_stop_within_its_range():
    limits = make_limits(
        NAMES, {'a': ColumnLimits(-6.0, 6.0, 3.0), 'b': ColumnLimits(0.0, 0.036, 0.2)}
    )
    rig = Rig(holding(replan_interval=40, handover=SWITCH), limits=limits).started()
    rows = np.linspace([0.0, 0.0], [0.0, 0.036], 40)
    assert rig.submit(rows).accepted
    rig.robot_follows = False
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR, 400)
    assert "'b'" in rig.executor.detail


# ---------------------------------------------------------------- what a reviewer broke once


def test_when_dry_run_is_set_in_motion_expect_no_start_before_it_is_in_force():
    rig = moving(rig_of())
    rig.executor.set_dry_run(True)
    rig.tick(2)
    refused = rig.start()
    assert not refused.started and 'dry_run' in refused.text
    rig.run_until(lambda command: command.dry_run, 60)
    assert rig.start().started
    rig.tick(3)
    assert rig.command.dry_run


@settings(max_examples=EXAMPLES)
@given(st.floats(-0.15, 0.15), st.integers(1, 30), st.floats(0.2, 3.0), st.integers(0, 9))
def test_when_stopped_behind_its_plan_expect_it_only_to_slow_down(jump, ticks, slope, noise):
    rig = rig_of()
    wobble = 0.02 * np.sin(noise * np.arange(40))
    rows = (jump + slope * STEP_S * np.arange(40) + wobble)[:, None] * np.array([1.0, 0.5])
    rows = np.clip(rows, -5.9, 5.9)
    if not rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S)).accepted:
        return
    rig.tick(ticks)
    before, at = np.abs(speeds(rig)[-1]), rig.command.setpoints.copy()
    rig.executor.stop()
    begins = len(rig.ticks)
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 80)
    after = np.abs(speeds(rig)[begins - 1 :])
    assert (np.diff(np.vstack([before, after]), axis=0) <= 1e-9).all()
    way = np.abs(rig.command.setpoints - at)
    assert (way <= before**2 / (2 * ACCELERATION) + before * PERIOD_S + 1e-9)[0]
    assert hardest(rig) <= ACCELERATION * (1 + 1e-6)


def test_when_a_chunk_is_too_far_after_a_reset_in_motion_expect_no_step_of_the_velocity():
    rig = moving(rig_of())
    rig.executor.reset(1)
    rig.tick()
    result = rig.submit(chunk_of([[-0.5, 0.0]] * 40, step_time_s=STEP_S))
    assert not result.accepted and 'approaching it first' in result.text
    rig.tick(20)
    assert hardest(rig) <= ACCELERATION * (1 + 1e-6)


def test_when_pushed_while_it_waits_expect_the_hold_to_follow_a_little_without_a_rattle():
    """By `hold_follows` in all, and at the speed of an approach, once the joint rests."""
    rig = rig_of()
    assert rig.reason == 'waiting_for_chunk'
    at = len(rig.ticks)
    push(rig, 0.45, 0.5)
    assert rig.command.setpoints[0] == 0.0
    rig.tick(150)
    assert rig.reason == 'waiting_for_chunk'
    assert 0.5 * FOLLOWS < rig.command.setpoints[0] <= FOLLOWS * (1 + 1e-9)
    assert rig.executor.status().gave_way.startswith("'a' by 0.0")
    speed = speeds(rig)[at:, 0]
    assert np.abs(speed).max() <= rig.config.start.approach_speed * (1 + 1e-9)
    assert (speed >= 0.0).all()
    # It speeds up once and slows down once; what is left are roundings.
    changes = np.sign(np.diff(speed).round(6))
    assert np.count_nonzero(np.diff(changes[changes != 0.0])) <= 1
    assert hardest(rig) <= ACCELERATION * (1 + 1e-6)


@pytest.mark.parametrize(('wait_ticks', 'by'), [(None, -0.3), (1, 0.45), (3, 0.45), (8, 0.45)])
def test_when_started_after_a_push_expect_the_command_at_rest_where_the_robot_is(wait_ticks, by):
    """At once, or so long after the hold began to give way: a step of the command, no motion."""
    rig = moving(rig_of())
    rig.executor.stop()
    rig.tick(30)
    push(rig, by, 0.1)
    if wait_ticks is not None:
        rig.run_until(lambda command: command.velocities[0] != 0.0, 60)
        rig.tick(wait_ticks - 1)
    result = rig.start()
    assert result.started and 'was moved while it held' in result.text
    at = len(rig.ticks)
    rig.tick(100)
    assert rig.reason == 'waiting_for_chunk' and rig.ticks[at].command.seats
    for tick in rig.ticks[at:]:
        assert tick.command.setpoints[0] == pytest.approx(rig.measured[0], abs=1e-9)
        assert tick.command.velocities[0] == 0.0


@pytest.mark.parametrize(('lag', 'every'), [(0.1, 1), (0.12, 2), (0.1, 4), (0.02, 10)])
def test_when_a_healthy_arm_lags_expect_its_reach_to_slow_the_command_in_time(lag, every):
    rig = rig_of()
    rig.robot_follows = False
    rows = 2.0 * (1 - np.cos(np.pi * np.minimum(np.arange(1, 41) / 36, 1.0)))
    assert rig.submit(chunk_of(rows[:, None] * np.array([1.0, 0.5]), step_time_s=STEP_S)).accepted
    arm = rig.measured.copy()
    for tick in range(140):
        arm += (rig.command.setpoints - arm) * PERIOD_S / lag
        if tick % every == 0:
            rig.measured[:] = arm
        rig.tick(measure=tick % every == 0)
    assert 'tracking_error' not in {tick.command.reason.value for tick in rig.ticks}
    assert hardest(rig) <= ACCELERATION * (1 + 1e-6)


def sim_rig() -> Rig:
    rig = Rig(
        holding(replan_interval=30, handover=SWITCH),
        limits=alike(NAMES, LIMIT),
        watchdog=WatchdogParameters(motion_clock='ros', clock_timeout_s=0.1, tick_timeout_s=1.0),
    )
    return moving(rig.started())


def pause(rig: Rig) -> None:
    """The simulated clock stands still for half a second; ticks go on."""
    for _ in range(50):
        rig.now_s += 0.01
        rig.tick_now()


def moves_by_ros_time(rig: Rig) -> np.ndarray:
    """(n,) acceleration of joint a by the ROS clock, ticks of the pause left out."""
    ticks = [rig.ticks[0]] + [b for a, b in itertools.pairwise(rig.ticks) if b.ros_ns > a.ros_ns]
    values = np.array([tick.command.setpoints[0] for tick in ticks])
    times = np.array([tick.ros_ns for tick in ticks]) * 1e-9
    spans = np.round(np.diff(times), 6)
    return np.diff(np.diff(values) / spans) / spans[1:]


@pytest.mark.parametrize('cause', [None, stop])
def test_when_a_simulated_clock_pauses_expect_the_motion_to_go_on_where_it_was(cause):
    rig = sim_rig()
    if cause is not None:
        cause(rig)
        rig.tick()
    pause(rig)
    rig.tick(40)
    assert rig.executor.counters.internal_errors == 0
    assert np.abs(moves_by_ros_time(rig)).max() <= ACCELERATION * (1 + 1e-3)


def test_when_started_while_braking_by_a_simulated_clock_expect_no_step_of_the_velocity():
    rig = sim_rig()
    rig.executor.stop()
    rig.tick(2)
    assert rig.start().started
    rig.tick(20)
    assert np.abs(moves_by_ros_time(rig)).max() <= ACCELERATION * (1 + 1e-3)


# ---------------------------------------------------------------- a gripper that holds something

OPEN, CONTACT, CLOSED = 0.0, 0.2, 0.8


def grasping(max_step: float = np.inf, far_steps: OnViolation = 'clamp') -> Rig:
    """A rig that carries an object: an arm joint, and a gripper commanded beyond the contact."""
    grips = ColumnLimits(OPEN, CLOSED, 2.0, np.inf, max_step, np.inf)
    rig = _Gripper(
        holding(replan_interval=60, handover=SWITCH),
        tuple(Column(name) for name in ('arm', 'gripper')),
        limits=make_limits(
            ('arm', 'gripper'),
            {'arm': LIMIT, 'gripper': grips},
            actions=LimitActions(step_from_measured=far_steps),
        ),
        start=StartParameters(tolerance=0.1),
        watchdog=WATCHDOG,
        control_period_s=PERIOD_S,
    ).started()
    rows = np.stack([np.arange(60) * 0.01, np.minimum(np.arange(60) * 0.04, CLOSED)], axis=1)
    assert rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S)).accepted
    rig.run_until(lambda command: command.step == 40)
    return rig


class _Gripper(Rig):
    """A rig whose second column meets an object."""

    contact = CONTACT

    def measure(self) -> None:
        self.measured[1] = min(self.measured[1], self.contact)
        super().measure()


def test_when_a_gripper_closes_on_an_object_expect_no_fault_and_its_whole_command():
    rig = grasping()
    assert rig.reason == 'tracking'
    assert rig.command.setpoints[1] == pytest.approx(CLOSED)


@pytest.mark.parametrize('max_step', [np.inf, 0.3])
def test_when_a_robot_with_an_object_is_stopped_and_started_expect_the_grip_unchanged(max_step):
    rig = grasping(max_step)
    grip = rig.command.setpoints[1]
    assert grip == pytest.approx(min(CLOSED, CONTACT + max_step))
    rig.executor.stop()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    rig.tick(100)
    assert rig.command.setpoints[1] == pytest.approx(grip)
    result = rig.start()
    assert result.started and 'was moved' not in result.text
    rig.tick(100)
    assert rig.command.setpoints[1] == pytest.approx(grip)


@pytest.mark.parametrize('closed', [CLOSED, OPEN])
def test_when_max_step_keeps_a_grip_from_its_plan_expect_a_new_start_all_the_same(closed):
    rig = grasping(max_step=0.3)
    rig.executor.stop()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    assert rig.start().started
    rig.tick(5)
    # Beyond what the object and max_step allow; or open, which is approached.
    rows = np.tile([rig.command.setpoints[0], closed], (60, 1))
    result = rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S))
    assert result.accepted == (closed == CLOSED), result.text
    rig.tick(900)
    assert rig.reason == ('starved' if result.accepted else 'waiting_for_chunk')
    assert rig.command.setpoints[1] == pytest.approx(min(closed, CONTACT + 0.3), abs=1e-6)


def test_when_an_object_stops_an_approach_expect_it_over_where_max_step_ends_it():
    rig = grasping(max_step=0.3)
    # As after a restart: the fingers set out from where they touch the object.
    rig.executor.set_dry_run(True)
    rig.tick(60)
    rig.executor.set_dry_run(False)
    rig.tick(2)
    assert rig.start().started
    rig.tick(5)
    assert rig.command.setpoints[1] == pytest.approx(CONTACT)
    rows = np.tile([rig.command.setpoints[0], CLOSED], (60, 1))
    assert not rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S)).accepted
    rig.tick(900)
    assert rig.reason == 'waiting_for_chunk'
    assert rig.submit(chunk_of(rows, rig.names, rig.kinds, STEP_S)).accepted


def test_when_fingers_are_pried_open_in_a_hold_expect_no_command_further_than_max_step():
    rig = grasping(max_step=0.3)
    rig.executor.stop()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 60)
    # No faster than the gripper can be told from a wrong reading.
    while rig.contact > OPEN:
        rig.contact = max(rig.contact - 0.02, OPEN)
        rig.tick()
    rig.tick(200)
    assert rig.command.setpoints[1] == pytest.approx(OPEN + 0.3)
    assert np.abs(speeds(rig)[-100:, 1]).max() <= 2.0 + 1e-9
    # They close again no further than that.
    rig.contact = CONTACT
    rig.tick(100)
    assert rig.command.setpoints[1] == pytest.approx(OPEN + 0.3)


def test_when_far_steps_are_refused_expect_a_grip_clamped_all_the_same():
    rig = grasping(max_step=0.3, far_steps='reject')
    assert rig.reason == 'tracking'
    assert rig.command.setpoints[1] == pytest.approx(CONTACT + 0.3)


def test_when_another_joint_was_pushed_away_expect_the_object_held_on_and_on_at_start():
    rig = grasping()
    push(rig, 1.0, 0.3)
    assert rig.reason == 'tracking_error'
    # By hand, once the hold has come to where the robot is.
    rig.tick(200)
    assert is_near(rig)
    push(rig, -0.3, 0.1)
    result = rig.start()
    assert result.started and 'was moved' in result.text
    rig.robot_follows = True
    rig.tick(200)
    assert min(tick.command.setpoints[1] for tick in rig.ticks[-400:]) == pytest.approx(CLOSED)
    assert rig.command.setpoints[0] == pytest.approx(rig.measured[0])
