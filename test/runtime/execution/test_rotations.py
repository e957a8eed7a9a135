"""Rotations in chunks and commands: their limits, by the times of the commands."""

import numpy as np
import pytest
from execution_rig import Rig, alike, chunk_of, holding
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import EXAMPLES, examples

from vla_runtime.execution.chunk_check import CheckedChunk, check_chunk
from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, LimitActions, Limits, make_limits
from vla_runtime.execution.motion_limiter import MotionLimiter

Z = np.array([0.0, 0.0, 1.0])


def turned_by(turn: float, axis: np.ndarray = Z, start: np.ndarray | None = None) -> np.ndarray:
    """(4,) quaternion of a turn about an axis, after another rotation."""
    quaternion = np.array([np.cos(0.5 * turn), *(np.sin(0.5 * turn) * axis)])
    return quaternion if start is None else product(quaternion, start)


def product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(4,) the second rotation, then the first one."""
    w, vector = first[0], first[1:]
    scalar = w * second[0] - vector @ second[1:]
    return np.array([scalar, *(w * second[1:] + second[0] * vector + np.cross(vector, second[1:]))])


def rate(start: np.ndarray, end: np.ndarray, dt_s: float) -> np.ndarray:
    """(3,) angular velocity of the shortest turn between two unit quaternions, rad/s."""
    turn = product(end, start * np.array([1.0, -1.0, -1.0, -1.0]))
    if turn[0] < 0.0:
        turn = -turn
    sine = np.linalg.norm(turn[1:])
    if sine == 0.0:
        return np.zeros(3)
    return 2.0 * np.arctan2(sine, turn[0]) / sine * turn[1:] / dt_s


def angle(start: np.ndarray, end: np.ndarray) -> float:
    """Angle of the shortest turn between two quaternions of any length, rad."""
    return float(
        np.linalg.norm(rate(start / np.linalg.norm(start), end / np.linalg.norm(end), 1.0))
    )


DT_S = 0.01
HAND = tuple(Column(f'hand.q{part}', feedback=False, quaternion='hand') for part in 'wxyz')
NAMES = tuple(column.name for column in HAND)
NEAR = np.zeros(len(NAMES))
UNTURNED = np.array([1.0, 0.0, 0.0, 0.0])
FREE = StartParameters(tolerance=4.0)

numbers = st.floats(-1.0, 1.0)
quaternions = (
    st.tuples(numbers, numbers, numbers, numbers)
    .map(np.array)
    .filter(lambda values: np.linalg.norm(values) > 0.01)
)
spans = st.lists(st.floats(0.05, 2.5), min_size=1, max_size=30)


def limits_of(
    velocity: float, acceleration: float = np.inf, actions: LimitActions | None = None
) -> Limits:
    limit = ColumnLimits(velocity=velocity, acceleration=acceleration)
    return alike(NAMES, limit, actions=actions)


def assert_limits(
    commands: list[np.ndarray],
    times_s: list[float],
    velocity: float,
    acceleration: float,
    longest_s: float = np.inf,
) -> None:
    """No command turns faster than allowed from the one before it, nor suddenly.

    After a pause the robot stands at the last command: the next contains no more than `longest_s`.
    """
    dt_s = np.diff(times_s)
    rates = [
        rate(before, after, dt)
        for before, after, dt in zip(commands[:-1], commands[1:], dt_s, strict=True)
    ]
    for quaternion in commands:
        assert np.linalg.norm(quaternion) == pytest.approx(1.0, abs=1e-12)
    for turning in rates:
        assert np.linalg.norm(turning) <= velocity * (1.0 + 1e-6)
    for before, after, last, dt in zip(rates[:-1], rates[1:], dt_s[:-1], dt_s[1:], strict=True):
        way, most = np.linalg.norm(after) * dt, velocity * longest_s
        if dt > longest_s:
            assert way <= most * (1.0 + 1e-6)
            if way == pytest.approx(most):
                continue
        change = np.linalg.norm(after - before) / min(dt, 0.5 * (dt + last))
        assert change <= acceleration * (1.0 + 1e-6) + 1e-5


# ------------------------------------------------------------ chunks


def checked(bad: list[float]) -> CheckedChunk:
    """A chunk of good rows with a bad one among them."""
    rows = np.array([UNTURNED, UNTURNED, bad, UNTURNED])
    return check_chunk(chunk_of(rows, NAMES), CommandColumns(HAND), make_limits(NAMES), NEAR)


@pytest.mark.parametrize('length', [0.0, 1e-9, 5e-4])
def test_when_a_quaternion_has_no_length_expect_refusal_with_its_row(length):
    result = checked([0.0, length, 0.0, 0.0])
    assert result.refusal is ChunkRefusal.NO_ROTATION
    assert 'row 2' in result.text and "'hand.qw', 'hand.qx'" in result.text


def test_when_a_quaternion_has_a_length_expect_it_taken_whatever_it_is():
    assert checked([0.0, -0.3, 0.0, 0.0]).refusal is None


def test_when_a_rotation_is_too_fast_expect_its_angle_counted_and_not_its_numbers():
    rows = np.array([UNTURNED, turned_by(0.1), -turned_by(0.2), 2.0 * turned_by(0.3)])
    columns = CommandColumns(HAND)
    fits = check_chunk(chunk_of(rows, NAMES, step_time_s=0.1), columns, limits_of(1.0), NEAR)
    assert fits.clamped == ''
    fast = check_chunk(chunk_of(rows, NAMES, step_time_s=0.1), columns, limits_of(0.9), NEAR)
    assert "velocity of 'hand.rotation' in row" in fast.clamped
    assert '1 a second, allowed 0.9' in fast.clamped


def test_when_a_rotation_is_sudden_and_that_is_rejected_expect_refusal():
    limits = limits_of(10.0, 5.0, LimitActions(acceleration='reject'))
    rows = np.array([UNTURNED, turned_by(0.1), turned_by(0.1)])
    chunk = chunk_of(rows, NAMES, step_time_s=0.1)
    result = check_chunk(chunk, CommandColumns(HAND), limits, NEAR)
    assert result.refusal is ChunkRefusal.LIMIT and '10 a second², allowed 5' in result.text


# ------------------------------------------------------------ one tick


def limiter_of(velocity: float, acceleration: float, longest_s: float = np.inf) -> MotionLimiter:
    limiter = MotionLimiter(limits_of(velocity, acceleration), CommandColumns(HAND), longest_s)
    limiter.stop(DT_S)
    return limiter


@settings(max_examples=EXAMPLES)
@given(
    st.lists(quaternions, min_size=1, max_size=12),
    st.integers(1, 6),
    spans,
    st.floats(0.1, 20.0),
    st.one_of(st.just(np.inf), st.floats(0.5, 200.0)),
    st.booleans(),
)
def test_when_rotations_are_wild_expect_both_limits_kept_by_the_times_of_the_commands(
    targets, repeats, periods, velocity, acceleration, brakes
):
    limiter = limiter_of(velocity, acceleration, 1.5 * DT_S)
    command, commands, times_s = UNTURNED.copy(), [UNTURNED], [0.0]
    wanted = np.repeat(targets, repeats, axis=0)
    for index, (target, dt) in enumerate(
        zip(wanted, DT_S * np.resize(periods, len(wanted)), strict=True)
    ):
        if brakes and index >= len(wanted) // 2:
            limiter.brake(command, np.zeros(4), None, dt)
        else:
            limiter.apply(command, target, np.zeros(4), None, dt)
        commands.append(command.copy())
        times_s.append(times_s[-1] + dt)
    assert_limits(commands, times_s, velocity, acceleration, 1.5 * DT_S)


def test_when_a_lower_speed_is_wanted_in_a_turn_expect_it_reached_within_the_acceleration():
    limiter, command = limiter_of(3.0, 10.0, 1.5 * DT_S), UNTURNED.copy()
    commands, there = [command.copy()], turned_by(3.0)
    for speed in [3.0] * 40 + [0.5] * 40:
        limiter.apply(command, there, np.zeros(4), None, DT_S, np.full(4, speed))
        commands.append(command.copy())
    assert_limits(commands, list(DT_S * np.arange(len(commands))), 3.0, 10.0)
    assert angle(commands[-2], commands[-1]) == pytest.approx(0.5 * DT_S)


@examples(15)
@given(quaternions, st.floats(0.2, 5.0), st.one_of(st.just(np.inf), st.floats(2.0, 50.0)))
def test_when_a_rotation_jumps_expect_it_reached_and_kept(target, velocity, acceleration):
    limiter, command = limiter_of(velocity, acceleration), UNTURNED.copy()
    target = target / np.linalg.norm(target)
    nearest = np.inf
    for _ in range(int((np.pi / velocity + 4.0 * velocity / acceleration + 2.0) / DT_S)):
        limiter.apply(command, target, np.zeros(4), None, DT_S)
        nearest = min(nearest, angle(command, target))
    assert angle(command, target) == nearest < 1e-9
    assert not limiter.moving


@examples(15)
@given(quaternions, quaternions, st.floats(0.1, 0.95), st.floats(0.5, 2.0))
def test_when_a_rotation_is_slow_expect_it_followed_exactly(start, axis, share, length):
    velocity, acceleration = 2.0, 20.0
    limiter = limiter_of(velocity, acceleration)
    start = start / np.linalg.norm(start)
    direction = axis[1:] / np.linalg.norm(axis[1:]) if axis[1:].any() else Z
    command, before = start.copy(), start
    for tick in range(300):
        # Speeds up within the limit of acceleration, and turns on and on, past half a turn.
        time_s = (tick + 1) * DT_S
        turn = share * velocity * (time_s**2 if time_s < 0.5 else time_s - 0.25)
        target = length * turned_by(turn, direction, start)
        rates = (target - length * before) / DT_S
        before = target / length
        assert not limiter.apply(command, target, rates, None, DT_S)
        assert angle(command, target) < 1e-12


def test_when_a_target_is_no_rotation_expect_the_last_one_kept():
    limiter, command = limiter_of(1.0, 10.0), turned_by(0.3)
    limiter.apply(command, np.zeros(4), np.zeros(4), None, DT_S)
    assert (command == turned_by(0.3)).all()


def test_when_a_rotation_is_half_a_turn_away_expect_numbers():
    limiter, command = limiter_of(1.0, 10.0), UNTURNED.copy()
    for _ in range(500):
        limiter.apply(command, np.array([0.0, 0.0, 1.0, 0.0]), np.zeros(4), None, DT_S)
        assert np.isfinite(command).all()
    assert angle(command, np.array([0.0, 0.0, 1.0, 0.0])) < 1e-9


def test_when_braking_expect_the_shortest_way_the_angular_acceleration_allows():
    limiter, command, rates = limiter_of(1.0, 10.0), UNTURNED.copy(), []
    for tick in range(1, 60):
        target = turned_by(0.005 * tick)
        along = (target - turned_by(0.005 * (tick - 1))) / DT_S
        limiter.apply(command, target, along, None, DT_S)
    while limiter.moving:
        before = command.copy()
        limiter.brake(command, np.zeros(4), None, DT_S)
        rates.append(np.linalg.norm(rate(before, command, DT_S)))
    assert np.diff(rates, prepend=0.5) == pytest.approx(-0.1, abs=1e-6)
    assert rates[-1] == 0.0


def test_when_stopped_at_once_expect_the_next_motion_from_standstill():
    limiter, command = limiter_of(1.0, 10.0), UNTURNED.copy()
    for _ in range(30):
        limiter.apply(command, turned_by(2.0), np.zeros(4), None, DT_S)
    limiter.stop(DT_S)
    assert not limiter.moving
    before = command.copy()
    limiter.apply(command, turned_by(2.0), np.zeros(4), None, DT_S)
    assert np.linalg.norm(rate(before, command, DT_S)) == pytest.approx(0.1)


# ------------------------------------------------------------ the executor


@settings(max_examples=30)
@given(
    chunks=st.lists(st.lists(quaternions, min_size=8, max_size=8), min_size=1, max_size=4),
    periods=spans,
    velocity=st.floats(0.3, 8.0),
    acceleration=st.one_of(st.just(np.inf), st.floats(2.0, 100.0)),
    mode=st.sampled_from(['switch', 'blend', 'ensemble']),
    stop_at=st.integers(5, 80),
)
def test_when_chunks_jitter_and_stops_are_wild_expect_every_command_within_the_limits(
    chunks, periods, velocity, acceleration, mode, stop_at
):
    rig = Rig(
        holding(replan_interval=4, handover=HandoverParameters(mode)),
        HAND,
        limits=limits_of(velocity, acceleration),
        start=FREE,
        control_period_s=DT_S,
    ).started()
    waiting = list(chunks)
    for tick in range(90):
        if waiting and tick % 12 == 0:
            rig.submit(np.array(waiting.pop(0)))
        if tick == stop_at:
            rig.executor.stop()
        rig.period_ns = round(1e7 * periods[tick % len(periods)])
        rig.tick()
    sent = [tick for tick in rig.ticks if tick.command.kind is not CommandKind.IDLE]
    assert not rig.executor.counters.internal_errors
    assert_limits(
        [tick.command.setpoints for tick in sent],
        [tick.now_s for tick in sent],
        velocity,
        acceleration,
        1.5 * DT_S,
    )


def test_when_a_start_is_turned_too_far_away_expect_an_approach_at_its_speed():
    start = StartParameters(tolerance=0.2, approach_speed=0.5)
    rig = Rig(holding(replan_interval=4), HAND, limits=limits_of(3.0, 30.0), start=start).started()
    assert rig.submit(np.repeat([UNTURNED], 8, axis=0)).accepted
    rig.tick(60)
    rig.executor.stop()
    rig.tick(5)
    assert rig.start().started
    rig.tick()
    there = turned_by(2.0, np.array([0.6, 0.0, 0.8]))
    result = rig.submit(np.repeat([-there], 8, axis=0))
    assert "'hand.rotation' would start 2 rad from its command; at most 0.2" in result.text
    ticks = len(rig.ticks)
    rig.tick(100)
    assert 'to go, for' in rig.executor.status().progress
    rig.tick(350)
    assert angle(rig.command.setpoints, there) < 0.002
    commands = [tick.command.setpoints for tick in rig.ticks[ticks - 1 :]]
    assert_limits(commands, list(DT_S * np.arange(len(commands))), 0.5, 30.0)


def test_when_a_stop_comes_expect_braking_within_the_angular_acceleration():
    rig = Rig(holding(), HAND, limits=limits_of(2.0, 10.0), start=FREE).started()
    rows = np.array([turned_by(0.04 * step) for step in range(40)])
    assert rig.submit(rows).accepted
    rig.tick(30)
    rig.executor.stop()
    rig.tick(40)
    assert rig.executor.at_rest
    sent = [tick for tick in rig.ticks if tick.command.kind is not CommandKind.IDLE]
    assert_limits(
        [tick.command.setpoints for tick in sent], [tick.now_s for tick in sent], 2.0, 10.0
    )
    # 0.95 rad/s are braked within 0.1 s.
    assert sum(angle(a.command.setpoints, rig.command.setpoints) > 0.0 for a in sent[-40:]) >= 8


def test_when_rotations_are_limited_expect_it_counted():
    rig = Rig(holding(), HAND, limits=limits_of(0.5), start=FREE).started()
    assert rig.submit(np.array([turned_by(0.4 * step) for step in range(10)])).clamped
    rig.tick(30)
    assert rig.executor.counters.limited_ticks >= 25
