"""One tick's motion within every limit, for any target, and what counts as limited."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import EXAMPLES

from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import Counters, LimitKind
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.motion_limiter import MotionLimiter

DT_S = 0.01


def limiter_of(limit: ColumnLimits, kind: str = 'position', feedback: bool = True) -> MotionLimiter:
    columns = CommandColumns([Column('a', kind=kind, feedback=feedback)])
    return MotionLimiter(make_limits(('a',), {'a': limit}), columns)


def drive(
    limiter: MotionLimiter, targets: np.ndarray, start: float = 0.0, measured: float | None = None
) -> np.ndarray:
    """The commands for a series of targets; the robot follows unless it is nailed down."""
    command, commands = np.array([start]), []
    before = start
    limiter.stop(DT_S)
    for target in targets:
        rate = np.array([(target - before) / DT_S])
        before = target
        where = command.copy() if measured is None else np.array([measured])
        limiter.apply(command, np.array([target]), rate, where, DT_S)
        commands.append(float(command[0]))
    return np.array(commands)


def test_when_target_is_within_all_limits_expect_it_unchanged_bit_by_bit():
    limiter = limiter_of(ColumnLimits(-2, 2, 3.0, 30.0, 0.5))
    targets = (
        np.sin(np.arange(1, 300) * DT_S * 2.0 + 0.0) * 0.7 * (1 - np.exp(-np.arange(1, 300) / 30))
    )
    assert (drive(limiter, targets) == targets).all()


def test_when_target_jumps_expect_acceleration_kept_and_no_overshoot():
    commands = drive(limiter_of(ColumnLimits(velocity=1.0, acceleration=5.0)), np.full(300, 1.0))
    speed = np.diff(commands, prepend=0.0) / DT_S
    assert np.abs(np.diff(speed, prepend=0.0)).max() <= 5.0 * DT_S * (1 + 1e-6)
    assert commands.max() <= 1.0 + 1e-12
    assert commands[-1] == pytest.approx(1.0, abs=1e-9)


def test_when_behind_a_moving_target_expect_it_caught_up_with():
    targets = 0.5 + np.arange(400) * DT_S * 0.5
    commands = drive(limiter_of(ColumnLimits(velocity=2.0, acceleration=5.0)), targets)
    assert commands[-1] == pytest.approx(targets[-1], abs=1e-9)
    assert (commands - targets).max() < 0.005


def test_when_the_rates_of_a_plan_exceed_the_limit_expect_them_clipped():
    limiter, rates = limiter_of(ColumnLimits(velocity=2.0)), np.array([3.0])
    assert not limiter.apply(np.zeros(1), np.array([0.02]), rates, np.zeros(1), DT_S)
    assert rates[0] == 2.0


def test_when_velocity_column_expect_its_value_as_its_rate():
    limiter, rates = limiter_of(ColumnLimits(velocity=2.0), kind='velocity'), np.array([7.0])
    command = np.zeros(1)
    limiter.apply(command, np.array([0.5]), rates, np.zeros(1), DT_S)
    assert rates[0] == command[0] == 0.5


def test_when_braking_expect_the_shortest_way_the_acceleration_allows():
    limiter = limiter_of(ColumnLimits(velocity=1.0, acceleration=10.0))
    command, rates = np.zeros(1), np.zeros(1)
    for tick in range(1, 40):
        limiter.apply(command, np.array([tick * 0.005]), np.array([0.5]), command, DT_S)
    assert limiter.velocities[0] == pytest.approx(0.5)
    speeds = []
    while limiter.moving:
        before = command[0]
        limiter.brake(command, rates, command.copy(), DT_S)
        speeds.append((command[0] - before) / DT_S)
        assert rates[0] == limiter.velocities[0]
    assert speeds == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0], abs=1e-9)


def test_when_braking_beside_a_robot_that_is_stuck_expect_no_motion_further_away():
    limiter = limiter_of(ColumnLimits(acceleration=1.0, step_from_measured=0.1))
    limiter.velocities[:] = 1.0
    command = np.array([0.095])
    for _ in range(20):
        limiter.brake(command, np.zeros(1), np.zeros(1), DT_S)
    assert command[0] == pytest.approx(0.1)
    command[:] = 0.3
    limiter.velocities[:] = 1.0
    limiter.brake(command, np.zeros(1), np.zeros(1), DT_S)
    assert command[0] == 0.3


def test_when_command_starts_outside_a_limit_expect_only_motion_back_inside():
    commands = drive(limiter_of(ColumnLimits(upper=1.0)), np.full(5, 3.0), start=1.0)
    assert (commands == 1.0).all()


def test_when_command_is_found_outside_a_limit_expect_it_back_at_the_given_speed():
    limiter, command = limiter_of(ColumnLimits(upper=1.0)), np.array([1.05])
    assert limiter.outside(command)
    limiter.apply(command, np.ones(1), np.zeros(1), command, DT_S, speed=np.array([0.5]))
    assert command[0] == pytest.approx(1.045)
    limiter.apply(command, np.full(1, 3.0), np.zeros(1), command, DT_S)
    assert command[0] == pytest.approx(1.045)
    limiter.apply(command, np.ones(1), np.zeros(1), command, DT_S)
    assert command[0] == 1.0 and not limiter.outside(command)


def test_when_target_is_far_from_measured_expect_too_far():
    limiter = limiter_of(ColumnLimits(step_from_measured=0.1))
    assert limiter.too_far(np.array([0.2]), np.array([0.0]))
    assert not limiter.too_far(np.array([0.05]), np.array([0.0]))
    unlimited = limiter_of(ColumnLimits())
    assert not unlimited.too_far(np.array([5.0]), np.array([0.0]))


def test_when_target_is_not_a_number_expect_error_and_the_command_untouched():
    limiter, command = limiter_of(ColumnLimits()), np.array([0.3])
    with pytest.raises(FloatingPointError, match='nan'):
        limiter.apply(command, np.array([np.nan]), np.zeros(1), command, DT_S)
    assert command[0] == 0.3


def test_when_limited_expect_rates_to_be_those_commanded():
    limiter, rates = limiter_of(ColumnLimits(velocity=2.0)), np.array([7.0])
    assert limiter.apply(np.zeros(1), np.ones(1), rates, np.zeros(1), DT_S)
    assert rates[0] == pytest.approx(2.0)


def test_when_a_target_moves_at_the_limit_expect_rounding_to_be_no_limiting():
    limiter, command = limiter_of(ColumnLimits(velocity=0.3)), np.zeros(1)
    rounded = []
    for target in 0.3 * DT_S * np.arange(1, 200):
        assert not limiter.apply(command, np.array([target]), np.array([0.3]), np.zeros(1), DT_S)
        rounded.append(command[0] != target)
    assert any(rounded)


def test_when_velocity_column_expect_value_limited_and_ramped():
    limiter = limiter_of(ColumnLimits(velocity=1.0, acceleration=10.0), kind='velocity')
    commands = drive(limiter, np.full(30, 5.0))
    assert commands[0] == pytest.approx(0.1)
    assert commands[-1] == 1.0


def test_when_velocity_column_is_at_its_position_limit_expect_no_velocity_outwards():
    limiter = limiter_of(ColumnLimits(lower=-1.0, upper=1.0), kind='velocity')
    assert drive(limiter, np.full(3, 5.0), measured=1.0).tolist() == [0.0, 0.0, 0.0]
    assert drive(limiter, np.full(3, -5.0), measured=1.0).tolist() == [-5.0, -5.0, -5.0]


def test_when_nobody_measures_a_velocity_column_expect_position_limits_ignored():
    limiter = limiter_of(ColumnLimits(upper=1.0), kind='velocity', feedback=False)
    assert drive(limiter, np.full(2, 5.0), measured=2.0).tolist() == [5.0, 5.0]


limits = st.builds(
    ColumnLimits,
    lower=st.floats(-3, -0.5),
    upper=st.floats(0.5, 3),
    velocity=st.floats(0.1, 10),
    acceleration=st.floats(0.5, 100),
    step_from_measured=st.just(float('inf')),
)


@settings(max_examples=EXAMPLES)
@given(limits, st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.integers(1, 6))
def test_when_targets_are_wild_expect_every_limit_kept(limit, targets, repeats):
    commands = drive(limiter_of(limit), np.repeat(targets, repeats))
    speed = np.diff(commands, prepend=0.0) / DT_S
    assert np.isfinite(commands).all()
    assert commands.min() >= limit.lower and commands.max() <= limit.upper
    assert np.abs(speed).max() <= limit.velocity * (1 + 1e-9)
    change = np.abs(np.diff(speed, prepend=0.0)).max() / DT_S
    assert change <= limit.acceleration * (1 + 1e-6) + 1e-6


@settings(max_examples=EXAMPLES)
@given(
    limits,
    st.lists(st.floats(-5, 5), min_size=1, max_size=30),
    st.integers(1, 6),
    st.lists(st.floats(0.05, 3.0), min_size=1, max_size=40),
    st.booleans(),
)
def test_when_ticks_are_uneven_expect_every_limit_kept_by_the_times_of_the_commands(
    limit, targets, repeats, spans, brakes
):
    columns = CommandColumns([Column('a')])
    limiter = MotionLimiter(make_limits(('a',), {'a': limit}), columns, longest_s=1.5 * DT_S)
    command, rates = np.zeros(1), np.zeros(1)
    wanted = np.repeat(targets, repeats)
    dt_s = np.resize(spans, len(wanted)) * DT_S
    commands = []
    for index, (target, dt) in enumerate(zip(wanted, dt_s, strict=True)):
        rates[:] = 0.0
        if brakes and index >= len(wanted) // 2:
            limiter.brake(command, rates, command.copy(), dt)
        else:
            limiter.apply(command, np.array([target]), rates, command.copy(), dt)
        commands.append(float(command[0]))
    assert min(commands) >= limit.lower and max(commands) <= limit.upper
    ways = np.diff(commands, prepend=0.0)
    speed = ways / dt_s
    assert np.abs(speed).max() <= limit.velocity * (1 + 1e-9)
    # After a pause the robot stands at the last command: the next contains no more than others may.
    most = 1.5 * DT_S * limit.velocity
    late = dt_s > 1.5 * DT_S
    assert np.abs(ways[late]).max(initial=0.0) <= most * (1 + 1e-9)
    change = np.abs(np.diff(speed, prepend=0.0))
    change[late & np.isclose(np.abs(ways), most)] = 0.0
    before = np.concatenate([dt_s[:1], dt_s[:-1]])
    for divided_by in (dt_s, 0.5 * (dt_s + before)):
        assert (change / divided_by).max() <= limit.acceleration * (1 + 1e-6) + 1e-5


def test_when_a_tick_is_late_expect_the_way_left_spread_over_the_next_ones():
    limiter = limiter_of(ColumnLimits(velocity=3.0, acceleration=20.0))
    command, now, speeds = np.zeros(1), 0.0, []
    limiter.stop(DT_S)
    for dt in [DT_S] * 40 + [0.0188, 0.0015] + [DT_S] * 40:
        now += dt
        before = command[0]
        limiter.apply(command, np.array([1.3 * now]), np.array([1.3]), command.copy(), dt)
        speeds.append(((command[0] - before) / dt, dt))
    for (slower, _), (faster, dt) in itertools.pairwise(speeds[30:]):
        assert abs(faster - slower) <= 20.0 * dt * (1 + 1e-6)
    assert command[0] == pytest.approx(1.3 * now, abs=1e-9)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.floats(-1, 1), st.floats(0.01, 1))
def test_when_robot_is_nailed_down_expect_command_never_further_than_allowed(
    targets, measured, step
):
    limit = ColumnLimits(velocity=20.0, acceleration=50.0, step_from_measured=step)
    commands = drive(limiter_of(limit), np.repeat(targets, 4), measured, measured)
    assert np.abs(commands - measured).max() <= step + 1e-12


def test_when_the_robot_was_pushed_out_of_reach_expect_the_way_back_within_speed():
    limit = ColumnLimits(velocity=1.0, acceleration=5.0, step_from_measured=0.5)
    # Commanded to 0 and found at 1: the command goes where it may be, and it does not jump there.
    commands = drive(limiter_of(limit), np.zeros(300), measured=1.0)
    steps = np.diff(commands, prepend=0.0)
    assert steps.min() >= -1e-12
    assert steps.max() <= 1.0 * DT_S * (1 + 1e-9)
    assert commands[-1] == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize('acceleration', [0.5, 5.0])
def test_when_a_smooth_plan_accelerates_gently_expect_it_followed_exactly(acceleration):
    """Once a plan's own curvature counted as a way to be made up for, at every tick."""
    columns = CommandColumns([Column('a')])
    limits = make_limits(('a',), {'a': ColumnLimits(-6.0, 6.0, 3.0, 40.0)})
    limiter, command = MotionLimiter(limits, columns), np.zeros(1)
    for tick in range(1, 50):
        time_s = 0.01 * tick
        target = np.array([0.5 * acceleration * time_s**2])
        assert not limiter.apply(command, target, np.array([acceleration * time_s]), None, 0.01)
        assert command == pytest.approx(target, abs=1e-12)


