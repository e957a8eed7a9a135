"""False readings, and what `start` makes of them: no step of the command, no motion of the arm.

The robot is a servo whose motors are on: it goes to the last command that was sent, at its top
speed. What its driver says is true, but for an error that begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from execution_rig import ROS_START_NS, chunk_of, holding
from watched_executor import WatchedExecutor

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason, StartResult
from vla_runtime.execution.config import ExecutorConfig, Mode
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.types import ChunkHeader

NAMES = ('pan', 'elbow', 'wrist', 'roll')
PERIOD_S, VELOCITY, ACCELERATION, APPROACH_SPEED = 0.01, 3.0, 6.0, 0.3
LONGEST_STEP = VELOCITY * PERIOD_S * 1.05
STAYS = 0.05
DRIVER, OTHER = '/joint_states#1', '/joint_states#2'
HOME = np.array([0.3, 1.2, 0.7, 0.4])
Reading = Callable[[np.ndarray], np.ndarray | None]


def offset(by: float, *joints: int) -> Reading:
    def read(place: np.ndarray) -> np.ndarray:
        place[list(joints or range(len(NAMES)))] += by
        return place

    return read


def settling(by: float) -> Reading:
    """A filter that comes to the true place; a new one each time, in calls."""
    left = [by]

    def read(place: np.ndarray) -> np.ndarray:
        left[0] *= 0.97
        place[1] += left[0]
        return place

    return read


def noisy(by: float, width: float) -> Reading:
    numbers = np.random.default_rng(3)

    def read(place: np.ndarray) -> np.ndarray:
        place[1] += by + numbers.normal(scale=width)
        return place

    return read


ERRORS: dict[str, Reading] = {
    'turned round': lambda place: place * np.array([1.0, -1.0, 1.0, 1.0]),
    'exchanged': lambda place: place[[1, 0, 2, 3]],
    'twice as far': lambda place: place * np.array([1.0, 2.0, 1.0, 1.0]),
    'zeros': lambda place: 0.0 * place,
    'zero of one': lambda place: place * np.array([1.0, 0.0, 1.0, 1.0]),
    'offset of one': offset(0.4, 1),
    'offset of all': offset(-0.6),
    'a turn of one': offset(2.0 * math.pi, 3),
}


class Robot:
    """An executor, its servo and its driver; `reads` changes what the driver says."""

    def __init__(
        self, rate_hz: float = 100.0, place: np.ndarray = HOME, acceleration: float = 40.0
    ) -> None:
        joint = ColumnLimits(-2.8, 2.8, VELOCITY, acceleration, 0.5)
        wheel = ColumnLimits(velocity=VELOCITY, acceleration=acceleration, step_from_measured=0.5)
        limits = dict(zip(NAMES, (joint, joint, joint, wheel), strict=True))
        columns = tuple(Column(name, continuous=name == 'roll') for name in NAMES)
        self.executor = WatchedExecutor(
            ExecutorConfig(
                columns, make_limits(NAMES, limits), control_period_s=PERIOD_S, clamp_latch=0
            ),
            holding(),
        )
        self.rate_hz = rate_hz
        self.place = place.copy()
        self.sent: np.ndarray | None = None
        self.motors = True
        self.longest_step = self.fastest_change = 0.0
        self._step = np.zeros(len(NAMES))
        self.reads: Reading = lambda place: place
        self.source = DRIVER
        self.now_s, self.ros_ns, self.next_ns = 50.0, ROS_START_NS, ROS_START_NS
        self.number = 0
        self.anchor = place.copy()

    @property
    def moved(self) -> float:
        """Way of the arm since `watch`."""
        return float(np.abs(self.place - self.anchor).max())

    def watch(self) -> None:
        self.anchor = self.place.copy()

    def run(self, seconds: float) -> Robot:
        for _ in range(round(seconds / PERIOD_S)):
            self._tick()
        return self

    def _tick(self) -> None:
        self.now_s += PERIOD_S
        end_ns = self.ros_ns + round(PERIOD_S * 1e9)
        if self.sent is not None and self.motors:
            most = VELOCITY * PERIOD_S
            self.place += np.clip((self.sent - self.place) * 0.3, -most, most)
        while self.next_ns <= end_ns:
            self.say(self.next_ns)
            self.next_ns += round(1e9 / self.rate_hz)
        self.ros_ns = end_ns
        command = self.executor.tick(self.now_s, self.ros_ns)
        if command.kind is CommandKind.IDLE or command.settled:
            return
        if self.sent is not None:
            step = command.setpoints - self.sent
            self.longest_step = max(self.longest_step, float(np.abs(step).max()))
            change = float(np.abs(step - self._step).max()) / PERIOD_S**2
            self.fastest_change = max(self.fastest_change, change)
            self._step = step
        self.sent = command.setpoints.copy()

    def say(self, stamp_ns: int, now_ns: int | None = None) -> None:
        said = self.reads(self.place.copy())
        if said is not None:
            self.executor.observe_state(
                list(NAMES), list(said), stamp_ns, self.source, now_ns or stamp_ns
            )

    def start(self) -> StartResult:
        return self.executor.start(self.now_s, self.ros_ns)

    def started(self) -> Robot:
        self.run(0.7)
        result = self.start()
        assert result.started, result.text
        return self.run(0.1)

    def go(self, by: float) -> None:
        """Offer a plan of a second from where the robot is."""
        assert self.sent is not None
        rows = self.sent + np.linspace(0.0, by, 25)[:, None]
        self.number += 1
        episode = self.executor.episode
        header = ChunkHeader(self.ros_ns, episode, self.number, tied=True)
        chunk = chunk_of(rows, NAMES, ('position',) * len(NAMES))
        assert self.executor.submit_chunk(chunk, header, self.now_s, self.ros_ns).accepted


def robot_in(mode: str, rate_hz: float) -> Robot:
    robot = Robot(rate_hz).started()
    if mode == 'running':
        robot.go(0.2)
        robot.run(0.2)
    if mode == 'stopped':
        robot.executor.stop()
        robot.run(1.5)
    robot.watch()
    return robot


@pytest.mark.parametrize('mode', ['running', 'holding', 'stopped'])
@pytest.mark.parametrize('error', ERRORS)
@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
def test_a_start_after_a_reading_that_stays_wrong_is_refused_once_and_moves_nothing(
    rate_hz, error, mode
):
    robot = robot_in(mode, rate_hz)
    robot.reads = ERRORS[error]
    # At once, where a robot that runs has not even found it.
    robot.run(0.03)
    robot.start()
    robot.run(1.5)
    assert robot.executor.mode is Mode.STOPPED
    begun = robot.moved if mode == 'running' else 0.0
    refused = robot.start()
    assert not refused.started and refused.reason is Reason.STATE_IMPLAUSIBLE
    assert any(f"'{name}'" in refused.text for name in NAMES) and 'look at' in refused.text
    robot.run(2.0)
    robot.reads = lambda place: place
    robot.run(1.5)
    assert robot.longest_step <= LONGEST_STEP
    assert robot.moved - begun <= STAYS
    # The true reading is where the command is: nothing is unseen any more.
    assert robot.start().started


@pytest.mark.parametrize('lasts_s', [0.05, 0.7, 3.0])
@pytest.mark.parametrize('error', ERRORS)
@pytest.mark.parametrize('rate_hz', [10.0, 100.0])
def test_a_second_start_never_steps_and_drives_nothing_once_the_reading_is_true_again(
    rate_hz, error, lasts_s
):
    robot = robot_in('holding', rate_hz)
    robot.reads = ERRORS[error]
    robot.run(1.5)
    assert not robot.start().started
    robot.run(1.0)
    assert robot.start().started
    robot.run(lasts_s)
    # No faster than the approach.
    assert robot.moved <= APPROACH_SPEED * lasts_s + 0.02
    robot.reads = lambda place: place
    robot.watch()
    robot.run(2.0)
    assert robot.moved <= STAYS and robot.longest_step <= LONGEST_STEP


@pytest.mark.parametrize('error', ['offset of one', 'offset of all', 'a turn of one'])
@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
def test_a_reading_that_goes_along_with_the_command_ends_the_motion(rate_hz, error):
    robot = robot_in('stopped', rate_hz)
    robot.reads = ERRORS[error]
    robot.run(1.0)
    assert not robot.start().started and robot.start().started
    robot.run(3.0)
    assert robot.executor.mode is Mode.STOPPED and robot.moved <= STAYS
    assert 'the reading is wrong' in robot.executor.detail
    # And so does the next one.
    assert not robot.start().started


@pytest.mark.parametrize('rate_hz', [10.0, 100.0])
def test_an_arm_that_really_is_there_is_held_there_after_the_second_start(rate_hz):
    robot = robot_in('stopped', rate_hz)
    robot.motors = False
    robot.place[1] -= 0.6
    robot.run(1.0)
    assert not robot.start().started and robot.start().started
    robot.run(0.6 / APPROACH_SPEED + 1.0)
    assert robot.executor.mode is Mode.RUNNING and robot.longest_step <= LONGEST_STEP
    robot.motors = True
    robot.watch()
    robot.run(1.0)
    assert robot.moved <= STAYS


@pytest.mark.parametrize('after_s', [1.0, 59.0, 61.0])
def test_an_answer_counts_for_a_minute_and_for_the_place_that_was_asked_about(after_s):
    robot = robot_in('stopped', 20.0)
    robot.reads = offset(0.5, 1)
    robot.run(1.0)
    assert not robot.start().started
    robot.run(after_s)
    assert robot.start().started == (after_s < 60.0)
    robot = robot_in('stopped', 20.0)
    robot.reads = offset(0.5, 1)
    robot.run(1.0)
    assert not robot.start().started
    robot.reads = offset(0.9, 1)
    robot.run(1.0)
    assert not robot.start().started


def test_asking_what_would_refuse_a_start_is_no_answer():
    robot = robot_in('stopped', 100.0)
    robot.reads = offset(0.5, 1)
    robot.run(1.0)
    for _ in range(3):
        text, fault = robot.executor.why_not_start(robot.now_s, robot.ros_ns)
        assert 'nobody saw it go there' in text and fault is Reason.STATE_IMPLAUSIBLE
    assert not robot.start().started
    assert robot.executor.why_not_start(robot.now_s, robot.ros_ns)[0] == ''


def test_a_jump_before_the_first_start_is_asked_about():
    robot = Robot().run(0.7)
    robot.reads = offset(-0.8, 1)
    robot.run(1.0)
    assert not robot.start().started
    assert robot.sent is None
    assert robot.start().started


@pytest.mark.parametrize('gap_s', [0.4, 2.0, 10.0])
@pytest.mark.parametrize('error', ['zeros', 'offset of one', 'offset of all'])
@pytest.mark.parametrize('rate_hz', [10.0, 100.0])
def test_readings_that_are_wrong_after_an_outage_move_nothing(rate_hz, error, gap_s):
    robot = robot_in('stopped', rate_hz)
    robot.reads = lambda _: None
    robot.run(gap_s)
    robot.reads = ERRORS[error]
    robot.run(5.0)
    assert not robot.start().started
    robot.run(1.0)
    assert robot.moved <= STAYS and robot.longest_step <= LONGEST_STEP


@pytest.mark.parametrize('rate_hz', [10.0, 100.0])
def test_nothing_follows_before_half_a_second_of_readings_that_agree(rate_hz):
    robot = robot_in('stopped', rate_hz)
    robot.motors = False
    robot.reads = lambda _: None
    robot.run(2.0)
    robot.place[1] -= 0.4
    robot.reads = lambda place: place
    held = robot.sent
    assert held is not None
    robot.run(0.5)
    assert (robot.sent == held).all()
    robot.run(0.3 + 0.5 + 0.4 / APPROACH_SPEED)
    assert robot.sent[1] == pytest.approx(robot.place[1], abs=0.01)
    assert robot.longest_step <= APPROACH_SPEED * PERIOD_S * 1.05


@pytest.mark.parametrize('gap_s', [0.3, 0.6, 0.9, 1.3, 2.0])
@pytest.mark.parametrize('rate_hz', [10.0, 20.0, 100.0, 500.0])
def test_motors_that_were_off_for_a_moment_in_motion_take_no_joint_to_where_the_command_braked(
    rate_hz, gap_s
):
    robot = Robot(rate_hz, acceleration=ACCELERATION).started()
    for _ in range(8):
        robot.go(1.5)
        robot.run(0.05)
    robot.motors = False
    robot.reads = lambda _: None
    robot.run(0.6 * gap_s)
    # The hand that moves one joint is what stops the robot; the others have stayed where they were.
    robot.place[0] -= 0.4
    robot.run(0.4 * gap_s)
    robot.reads = lambda place: place
    robot.run(1.0)
    assert robot.executor.mode is Mode.STOPPED
    assert robot.sent is not None
    assert np.abs(robot.sent - robot.place)[1:].max() > STAYS
    robot.run(4.0)
    robot.motors = True
    robot.watch()
    robot.run(2.0)
    assert robot.moved <= STAYS and robot.longest_step <= LONGEST_STEP


@pytest.mark.parametrize('after_s', [0.7, 0.9, 1.2, 1.6])
def test_a_start_amid_a_hold_on_its_way_waits_for_its_end(after_s):
    robot = Robot(20.0, acceleration=ACCELERATION).started()
    robot.executor.stop()
    robot.run(1.0)
    robot.motors = False
    robot.reads = lambda _: None
    robot.run(2.0)
    robot.place[1] -= 0.4
    robot.reads = lambda place: place
    robot.run(after_s)
    assert not robot.executor.at_rest
    # The first call is refused for the place; the answer to that for the way.
    assert robot.start().reason is Reason.STATE_IMPLAUSIBLE
    result = robot.start()
    assert not result.started and result.reason is None
    assert robot.executor.status().reason is Reason.STOPPED
    for _ in range(30):
        robot.run(0.1)
        if robot.start().started:
            break
    assert robot.executor.mode is Mode.RUNNING
    robot.run(0.5)
    assert robot.sent is not None
    assert robot.sent[1] == pytest.approx(robot.place[1], abs=0.01)
    assert robot.fastest_change <= ACCELERATION * 1.05


def test_another_publisher_that_puts_the_robot_elsewhere_is_asked_about():
    robot = robot_in('stopped', 100.0)
    robot.reads = lambda _: None
    robot.run(2.0)
    robot.source, robot.reads = OTHER, offset(0.4, 1)
    robot.run(5.0)
    assert robot.moved <= 1e-3 and not robot.start().started


# ---------------------------------------------------------------- stamps of the future


@pytest.mark.parametrize('mode', ['running', 'stopped'])
@pytest.mark.parametrize('ahead_s', [0.1, 4.0, 1e6])
@pytest.mark.parametrize('rate_hz', [10.0, 100.0])
def test_one_state_stamped_ahead_changes_nothing_that_is_known(rate_hz, ahead_s, mode):
    robot = robot_in(mode, rate_hz)
    robot.reads = offset(0.4, 1)
    robot.say(robot.ros_ns + round(ahead_s * 1e9), robot.ros_ns)
    assert robot.executor.why_not_start(robot.now_s, robot.ros_ns)[1] is Reason.STATE_FROM_FUTURE
    robot.reads = lambda place: place
    robot.run(0.2)
    assert robot.executor.why_not_start(robot.now_s, robot.ros_ns)[0] == ''
    # Plausibility is on: a glitch is refused, and no outage was seen.
    robot.reads = offset(0.9, 1)
    robot.run(0.12)
    assert robot.executor.why_not_start(robot.now_s, robot.ros_ns)[1] is Reason.STATE_IMPLAUSIBLE
    assert robot.longest_step <= LONGEST_STEP


def test_a_driver_whose_clock_is_ahead_is_named_as_that():
    robot = Robot()
    for _ in range(100):
        robot.say(robot.ros_ns + 3_000_000_000, robot.ros_ns)
        robot.run(0.01)
    robot.reads = lambda _: None
    robot.run(0.1)
    robot.reads = lambda place: place
    robot.say(robot.ros_ns + 3_000_000_000, robot.ros_ns)
    result = robot.start()
    assert result.reason is Reason.STATE_FROM_FUTURE and '3.000 s in the future' in result.text


# ---------------------------------------------------------------- half a second of one publisher


@pytest.mark.parametrize('rate_hz', [5.0, 10.0, 100.0, 500.0])
def test_a_start_needs_half_a_second_of_states(rate_hz):
    robot = Robot(rate_hz)
    robot.run(0.4)
    early = robot.start()
    assert not early.started and 'call ~/start again' in early.text
    robot.run(0.4)
    assert robot.start().started


def test_a_start_beside_two_publishers_is_refused_from_the_first_message_on():
    robot = Robot()
    for at in range(100):
        robot.source = (DRIVER, OTHER)[at % 2]
        robot.reads = (lambda place: place, lambda place: 0.0 * place)[at % 2]
        robot.run(0.01)
        assert not robot.start().started
    assert robot.sent is None


def test_zeros_of_a_driver_that_has_not_heard_from_its_robot_are_asked_about():
    robot = Robot()
    robot.reads = ERRORS['zeros']
    robot.run(2.0)
    result = robot.start()
    assert not result.started and 'exactly 0' in result.text
    robot.reads = lambda place: place
    robot.run(2.0)
    assert robot.sent is None


def test_a_robot_that_is_at_zero_starts_at_the_second_call():
    robot = Robot(place=np.zeros(len(NAMES)))
    robot.run(1.0)
    assert not robot.start().started and robot.start().started
    robot.executor.stop()
    robot.run(1.0)
    assert robot.start().started


# ---------------------------------------------------------------- a bus that repeats itself


@pytest.mark.parametrize('speed', [0.3, 1.5, 2.5])
@pytest.mark.parametrize('joints', [[1], [0, 1, 2, 3]])
@pytest.mark.parametrize('rate_hz', [10.0, 50.0, 100.0, 500.0])
def test_a_bus_that_repeats_an_old_position_for_100_ms_stops_no_robot(rate_hz, joints, speed):
    robot = Robot(rate_hz).started()
    old: list[np.ndarray] = []

    def read(place: np.ndarray) -> np.ndarray:
        if old:
            place[joints] = old[0][joints]
        return place

    robot.reads = read
    by = speed
    for _ in range(6):
        robot.go(by)
        robot.run(0.15)
        old.append(robot.place.copy())
        robot.run(0.1)
        old.clear()
        robot.run(0.15)
        by = -by
    assert robot.executor.mode is Mode.RUNNING, robot.executor.detail
    assert not robot.executor.counters.states_implausible


# ---------------------------------------------------------------- whatever comes


@pytest.mark.parametrize('begin_s', [0.4, 0.55])
@pytest.mark.parametrize('speed', [0.8, 1.5])
@pytest.mark.parametrize('rate_hz', [50.0, 100.0, 500.0])
def test_a_stop_for_a_bus_that_repeats_an_old_position_does_not_step_back_to_it(
    rate_hz, speed, begin_s
):
    robot = Robot(rate_hz).started()
    old: np.ndarray | None = None
    ends_s = math.inf
    robot.reads = lambda place: place if old is None or robot.now_s >= ends_s else old.copy()
    for step in range(40):
        if robot.executor.mode is Mode.STOPPED:
            break
        if step % 4 == 0:
            robot.go(speed)
        if old is None and step * 0.05 >= begin_s:
            old, ends_s = robot.place.copy(), robot.now_s + 0.5
        robot.run(0.05)
    assert robot.executor.status().reason is Reason.TRACKING_ERROR
    robot.watch()
    robot.run(3.0)
    assert robot.longest_step <= LONGEST_STEP and robot.moved <= STAYS


@pytest.mark.parametrize('rate_hz', [10.0, 500.0])
@pytest.mark.parametrize('after_s', [0.05, 0.4, 1.0])
def test_a_joint_that_is_moved_by_hand_keeps_no_other_from_being_given_up(after_s, rate_hz):
    robot = Robot(rate_hz).started()
    robot.go(1.5)
    robot.run(0.2)
    robot.motors = False
    for _ in range(40):
        if robot.executor.mode is Mode.STOPPED:
            break
        robot.go(1.5)
        robot.run(0.05)
    assert robot.executor.status().reason is Reason.TRACKING_ERROR
    robot.run(after_s)
    for _ in range(50):
        robot.place[0] -= 0.01
        robot.run(PERIOD_S)
    robot.run(6.0)
    assert robot.sent is not None
    assert np.abs(robot.sent - robot.place).max() <= STAYS


@pytest.mark.parametrize('seed', range(12))
def test_whatever_is_read_and_whenever_it_is_started_no_command_steps(seed):
    numbers = np.random.default_rng(seed)
    robot = Robot((10.0, 100.0, 50.0)[seed % 3]).started()
    for _ in range(40):
        event = int(numbers.integers(6))
        if event == 0:
            robot.reads = list(ERRORS.values())[int(numbers.integers(len(ERRORS)))]
        elif event == 1:
            robot.reads = lambda _: None
        elif event == 2:
            robot.reads = lambda place: place
        elif event == 3:
            robot.start()
        elif event == 4:
            robot.executor.stop()
        else:
            ahead_ns = round(float(numbers.uniform(0.1, 5.0)) * 1e9)
            robot.say(robot.ros_ns + ahead_ns, robot.ros_ns)
        stopped = robot.executor.mode is Mode.STOPPED and robot.executor.at_rest
        robot.watch()
        robot.run(float(numbers.choice([0.02, 0.3, 0.8, 2.0])))
        assert robot.longest_step <= LONGEST_STEP, (seed, event)
        if stopped and event != 3:
            assert robot.moved <= STAYS, (seed, event)


@pytest.mark.parametrize('gap_s', [0.4, 2.0])
@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
@pytest.mark.parametrize(
    'error', [*ERRORS, 'settling', 'settling from below', 'noisy', 'two that differ']
)
def test_whatever_is_read_after_a_gap_no_hold_steps_or_drives_the_arm(error, rate_hz, gap_s):
    robot = robot_in('stopped', rate_hz)
    robot.reads = lambda _: None
    robot.run(gap_s)
    if error == 'two that differ':
        for by in (0.5, 0.3):
            robot.reads = offset(by, 1)
            robot.run(1.0 / rate_hz)
    made = {'settling': settling(0.4), 'settling from below': settling(-0.8)}
    made |= {'noisy': noisy(0.4, 0.05), 'two that differ': lambda place: place}
    robot.reads = (ERRORS | made)[error]
    robot.run(5.0)
    assert robot.moved <= STAYS and robot.longest_step <= LONGEST_STEP


def test_a_question_that_was_not_put_is_not_answered():
    robot = robot_in('stopped', 100.0)
    robot.reads = lambda _: None
    robot.run(2.0)
    robot.reads = offset(0.4, 1)
    robot.run(0.1)
    # The readings are doubted yet: nothing is said of a place.
    assert not robot.start().started
    robot.run(0.6)
    assert robot.start().reason is Reason.STATE_IMPLAUSIBLE
    # It is answered; the hold is on its way there.
    assert robot.start().reason is None


@pytest.mark.parametrize('rate_hz', [10.0, 25.0])
def test_a_driver_whose_clock_is_a_little_ahead_is_taken_when_its_time_comes(rate_hz):
    robot = Robot(rate_hz)
    # Nothing but what is said here.
    robot.next_ns = 1 << 62
    started = 0
    for _ in range(40):
        robot.say(robot.ros_ns + 60_000_000, robot.ros_ns)
        robot.run(1.0 / rate_hz)
        started += robot.start().started
    assert started


def test_a_driver_that_said_zeros_and_has_heard_from_its_robot_starts_at_once():
    robot = Robot()
    robot.reads = ERRORS['zeros']
    robot.run(2.0)
    robot.reads = lambda place: place
    robot.run(1.0)
    assert robot.start().started
