"""A leader arm: the robot follows it within the limits, without a jump, and loses it safely."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from execution_rig import RAMP, TWO, Rig, alike, holding

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import ChunkRefusal, CommandKind, Driver, Reason
from vla_runtime.execution.leader import Leader, LeaderParameters
from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.execution.states import State

PERIOD_S = 0.01
LIMIT = ColumnLimits(-1.5, 1.5, velocity=2.0, acceleration=10.0, step_from_measured=0.5)
SPEED = 0.4
# Position of the leader's joints, (2,), at a time in seconds; None: it says nothing.
Says = Callable[[float], Any]


class Led(Rig):
    """A robot and its leader, which speaks by a rate of its own on the same clock."""

    def __init__(self, rate_hz: float = 100.0, limit: ColumnLimits = LIMIT, **given: Any) -> None:
        columns = given.pop('columns', (Column('a'), Column('b')))
        names = tuple(column.name for column in columns)
        super().__init__(
            holding(replan_interval=20),
            columns,
            limits=alike(names, limit),
            start=StartParameters(approach_speed=SPEED),
            control_period_s=PERIOD_S,
            leader=LeaderParameters(names[:2], **given),
        )
        self.says: Says = lambda _: np.zeros(2)
        self.message_s = 1.0 / rate_hz
        self.said, self.begun_ns = 0, self.ros_ns
        self.started()

    def measure(self) -> None:
        """Let joint states come, and what the leader has said since the last tick."""
        super().measure()
        while (stamp_s := self.said * self.message_s) <= self.leader_s:
            self.said += 1
            positions = self.says(stamp_s)
            if positions is not None:
                stamp_ns = self.begun_ns + round(stamp_s * 1e9)
                self.executor.observe_leader(np.asarray(positions), stamp_ns, self.ros_ns)

    @property
    def leader_s(self) -> float:
        return (self.ros_ns - self.begun_ns) * 1e-9

    def take_over(self) -> Led:
        self.tick(30)
        result = self.executor.take_over(self.ros_ns)
        assert result.started, result.text
        self.tick()
        assert self.executor.state is State.LEADING
        return self

    def assert_within_limits(self) -> None:
        places = np.array([tick.command.setpoints for tick in self.ticks])
        times = np.array([tick.now_s for tick in self.ticks])[:, None]
        speeds = np.diff(places, axis=0) / np.diff(times, axis=0)
        changes = np.diff(speeds, axis=0) / np.diff(times[1:], axis=0)
        assert np.abs(places).max() <= LIMIT.upper * (1 + 1e-9)
        assert np.abs(speeds).max() <= LIMIT.velocity * (1 + 1e-6)
        assert np.abs(changes).max() <= LIMIT.acceleration * (1 + 1e-6)


def wave(height: float, at: float = 0.0, hz: float = 0.4) -> Says:
    return lambda s: np.full(2, at + height * math.sin(2.0 * math.pi * hz * s))


def moving(**given: Any) -> Led:
    led = Led(**given)
    assert led.submit(RAMP).accepted
    led.tick(20)
    assert led.reason == 'tracking'
    return led


# ---------------------------------------------------------------- hand-over, both ways


@pytest.mark.parametrize('rate_hz', [10.0, 33.0, 100.0, 500.0])
@pytest.mark.parametrize('at', [0.0, 0.5, -0.5])
def test_the_robot_follows_a_leader_that_is_elsewhere_by_its_motion(rate_hz, at):
    led = Led(rate_hz)
    led.says = wave(0.3, at)
    led.take_over()
    offset = led.ticks[-1].position - led.says(led.leader_s)[0]
    led.tick(500)
    led.assert_within_limits()
    # Behind by the time between two messages, and what braking keeps in reserve.
    late_s = 2.0 / rate_hz + 0.15
    fastest = 0.3 * 2.0 * math.pi * 0.4
    assert abs(led.ticks[-1].position - offset - led.says(led.leader_s)[0]) <= fastest * late_s
    assert np.ptp([tick.position for tick in led.ticks[-300:]]) > 0.5


@pytest.mark.parametrize('rate_hz', [10.0, 500.0])
def test_it_takes_over_and_gives_back_amid_a_plan_without_a_jump(rate_hz):
    led = moving(rate_hz=rate_hz)
    led.says = wave(0.2, 0.5)
    led.take_over()
    led.tick(200)
    assert led.executor.give_back(led.ros_ns).started
    led.tick(60)
    assert led.executor.state is State.WAITING
    where = led.ticks[-1].position
    assert led.submit([where + step for step in RAMP]).accepted
    led.tick(60)
    assert led.reason == 'tracking'
    led.assert_within_limits()


def test_an_absolute_leader_brings_the_robot_to_itself_slowly_and_then_leads_at_full_speed():
    led = Led(mode='absolute')
    led.says = lambda _: np.full(2, 0.5)
    led.take_over()
    led.tick(160)
    assert np.allclose(led.command.setpoints, 0.5, atol=0.01)
    assert max(np.abs(tick.command.velocities).max() for tick in led.ticks) <= 1.1 * SPEED
    led.begun_ns, led.said = led.ros_ns, 0
    led.says = wave(0.4, 0.5, hz=0.5)
    led.tick(200)
    fastest = max(np.abs(tick.command.velocities).max() for tick in led.ticks[-200:])
    assert fastest > 2.0 * SPEED
    led.assert_within_limits()


def test_a_leader_beyond_the_limits_is_followed_to_them_and_back_at_once():
    led = Led()
    led.says = wave(1.2, hz=0.2)
    led.take_over()
    offset = led.ticks[-1].position - led.says(led.leader_s)[0]
    led.tick(500)
    led.assert_within_limits()
    led2 = Led()
    led2.says = lambda s: np.full(2, min(0.8 * s, 4.0) if s < 6.0 else 4.0 - 0.8 * (s - 6.0))
    led2.take_over()
    led2.tick(1000)
    led2.assert_within_limits()
    assert abs(offset) < 1.0


# ---------------------------------------------------------------- leaders that fail


def assert_lost(led: Led, within_s: float) -> None:
    """It pauses, within the limits, and stays; the policy doesn't go on by itself."""
    begun = len(led.ticks)
    led.run_until(lambda _: led.executor.state is not State.LEADING, round(within_s / PERIOD_S))
    led.run_until(lambda _: led.executor.state is State.PAUSED and led.executor.at_rest)
    led.tick()
    rested = led.command.setpoints.copy()
    led.tick(300)
    assert np.abs(led.command.setpoints - rested).max() <= 0.05
    assert led.executor.state is State.PAUSED and led.submit([0.0] * 20).refusal is (
        ChunkRefusal.PAUSED
    )
    assert led.executor.detail and begun < len(led.ticks)
    led.assert_within_limits()


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
def test_a_leader_that_dies_leaves_the_robot_paused_where_it_comes_to_rest(rate_hz):
    led = Led(rate_hz)
    dies_s = 1.3
    way = wave(0.4)
    led.says = lambda s: way(s) if s < dies_s else None
    led.take_over()
    led.tick(round(dies_s / PERIOD_S) - 31)
    led.run_until(lambda _: led.executor.state is not State.LEADING)
    assert 'timeout_s' in led.executor.detail, 'it is said from the first tick on'
    assert_lost(led, 0.3 + 0.2)


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
@pytest.mark.parametrize('bad', [3.0, -1.0, math.nan, math.inf, 1e300])
def test_single_glitches_move_nothing(rate_hz, bad):
    led = Led(rate_hz)
    number = 0

    def says(s: float) -> np.ndarray:
        nonlocal number
        number += 1
        return np.array([bad, 0.0]) if s > 0.5 and number % 5 == 0 else np.zeros(2)

    led.says = says
    led.take_over()
    led.tick(500)
    assert led.executor.state is State.LEADING
    assert np.abs([tick.command.setpoints for tick in led.ticks]).max() == 0.0
    assert led.executor.leader.refused > 5


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
def test_a_leader_that_jumps_and_stays_there_is_lost_and_may_take_over_from_there(rate_hz):
    led = Led(rate_hz)
    led.says = lambda s: np.full(2, 1.4 if s > 1.0 else 0.0)
    led.take_over()
    led.tick(70)
    assert_lost(led, 1.0)
    assert np.abs(led.command.setpoints).max() <= 0.05
    assert led.executor.take_over(led.ros_ns).started
    led.tick(100)
    assert led.executor.state is State.LEADING
    assert np.abs(led.command.setpoints).max() <= 0.05