# --- What counts as limited: a change that a person would care about, by its joint and its limit

DT_S = 0.01
TWO_NAMES = ('a', 'b')
FREE = ColumnLimits(-10.0, 10.0, 3.0, 1e6, 5.0)


def second_limited(limit: ColumnLimits) -> MotionLimiter:
    columns = CommandColumns(tuple(Column(name) for name in TWO_NAMES))
    return MotionLimiter(make_limits(TWO_NAMES, {'a': FREE, 'b': limit}), columns)


@pytest.mark.parametrize(
    ('limit', 'target', 'by'),
    [
        (ColumnLimits(-10.0, 0.004, 3.0, 1e6, 5.0), 0.02, LimitKind.POSITION),
        (ColumnLimits(-10.0, 10.0, 0.5, 1e6, 5.0), -0.02, LimitKind.VELOCITY),
        (ColumnLimits(-10.0, 10.0, 3.0, 10.0, 5.0), 0.02, LimitKind.ACCELERATION),
        (ColumnLimits(-10.0, 10.0, 3.0, 1e6, 0.01), 0.02, LimitKind.STEP_FROM_MEASURED),
    ],
)
def test_what_limits_a_command_is_named(limit, target, by):
    limiter, counters, command = second_limited(limit), Counters(), np.zeros(2)
    goal = np.array([0.0, target])
    assert limiter.apply(command, goal, np.zeros(2), np.zeros(2), DT_S)
    counters.count_limited(limiter.causes())
    assert counters.limited_ticks == 1
    assert counters.limited == {('b', by): 1}


@pytest.mark.parametrize(('share', 'counts'), [(0.009, False), (0.011, True)])
def test_a_change_below_a_hundredth_of_what_the_limit_allows_does_not_count(share, counts):
    limit = ColumnLimits(-10.0, 10.0, 0.5, 1e6, 5.0)
    limiter, command = second_limited(limit), np.zeros(2)
    goal = np.array([0.0, 0.5 * DT_S * (1.0 + share)])
    assert limiter.apply(command, goal, np.zeros(2), np.zeros(2), DT_S) is counts
    # It is limited all the same.
    assert command[1] == pytest.approx(0.5 * DT_S)


@pytest.mark.parametrize(('beyond', 'counts'), [(0.9e-4, False), (1.1e-4, True)])
def test_where_speed_is_free_a_hundredth_of_the_largest_step_counts(beyond, counts):
    limiter, command = (
        second_limited(ColumnLimits(-10.0, 10.0, step_from_measured=0.01)),
        np.zeros(2),
    )
    goal = np.array([0.0, 0.01 + beyond])
    assert limiter.apply(command, goal, np.zeros(2), np.zeros(2), DT_S) is counts
