"""A stopped robot under readings that are wrong, late or of another node, and arms that sag.

The robot is a servo that goes to the last command that was sent, at its top speed, and hangs below
it by its sag. What counts is how far it moves after the event.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from execution_rig import ROS_START_NS, holding
from thorough import thorough_but
from watched_executor import WatchedExecutor

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import Command, CommandKind
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.limits import ColumnLimits, make_limits

PERIOD_S = 0.01
TOP_SPEED = 3.0
DRIVER, OTHER = '/joint_states#1', '/joint_states#2'
Readings = Callable[[float, np.ndarray], np.ndarray | None]


class Arm:
    """A stopped executor and its servo.

    Attributes:
        reads: what the driver says at a time since the event, in seconds; None: nothing.
        hand: the arm's place while its motors are off and a person has it.
    """

    def __init__(self, *, rate_hz: float = 100.0) -> None:
        joint = ColumnLimits(-2.8, 2.8, 3.0, 40.0, 0.3)
        wheel = ColumnLimits(velocity=3.0, acceleration=40.0, step_from_measured=0.3)
        self.executor = WatchedExecutor(
            ExecutorConfig(
                (Column('elbow'), Column('roll', continuous=True)),
                make_limits(('elbow', 'roll'), {'elbow': joint, 'roll': wheel}),
                control_period_s=PERIOD_S,
                clamp_latch=0,
            ),
            holding(),
        )
        self.place = np.array([1.6, 0.8])
        self.latch = self.place.copy()
        self.sag, self.settles_s = 0.0, 0.03
        self.every = round(1.0 / (rate_hz * PERIOD_S))
        self.reads: Readings = lambda _, place: place
        self.hand: Callable[[float], float] | None = None
        self.source = DRIVER
        self.ticks = 0
        self.now_s, self.ros_ns = 50.0, ROS_START_NS
        self.event_s = 0.0
        self.run(max(0.6, 5.0 / rate_hz))
        result = self.executor.start(self.now_s, self.ros_ns)
        assert result.started, result.text
        self.run(0.5)
        self.executor.stop()
        self.run(2.0)
        self.event_s = self.now_s
        self.begun = self.place.copy()

    def run(self, seconds: float) -> Arm:
        for _ in range(round(seconds / PERIOD_S)):
            self._tick()
        return self

    def _tick(self) -> None:
        self.ticks += 1
        self.now_s += PERIOD_S
        self.ros_ns += round(PERIOD_S * 1e9)
        since_s = self.now_s - self.event_s
        if self.hand is not None:
            self.place[0] = self.hand(since_s)
        else:
            way = self.latch - self.place - self.sag * np.array([1.0, 0.0])
            most = TOP_SPEED * PERIOD_S
            self.place += np.clip(way * -math.expm1(-PERIOD_S / self.settles_s), -most, most)
        if self.ticks % self.every == 0:
            said = self.reads(since_s, self.place.copy())
            if said is not None:
                names = ['elbow', 'roll']
                self.executor.observe_state(
                    names, list(said), self.ros_ns, self.source, self.ros_ns
                )
        self._take(self.executor.tick(self.now_s, self.ros_ns))

    def _take(self, command: Command | None) -> None:
        if command is not None and command.kind is not CommandKind.IDLE and not command.settled:
            self.latch = command.setpoints.copy()

    @property
    def moved(self) -> float:
        return float(np.abs(self.place - self.begun).max())


def wrong(by: float, begin_s: float, end_s: float, gap_s: float = 0.0, joint: int = 0) -> Readings:
    """Readings of one joint that are off for a while, after a gap without any."""

    def read(since_s: float, place: np.ndarray) -> np.ndarray | None:
        if begin_s - gap_s < since_s < begin_s:
            return None
        if begin_s <= since_s < end_s:
            place[joint] += by
        return place

    return read


@pytest.mark.parametrize('rate_hz', thorough_but([2.0, 10.0, 100.0], [2.0, 4.0, 10.0, 50.0, 100.0]))
@pytest.mark.parametrize('gap_s', [0.0, 0.3, 1.2])
@pytest.mark.parametrize('lasts_s', thorough_but([0.01, 0.6], [0.01, 0.2, 0.6]))
def test_wrong_readings_after_a_gap_do_not_move_it(rate_hz, gap_s, lasts_s):
    arm = Arm(rate_hz=rate_hz)
    arm.reads = wrong(-0.7, 2.0, 2.0 + lasts_s, gap_s)
    assert arm.run(6.0).moved <= 0.05


def test_readings_of_which_every_third_is_wrong_do_not_move_it():
    arm = Arm()

    def read(since_s: float, place: np.ndarray) -> np.ndarray | None:
        if 1.0 < since_s < 1.3:
            return None
        if since_s > 1.3 and round(since_s / PERIOD_S) % 3 == 0:
            place[0] -= 1.0
        return place

    arm.reads = read
    assert arm.run(5.0).moved <= 0.05


@pytest.mark.parametrize('jump_s', [-0.3, 0.3, 1.0, 100.0])
@pytest.mark.parametrize('zeros', [1, 2, 40])
def test_zeros_after_a_clock_jump_do_not_move_it(jump_s, zeros):
    arm = Arm()
    arm.run(1.0)
    arm.ros_ns += round(jump_s * 1e9)
    until_s = arm.now_s - arm.event_s + zeros * PERIOD_S
    arm.reads = lambda since_s, place: place * 0.0 if since_s <= until_s + 1e-6 else place
    assert arm.run(4.0).moved <= 0.05


@pytest.mark.parametrize('gap_s', [0.3, 3.0])
def test_another_publisher_after_a_gap_does_not_move_it(gap_s):
    arm = Arm()
    arm.reads = lambda *_: None
    arm.run(gap_s)
    arm.source = OTHER
    arm.reads = lambda *_: np.array([0.9, 0.8])
    assert arm.run(3.0).moved <= 0.05


def test_a_driver_that_starts_anew_is_believed_where_the_robot_is_where_it_was():
    arm = Arm()
    arm.reads = lambda *_: None
    arm.run(3.0)
    arm.source, arm.reads = OTHER, lambda _, place: place
    arm.run(1.0)
    assert arm.executor.start(arm.now_s, arm.ros_ns).started
    arm.run(0.2)
    assert arm.executor.mode.value == 'running'


@pytest.mark.parametrize('lasts_s', [0.01, 0.6, 2.0])
@pytest.mark.parametrize('gap_s', [0.0, 0.3, 3.0])
def test_a_reading_one_turn_off_does_not_turn_it(lasts_s, gap_s):
    arm = Arm()
    arm.reads = wrong(2.0 * math.pi, 4.0, 4.0 + lasts_s, gap_s, joint=1)
    assert arm.run(8.0).moved <= 0.05


@pytest.mark.parametrize('sag', thorough_but([0.06, 0.15], [0.05, 0.06, 0.1, 0.15]))
@pytest.mark.parametrize('settles_s', thorough_but([0.3, 1.0], [0.3, 0.5, 1.0]))
def test_an_arm_that_sags_settles_once_and_does_not_walk_down(sag, settles_s):
    arm = Arm()
    arm.sag, arm.settles_s = sag, settles_s
    # One new command where it comes to rest, and its sag below that.
    assert arm.run(30.0).moved <= 2.0 * sag + 0.02


@pytest.mark.parametrize('rate', [0.002, 0.005, 0.015])
def test_an_arm_whose_sag_grows_slowly_is_not_followed(rate):
    arm = Arm()
    arm.run(1.0)
    for _ in range(round(0.15 / rate / 0.1)):
        arm.sag += 0.1 * rate
        arm.run(0.1)
    # Its own sag, and no more than a hold gives way.
    assert arm.moved <= 0.15 + 0.05 + 1e-3


def test_an_arm_that_a_trembling_hand_keeps_up_stays_when_its_motors_come_on():
    arm = Arm()
    arm.hand = lambda since_s: 1.6 - min(since_s, 1.0) + 0.015 * math.sin(40.0 * since_s)
    arm.run(4.0)
    left = arm.place[0]
    arm.hand = None
    arm.run(2.0)
    assert abs(arm.place[0] - left) <= 0.05


@pytest.mark.parametrize('rate_hz', [2.0, 5.0, 100.0])
def test_an_arm_that_was_moved_by_hand_stays_when_its_motors_come_on(rate_hz):
    arm = Arm(rate_hz=rate_hz)
    arm.hand = lambda since_s: 1.6 - min(since_s, 1.0)
    # Of a driver that is silent for so long between two messages nobody saw how the arm got there.
    arm.run(14.0 if rate_hz < 5.0 else 5.0)
    arm.hand = None
    arm.run(2.0)
    assert abs(arm.place[0] - 0.6) <= 0.05


@pytest.mark.parametrize('speed', [0.06, 0.07, 0.1, 0.2])
def test_an_arm_that_was_moved_slowly_stays_when_its_motors_come_on(speed):
    arm = Arm()
    arm.hand = lambda since_s: 1.6 - min(speed * since_s, 0.3)
    arm.run(0.3 / speed + 1.5)
    arm.hand = None
    arm.run(2.0)
    assert abs(arm.place[0] - 1.3) <= 0.05


def test_what_was_not_believed_is_named_of_a_stopped_robot():
    arm = Arm()
    arm.reads = wrong(-0.7, 1.0, 1.3)
    arm.run(2.0)
    assert "'elbow'" in arm.executor.detail and '/joint_states' in arm.executor.detail


def test_readings_that_arrive_in_pairs_are_believed():
    """A driver of 33 Hz whose messages come two at a time and are stamped as they come."""
    arm = Arm(rate_hz=33.0)
    place = arm.place.copy()
    for pair in range(40):
        for index in range(2):
            place[0] = 1.6 - 2.2 * 0.03 * (2 * pair + index) if pair < 10 else place[0]
            stamp_ns = arm.ros_ns + (pair + 1) * 60_000_000 + index * 1_000_000
            arm.executor.observe_state(['elbow', 'roll'], list(place), stamp_ns, DRIVER)
    assert arm.executor.counters.states_implausible == 0


def test_a_hand_that_takes_over_while_the_arm_arrives_is_followed():
    arm = Arm()
    arm.executor.start(arm.now_s, arm.ros_ns)
    arm.run(0.1)
    arm.executor.stop()
    # It overshoots, and few of its messages come.
    begun_s, place = arm.now_s - arm.event_s, arm.place[0]

    def arrives(since_s: float) -> float:
        return place + max(0.0, 0.2 - abs(0.2 - 1.33 * (since_s - begun_s)))

    def read(since_s: float, now: np.ndarray) -> np.ndarray | None:
        late = since_s - begun_s < 0.36 and round((since_s - begun_s) / PERIOD_S) % 6
        return None if late else now

    arm.hand, arm.reads = arrives, read
    arm.run(0.4)
    arm.hand = lambda s: place + min(0.14, 0.15 * (s - begun_s - 0.4))
    arm.run(2.7)
    arm.hand, arm.begun = None, arm.place.copy()
    assert arm.run(1.0).moved <= 0.05


def test_a_joint_that_is_moved_slowly_beside_a_swift_one_stays():
    arm = Arm()
    place = arm.place.copy()

    def read(since_s: float, _: np.ndarray) -> np.ndarray:
        # Motors are off: what the servo does to the second joint is not seen.
        return np.array([arm.place[0], place[1] + min(0.08, 0.04 * since_s)])

    arm.reads = read
    arm.hand = lambda s: place[0] - min(0.6, 0.3 * s)
    arm.run(4.0)
    assert abs(arm.latch[0] - (place[0] - 0.6)) < 0.01
    assert abs(arm.latch[1] - (place[1] + 0.08)) < 0.01


@pytest.mark.parametrize('again', [False, True])
def test_an_arm_that_was_moved_by_hand_before_is_followed_again(again):
    """In the same stop, and in one after it was started in between."""
    arm = Arm()

    def move_by_hand(way: float) -> None:
        begun_s, place = arm.now_s - arm.event_s, arm.place[0]
        arm.hand = lambda s: place + way * min(1.0, max(0.0, s - begun_s))
        arm.run(2.7)
        arm.hand, arm.begun = None, arm.place.copy()
        assert arm.run(1.5).moved <= 0.05

    move_by_hand(-0.3)
    if again:
        assert arm.executor.start(arm.now_s, arm.ros_ns).started
        arm.run(0.2)
        arm.executor.stop()
        arm.run(0.5)
    move_by_hand(-0.3)


@pytest.mark.parametrize('gap_s', [0.3, 0.8, 1.2, 2.0])
def test_an_arm_that_was_moved_by_hand_in_an_outage_is_held_where_it_rests(gap_s):
    arm = Arm()
    place = arm.place[0]
    arm.reads = lambda since_s, now: None if since_s < gap_s else now
    arm.hand = lambda s: place - 0.4 * min(1.0, s / gap_s)
    # It rests, and then the hold comes to it at the approach speed.
    rests_s = 0.5 if gap_s > 1.5 else 2.0
    arm.run(gap_s + rests_s + 0.5 + 0.4 / 0.3 + 0.2)
    arm.hand, arm.begun = None, arm.place.copy()
    assert arm.run(1.5).moved <= 0.05