@pytest.mark.parametrize(
    'positions', [[0.0], [0.0] * 3, [math.nan] * 2, [math.inf, 0.0], [1e12, 0.0]]
)
def test_messages_of_the_wrong_joints_or_no_numbers_never_lead(positions):
    led = Led()
    led.says = lambda _: positions
    led.tick(50)
    refused = led.executor.take_over(led.ros_ns)
    assert not refused.started and refused.text
    assert led.executor.state is State.WAITING


@pytest.mark.parametrize('shift_s', [-1.0, 1.0])
def test_messages_of_another_clock_never_lead(shift_s):
    led = Led()
    led.says = lambda _: None
    for _ in range(50):
        led.tick()
        stamp_ns = led.ros_ns + round(shift_s * 1e9)
        led.executor.observe_leader(np.zeros(2), stamp_ns, led.ros_ns)
    assert not led.executor.take_over(led.ros_ns).started
    led.executor.observe_leader(np.zeros(2), 0, led.ros_ns)
    assert not led.executor.take_over(led.ros_ns).started


def test_messages_out_of_order_are_left_out():
    led = Led()
    led.take_over()
    for _ in range(50):
        led.tick()
        led.executor.observe_leader(np.full(2, 0.05), led.ros_ns - 50_000_000, led.ros_ns)
    assert (led.command.setpoints == 0.0).all()


