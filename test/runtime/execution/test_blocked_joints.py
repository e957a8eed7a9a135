"""A joint that is pressed and does not move stops the robot; one that lags does not."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from execution_rig import SWITCH, TWO, Rig, alike, holding
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from vla_runtime.execution.blocked_joints import BlockedJoints
from vla_runtime.execution.column_model import ColumnModel, StartParameters
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.stopping import StopActions
from vla_runtime.execution.watchdog import WatchdogParameters

MAX_STEP = 0.2
PERIOD_S = 0.01
NEAR = 0.05 * MAX_STEP
# What a hold follows a robot by at most (`hold_follows`).
FOLLOWS = 0.05
WATCHDOG = WatchdogParameters(blocked_after_s=0.5)
LIMIT = ColumnLimits(velocity=2.0, acceleration=40.0, step_from_measured=MAX_STEP)


# ---------------------------------------------------------------- the detection alone


def watch_of(*columns: Column, limit: ColumnLimits = LIMIT, after_s: float = 0.5) -> BlockedJoints:
    made = CommandColumns(columns or (Column('a'), Column('b')))
    limits = alike(made.names, limit)
    return BlockedJoints(ColumnModel(made, limits), after_s)


def ticks_until_blocked(watch: BlockedJoints, commanded: float, measured: float = 0.0) -> int:
    """Ticks with these positions of every column until one is blocked; 1000 when none is."""
    count = len(watch.blocked)
    for tick in range(1, 1000):
        if watch.advance(np.full(count, commanded), np.full(count, measured), PERIOD_S):
            return tick
    return 1000


@pytest.mark.parametrize('side', [1.0, -1.0])
def test_when_a_joint_is_pressed_expect_it_blocked_after_the_time_and_not_before(side):
    assert ticks_until_blocked(watch_of(), side * 0.9 * MAX_STEP) in (50, 51)
    assert ticks_until_blocked(watch_of(), side * 0.89 * MAX_STEP) == 1000


def test_when_a_joint_moves_slowly_at_full_lead_expect_it_never_blocked():
    watch = watch_of(Column('a'))
    for measured in np.arange(0.0, 2.0, 0.11 * MAX_STEP / 50):
        assert not watch.advance(np.array([measured + MAX_STEP]), np.array([measured]), PERIOD_S)


def test_when_the_command_swings_in_front_of_the_joint_expect_the_time_to_add_up():
    """Every chunk that is planned from the present position takes the command back a little."""
    watch, standing = watch_of(Column('a')), np.zeros(1)
    for tick in range(1, 200):
        lead = MAX_STEP if tick % 2 else 0.3 * MAX_STEP
        if watch.advance(np.array([lead]), standing, PERIOD_S):
            break
    assert tick in (99, 101)


@pytest.mark.parametrize('back', [0.05 * MAX_STEP, -MAX_STEP])
def test_when_the_command_comes_back_expect_the_time_to_count_anew(back):
    watch, standing = watch_of(Column('a')), np.zeros(1)
    for _ in range(20):
        for _ in range(40):
            assert not watch.advance(np.array([MAX_STEP]), standing, PERIOD_S)
        watch.advance(np.array([back]), standing, PERIOD_S)


@pytest.mark.parametrize(
    'watch',
    [
        watch_of(Column('a', feedback=False)),
        watch_of(Column('a', kind='velocity')),
        watch_of(Column('a'), limit=ColumnLimits()),
        watch_of(Column('a'), limit=replace(LIMIT, tracking_error=np.inf)),
    ],
    ids=['not measured', 'velocity', 'no max_step', 'gripper'],
)
def test_when_a_column_is_not_guarded_expect_it_never_blocked(watch):
    assert ticks_until_blocked(watch, 2.0 * MAX_STEP) == 1000


def test_when_counting_anew_expect_the_whole_time_again():
    watch = watch_of()
    assert ticks_until_blocked(watch, MAX_STEP) < 60
    watch.restart()
    assert not watch.blocked.any()
    assert ticks_until_blocked(watch, MAX_STEP) in (50, 51)


# ---------------------------------------------------------------- the robot


def pressing(beyond: float = 0.97 * MAX_STEP, **config: object) -> Rig:
    """A robot that follows until something stops its first joint, so far short of its goal."""
    blocked_at = 0.1
    config.setdefault('limits', alike(TWO, LIMIT))
    config.setdefault('watchdog', WATCHDOG)
    config.setdefault('control_period_s', PERIOD_S)
    rig = Rig(holding(replan_interval=40, handover=SWITCH), **config).started()
    goal = blocked_at + beyond
    assert rig.submit([[min(0.02 * row, goal), 0.0] for row in range(41)]).accepted
    rig.run_until(lambda command: command.setpoints[0] > blocked_at)
    rig.robot_follows = False
    rig.measured[0] = blocked_at
    return rig


def pressed_s(rig: Rig) -> float:
    """Seconds for which commands led by nine tenths of max_step or more."""
    leads = [tick.command.setpoints[0] - rig.measured[0] for tick in rig.ticks]
    return PERIOD_S * sum(lead >= 0.9 * MAX_STEP for lead in leads)


def test_when_a_joint_is_blocked_expect_a_stop_that_says_so_and_a_hold_near_the_robot():
    rig = pressing()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.reason == 'tracking_error' and rig.executor.mode is Mode.STOPPED
    assert pressed_s(rig) == pytest.approx(0.5, abs=0.03)
    words = rig.executor.detail
    assert words.startswith("'a' is blocked: it has stayed near 0.1")
    for part in (
        '0.2 (max_step)',
        '0.5 s (blocked_after_s)',
        '~/start',
        'grips',
        'larger max_step',
    ):
        assert part in words
    rig.tick(40)
    assert abs(rig.command.setpoints[0] - rig.measured[0]) <= NEAR
    assert rig.command.setpoints[1] == 0.0
    assert rig.executor.detail == words
    # But for the one step to where the joint rests, by which nothing moves.
    for before, now in itertools.pairwise(tick.command for tick in rig.ticks):
        step = abs(now.setpoints[0] - before.setpoints[0])
        seated = now.seats and now.setpoints[0] == pytest.approx(rig.measured[0])
        assert seated or step <= LIMIT.velocity * PERIOD_S * (1 + 1e-9)


def test_when_started_again_against_the_obstacle_expect_the_whole_time_anew():
    rig = pressing()
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    # Before the hold has given way.
    assert rig.start().started
    rig.tick()
    assert (
        rig.reason in ('waiting_for_chunk', 'approaching') and 'blocked' not in rig.executor.detail
    )
    rig.run_until(lambda command: command.reason is Reason.WAITING_FOR_CHUNK)
    assert rig.submit([[0.1 + 0.02 * row, 0.0] for row in range(41)]).accepted
    before = pressed_s(rig)
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    assert pressed_s(rig) - before == pytest.approx(0.5, abs=0.03)


def test_when_a_started_robot_holds_against_an_obstacle_expect_a_stop():
    # In less time than a silent policy has (`restart_after_outage_s`).
    rig = pressing(watchdog=WatchdogParameters(blocked_after_s=1.2))
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    assert rig.executor.mode is Mode.STOPPED


def test_when_stopped_while_it_presses_expect_the_hold_to_give_way():
    rig = pressing()
    rig.run_until(lambda command: command.setpoints[0] - rig.measured[0] >= 0.95 * MAX_STEP)
    rig.executor.stop_at_once()
    rig.tick(30)
    assert rig.command.setpoints[0] - rig.measured[0] >= 0.9 * MAX_STEP
    rig.tick(60)
    assert rig.reason == 'stopped'
    assert abs(rig.command.setpoints[0] - rig.measured[0]) <= NEAR


def test_when_it_brakes_for_a_blocked_joint_expect_the_hold_to_give_way_too():
    rig = pressing(on_stop=StopActions(tracking_error='brake'))
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    rig.tick(60)
    assert rig.reason == 'tracking_error'
    assert abs(rig.command.setpoints[0] - rig.measured[0]) <= NEAR


def test_when_dry_run_expect_no_joint_blocked():
    limits = alike(TWO, LIMIT)
    rig = Rig(holding(replan_interval=40), limits=limits, watchdog=WATCHDOG, dry_run=True).started()
    assert rig.submit([0.02 * row for row in range(41)]).accepted
    # A policy that is silent for longer than 1.5 s (`restart_after_outage_s`) needs a start.
    rig.tick(250)
    assert rig.reason == 'starved' and rig.executor.mode is Mode.RUNNING


def test_when_an_approach_is_blocked_expect_a_stop_long_before_its_time_out():
    rig = Rig(
        holding(replan_interval=40),
        limits=alike(TWO, LIMIT),
        watchdog=WATCHDOG,
        start=StartParameters(tolerance=0.1, approach_speed=0.5),
    ).started()
    rig.submit([0.9] * 41)
    rig.tick(10)
    rig.robot_follows = False
    # The other joint follows: a robot of which none does is switched off (`Following`).
    for _ in range(400):
        if rig.tick().kind is CommandKind.HOLD:
            break
        rig.measured[1] = rig.command.setpoints[1]
    assert rig.reason == 'tracking_error' and 'is blocked' in rig.executor.detail
    assert pressed_s(rig) == pytest.approx(0.5, abs=0.03)


def test_when_far_steps_are_rejected_expect_the_hold_after_it_to_count_as_pressing():
    limits = alike(TWO, LIMIT, actions=LimitActions(step_from_measured='reject'))
    rig = pressing(0.5, limits=limits, on_stop=StopActions(step_from_measured='freeze'))
    rig.run_until(lambda command: command.reason is Reason.STEP_FROM_MEASURED)
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    assert 'is blocked' in rig.executor.detail


def test_when_a_joint_without_end_stops_is_blocked_turns_away_expect_a_stop():
    columns = (Column('a', continuous=True), Column('b'))
    limits = alike(TWO, LIMIT)
    rig = Rig(holding(replan_interval=40), columns, limits=limits, watchdog=WATCHDOG)
    rig.measured[0] = -3.1
    rig.started()
    assert rig.submit([[-3.1 - 0.02 * row, 0.0] for row in range(41)]).accepted
    rig.robot_follows = False
    # The driver wraps: it reports one side of half a turn or the other.
    for tick in range(400):
        rig.measured[0] = -3.14 if tick % 2 else 2 * np.pi - 3.145
        if rig.tick().reason is Reason.TRACKING_ERROR:
            break
    assert "'a' is blocked" in rig.executor.detail


# ---------------------------------------------------------------- time and states


def test_when_the_simulated_clock_stands_still_expect_no_time_to_count():
    rig = pressing(watchdog=WatchdogParameters(blocked_after_s=0.5, motion_clock='ros'))
    rig.run_until(lambda command: command.setpoints[0] - rig.measured[0] >= 0.95 * MAX_STEP)
    for _ in range(200):
        rig.now_s += PERIOD_S
        rig.measure()
        rig.tick_now()
    assert rig.reason == 'clock_stopped'
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    assert 'is blocked' in rig.executor.detail


@pytest.mark.parametrize('jump_s', [-3600.0, 3600.0])
def test_when_the_clock_jumps_expect_no_time_to_count(jump_s):
    rig = pressing()
    rig.run_until(lambda command: command.setpoints[0] - rig.measured[0] >= 0.95 * MAX_STEP)
    rig.ros_ns += round(jump_s * 1e9)
    rig.tick(10)
    assert rig.executor.mode is Mode.RUNNING


def test_when_states_are_not_trusted_for_a_while_expect_the_time_to_stand_still():
    rig = pressing()
    rig.run_until(lambda command: command.setpoints[0] - rig.measured[0] >= 0.95 * MAX_STEP)
    rig.tick(20)
    rig.state_arrives = False
    # Longer than `restart_after_outage_s` would need a start.
    rig.tick(100)
    assert rig.reason == 'state_stale'
    rig.state_arrives = True
    rig.tick(3)
    assert rig.executor.mode is Mode.RUNNING
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR, limit=40)


# ---------------------------------------------------------------- whatever the plan


@examples(40)
@given(
    max_step=st.floats(0.01, 1.0),
    after_s=st.floats(0.1, 2.0),
    blocked_at=st.floats(0.0, 0.3),
    period_ms=st.integers(2, 30),
    speed=st.floats(0.5, 4.0),
    side=st.sampled_from([-1.0, 1.0]),
)
def test_a_blocked_joint_always_stops_the_robot_in_time_and_is_not_pressed_after_it(
    max_step, after_s, blocked_at, period_ms, speed, side
):
    limit = ColumnLimits(velocity=speed, acceleration=20.0, step_from_measured=max_step)
    rig = Rig(
        holding(replan_interval=500, handover=SWITCH),
        limits=alike(TWO, limit),
        watchdog=WatchdogParameters(blocked_after_s=after_s, max_tracking_error=1.2),
        period_ns=period_ms * 1_000_000,
    ).started()
    rows = side * np.minimum(0.04 * speed * np.arange(500), blocked_at + 2.0 * max_step)
    assert rig.submit(np.stack([rows, 0.0 * rows], axis=1)).accepted
    rig.robot_follows = False
    # Small steps slow the way down to where it is blocked.
    way_s = (blocked_at + max_step) / min(0.5 * speed, np.sqrt(max_step))
    pressed_s = 0.0
    for _ in range(int((way_s + after_s + 2.0) * 1e3 / period_ms)):
        command = rig.tick()
        if command.kind is CommandKind.HOLD:
            break
        rig.measured[0] = side * min(side * command.setpoints[0], blocked_at)
        pressed_s += (
            1e-3 * period_ms * (abs(command.setpoints[0] - rig.measured[0]) >= 0.9 * max_step)
        )
    assert pressed_s <= after_s + 3e-3 * period_ms
    assert rig.reason == 'tracking_error', rig.command
    # What is left is no more than a stopped robot may move by: by less, nobody has pushed it.
    near = max(0.05 * max_step, FOLLOWS) + 1e-9
    rig.run_until(lambda command: abs(command.setpoints[0] - rig.measured[0]) <= near, 1000)


@examples(40)
@given(
    max_step=st.floats(0.05, 1.0),
    lag_s=st.floats(0.0, 5.0),
    seed=st.integers(0, 2**32 - 1),
    wave_s=st.floats(0.05, 10.0),
)
def test_a_joint_that_follows_with_lag_never_counts_as_blocked(max_step, lag_s, seed, wave_s):
    """A share of the way that is left, of dead time a little, whatever it is commanded."""
    draw = np.random.default_rng(seed)
    limits = make_limits(['a'], {'a': ColumnLimits(step_from_measured=max_step)})
    watch = BlockedJoints(ColumnModel(CommandColumns([Column('a')]), limits), 1.0)
    measured, target = 0.0, 0.0
    late = [0.0] * int(draw.integers(1, 20))
    for tick in range(1500):
        if draw.random() < PERIOD_S / wave_s:
            target = draw.uniform(-3.0, 3.0)
        commanded = float(np.clip(target, measured - max_step, measured + max_step))
        assert not watch.advance(np.array([commanded]), np.array([measured]), PERIOD_S), tick
        late.append(commanded - measured)
        measured += late.pop(0) * PERIOD_S / (lag_s + PERIOD_S)