def test_a_leader_is_believed_again_after_the_clock_was_set_back():
    led = Led()
    led.take_over()
    led.ros_ns -= 5_000_000_000
    led.begun_ns = led.ros_ns
    led.said = 0
    led.tick(80)
    assert led.executor.state is State.PAUSED, 'a fault ends the way of a leader'
    assert led.executor.take_over(led.ros_ns).started


def test_a_fault_while_it_leads_ends_in_a_pause_not_with_the_policy():
    led = Led()
    led.says = wave(0.3)
    led.take_over()
    led.tick(100)
    led.state_arrives = False
    led.tick(40)
    assert led.reason == 'state_stale'
    led.state_arrives = True
    led.tick(40)
    assert led.executor.state is State.PAUSED
    led.assert_within_limits()


def test_an_arm_that_is_blocked_stops_for_a_person():
    led = Led()
    led.says = lambda s: np.full(2, 0.4 * max(0.0, s - 0.5))
    led.take_over()
    led.robot_follows = False
    led.run_until(lambda _: led.executor.state is State.STOPPED)
    assert led.reason == 'tracking_error' and not led.executor.leading


def test_an_angle_without_end_follows_a_leader_that_wraps():
    limit = ColumnLimits(velocity=4.0, acceleration=40.0)
    led = Led(columns=(Column('a', continuous=True), Column('b', continuous=True)), limit=limit)
    led.says = lambda s: np.full(2, (2.0 * s + math.pi) % (2.0 * math.pi) - math.pi)
    led.take_over()
    led.tick(400)
    steps = np.diff([tick.position for tick in led.ticks[-300:]])
    assert (steps > 0.0).all() and steps.max() <= 4.0 * PERIOD_S


# ---------------------------------------------------------------- the policy meanwhile, and others


def test_the_policy_is_asked_as_often_as_it_drives_and_moves_nothing():
    led = Led()
    led.take_over()
    asked = 0
    for _ in range(400):
        led.tick()
        if led.poll() is not None:
            asked += 1
            assert led.submit(RAMP).refusal is ChunkRefusal.LEADING
    # An interval of 20 steps of 0.05 s, before the first chunk.
    assert asked in (4, 5)
    assert (led.command.setpoints == 0.0).all()
    assert led.executor.driver is Driver.LEADER


def test_an_answer_from_before_it_gave_back_is_not_executed():
    led = Led()
    led.take_over()
    led.tick(100)
    request = led.poll()
    observed_ns = led.ros_ns
    assert request is not None
    led.tick(2)
    led.executor.give_back(led.ros_ns)
    led.tick(2)
    assert not led.submit(RAMP, observation_ns=observed_ns).accepted


def test_who_drives_is_told_at_every_tick():
    led = Led()
    assert led.executor.driver is Driver.POLICY
    led.take_over()
    assert led.executor.driver is Driver.LEADER
    led.executor.pause()
    led.tick(50)
    assert led.executor.driver is Driver.NOBODY
    led.executor.resume(led.ros_ns)
    led.executor.stop()
    led.tick(50)
    assert led.executor.driver is Driver.NOBODY


def test_it_takes_over_in_a_pause_and_gives_back_to_the_pause():
    led = Led()
    led.executor.pause()
    led.take_over()
    led.executor.give_back(led.ros_ns)
    led.tick(20)
    assert led.executor.state is State.PAUSED


def test_it_takes_over_no_robot_that_is_not_started_and_no_robot_without_one():
    led = Led()
    led.executor.stop()
    led.tick(100)
    assert 'start' in led.executor.take_over(led.ros_ns).text
    rig = Rig(limits=alike(TWO, LIMIT)).started()
    assert not rig.executor.take_over(rig.ros_ns).started


def test_speed_scaling_slows_it_and_zero_loses_it():
    led = Led()
    led.says = lambda s: np.full(2, 0.8 * max(0.0, s - 0.6))
    led.executor.set_speed_scaling(0.1)
    led.tick(200)
    led.says = lambda s: np.full(2, 0.8 * (s - 2.3))
    led.begun_ns, led.said = led.ros_ns - 2_300_000_000, 230
    led.take_over()
    led.tick(60)
    assert max(np.abs(tick.command.velocities).max() for tick in led.ticks) <= 0.2 * (1 + 1e-6)
    led.executor.set_speed_scaling(0.0)
    led.tick(40)
    assert led.executor.state is State.PAUSED
    led.assert_within_limits()


# ---------------------------------------------------------------- engaged by its motion


def test_a_leader_that_sets_out_takes_over_and_one_that_rests_gives_back():
    led = Led(engage='motion')
    led.tick(200)
    assert led.executor.state is State.WAITING, 'at rest it leads nothing'
    begun_s = led.leader_s
    led.says = lambda s: np.full(2, 0.3 * math.sin(min(s - begun_s, 1.5)))
    led.run_until(lambda _: led.executor.state is State.LEADING, 60)
    led.run_until(lambda command: command.reason is Reason.LEADING)
    led.run_until(lambda _: led.executor.state is State.WAITING, 300)
    led.assert_within_limits()


@pytest.mark.parametrize('engage', ['service', 'button', 'motion'])
@pytest.mark.parametrize('fault', ['jump', 'gap'])
def test_however_it_took_over_a_leader_that_fails_does_not_hand_over_to_the_policy(engage, fault):
    led = Led(engage=engage)
    led.tick(200)
    begun_s = led.leader_s
    led.says = lambda s: np.full(2, 0.3 * math.sin(s - begun_s))
    if engage != 'motion':
        led.take_over()
    led.run_until(lambda _: led.executor.state is State.LEADING, 60)
    led.tick(50)
    assert led.executor.state is State.LEADING
    failed_s, says = led.leader_s, led.says
    if fault == 'jump':
        led.says = lambda s: says(s) + 1.0
    else:
        # One message comes late, and is stamped as late as the leader's time-out just bears.
        led.says = lambda s: None if 0.0 < s - failed_s < 0.345 else says(s)
    led.run_until(lambda _: led.executor.state is not State.LEADING, 100)
    led.run_until(lambda _: led.executor.at_rest, 200)
    led.tick(50)
    assert led.executor.state is State.PAUSED and led.executor.driver is Driver.NOBODY
    led.assert_within_limits()


def test_after_it_was_told_to_give_back_its_motion_takes_over_once_it_has_rested():
    led = Led(engage='motion')
    led.tick(200)
    begun_s = led.leader_s
    led.says = lambda s: np.full(2, 0.3 * math.sin(s - begun_s))
    led.run_until(lambda _: led.executor.state is State.LEADING, 60)
    assert led.executor.give_back(led.ros_ns).started
    led.tick(300)
    assert led.executor.state is State.WAITING, 'it moves on, and leads nothing'
    rested = led.says(led.leader_s)
    led.says = lambda _: rested
    led.tick(150)
    again_s = led.leader_s
    led.says = lambda s: rested + 0.3 * math.sin(s - again_s)
    led.run_until(lambda _: led.executor.state is State.LEADING, 60)
    led.assert_within_limits()


def test_a_trembling_leader_does_not_take_over():
    led = Led(engage='motion')
    led.says = lambda s: np.full(2, 0.015 * math.sin(20.0 * s))
    led.tick(500)
    assert all(tick.command.kind is not CommandKind.LEAD for tick in led.ticks)


@pytest.mark.parametrize('way', ['tracking', 'approaching'])
def test_its_motion_takes_over_whatever_the_policy_does(way):
    led = Led(engage='motion')
    led.tick(100)
    assert led.submit(RAMP if way == 'tracking' else [0.9] * 20).accepted is (way == 'tracking')
    led.tick(10)
    begun_s = led.leader_s
    led.says = lambda s: np.full(2, 0.3 * math.sin(s - begun_s))
    led.run_until(lambda _: led.executor.state is State.LEADING, 60)
    led.tick(100)
    led.assert_within_limits()


@pytest.mark.parametrize(
    ('column', 'name'),
    [(Column('a'), 'b'), (Column('a', kind='velocity'), 'a')],
)
def test_a_leader_of_what_is_not_there_is_refused_by_name(column, name):
    model = Led().executor.model.__class__
    columns = Rig(columns=(column,)).executor.model.columns
    with pytest.raises(ValueError, match='leader'):
        Leader(model(columns), LeaderParameters((name,)))
