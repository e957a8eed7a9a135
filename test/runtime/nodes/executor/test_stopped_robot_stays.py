"""A robot that is stopped or holds stays where it is, whatever its joint states say.

The kinds of faults that people met: a second node that publishes the same joints, an arm that was
guided by hand while it was stopped or without power, joint states that were away for long, false
readings, and readings that are one turn off. The arm follows its last command, as servos do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, graph
from latched_arm import LatchedArm
from paths import ROOT
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import JointState
from std_srvs.srv import Trigger
from thorough import thorough_after, thorough_but

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import ns_to_stamp
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

NODE = '/vla_executor'
# `hold_follows` of the tabletop robot, which gives none; and rounding.
STAYS_RAD = 0.05 + 1e-6
# Statuses that show that nothing goes on; they come five times a second.
_STATUSES = 8
ELBOW, ROLL = JOINT_NAMES.index('elbow_flex'), JOINT_NAMES.index('wrist_roll')
BY_HAND = np.array([-1.0, 0.0, 0.0, -1.0, 0.0, 0.0])


class Bench:
    """An executor with the demo's policy file, and an arm that follows its latch."""

    def __init__(self, made: Graph, namespace: str = '') -> None:
        self.graph = made
        self._namespace = namespace
        self.node = f'{namespace}{NODE}'
        parameters = {
            'bundle': ROOT / 'engines' / 'demo',
            'robot': 'tabletop',
            'replan_interval': 8,
            # A busy machine must not look like a fault here.
            'max_state_age_s': 0.5,
            'tick_timeout_s': 1.0,
            'clock_jump_s': 5.0,
        }
        words = [word for key, value in parameters.items() for word in ('-p', f'{key}:={value}')]
        self.process = made.start('vla_runtime.nodes.executor.node', '--ros-args', *words)
        self._diagnostics = made.collect(DiagnosticArray, '/diagnostics')

    def begin(self, rate_hz: float, replan_interval: int) -> None:
        """Activate it beside a new arm."""
        if self.graph.state(self.node) == 'active':
            assert self.graph.transition(self.node, 'deactivate')
        if self.graph.state(self.node) == 'unconfigured':
            assert self.graph.transition(self.node, 'configure')
        self.arm = LatchedArm(self.graph, self._namespace, rate_hz)
        assert self.graph.transition(self.node, 'activate')
        changed = self.graph.set_parameter(self.node, 'replan_interval', replan_interval)
        assert changed.successful, changed.reason

    def call(self, service: str) -> Any:
        return self.graph.call(Trigger, f'{self.node}/{service}', Trigger.Request())

    def move(self) -> None:
        """Start it, and see it move; again where a machine that is far too busy stops it."""
        self._diagnostics.clear()
        self.arm.mark()

        def moves() -> bool:
            status = next(self.statuses(), None)
            if status is not None and status['mode'] != 'running':
                self.call('start')
                self._diagnostics.clear()
            return bool(self.arm.moved().max() > 0.1)

        self.graph.wait_for(moves, 'motion')

    def stop(self) -> None:
        """Stop it, and wait until it is at rest and sent nothing more."""
        assert self.call('stop').success
        self.wait_for_status('the stop', lambda s: s['reason'] == 'stopped')
        self.wait_for_silence()

    def statuses(self, condition: str = 'control') -> Iterator[dict[str, Any]]:
        """Statuses of a condition since the last `wait_for_status`, newest first."""
        for message in reversed(list(self._diagnostics)):
            for status in message.status:
                if status.name == f'{self.node}: {condition}':
                    yield {**values_of(status), 'text': status.message}

    def wait_for_status(
        self, what: str, holds: Callable[[dict[str, Any]], bool], condition: str = 'control'
    ) -> dict[str, Any]:
        """A status from now on that fulfils `holds`."""
        self._diagnostics.clear()
        return self.graph.wait_for(
            lambda: next(filter(holds, self.statuses(condition)), None), what
        )

    def wait_for_silence(self) -> None:
        """Wait until nothing was sent between two statuses."""
        self._diagnostics.clear()

        def silent() -> bool:
            sent = [status['sent'] for status in self.statuses()]
            return len(sent) >= 2 and sent[0] == sent[1]

        self.graph.wait_for(silent, 'an executor that sends nothing')

    def watch(self) -> list[dict[str, Any]]:
        """Statuses of the next moments, oldest first."""
        self._diagnostics.clear()
        found = self.graph.wait_for(
            lambda: list(self.statuses())[_STATUSES - 1 :] and list(self.statuses()), 'statuses'
        )
        return found[::-1]

    def assert_stays(self) -> None:
        """Nothing has moved since the mark, and nothing does, until somebody starts it."""
        statuses = self.watch()
        assert {status['mode'] for status in statuses} == {'stopped'}
        assert self.arm.moved().max() <= STAYS_RAD


@pytest.fixture(scope='module')
def shared() -> Iterator[Bench]:
    with graph() as made:
        yield Bench(made)


@pytest.fixture
def made(shared: Bench) -> Iterator[Callable[..., Bench]]:
    """Begins the shared bench for one test: rate of the joint states, replan interval."""

    def begin(rate_hz: float = 100.0, replan_interval: int = 8) -> Bench:
        shared.begin(rate_hz, replan_interval)
        return shared

    yield begin
    shared.arm.close()


@contextmanager
def publisher(
    bench: Bench,
    names: list[str],
    rate_hz: float = 100.0,
    positions: Callable[[], list[float]] | None = None,
) -> Iterator[list[int]]:
    """A node that publishes joints, zeros as `joint_state_publisher` does, and counts messages."""
    node = Node('joint_state_publisher', context=bench.graph.node.context)
    states = node.create_publisher(JointState, '/joint_states', 10)
    count = [0]

    def publish() -> None:
        numbers = [0.0] * len(names) if positions is None else positions()
        message = JointState(name=names, position=numbers)
        message.header.stamp = ns_to_stamp(node.get_clock().now().nanoseconds)
        states.publish(message)
        count[0] += 1

    node.create_timer(1.0 / rate_hz, publish)
    executor = SingleThreadedExecutor(context=node.context)
    executor.add_node(node)
    ended = False

    def spin() -> None:
        while not ended:
            executor.spin_once(timeout_sec=0.05)

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended = True
        thread.join()
        executor.shutdown()
        node.destroy_node()


# Drivers publish joint states at such rates.
RATES = pytest.mark.parametrize('rate_hz', thorough_but([500.0], [10.0, 500.0]))
INTERVALS = pytest.mark.parametrize('replan_interval', [1, 25])


# ---------------------------------------------------------------- two publishers of one joint


def near(bench: Bench) -> list[float]:
    """Positions that the arm could be at: only by its publisher is such a message known."""
    return [float(position) + 0.01 for position in bench.arm.positions]


@RATES
def test_two_publishers_of_the_same_joints_refuse_the_start_and_are_both_named(
    made: Callable[..., Bench], rate_hz: float
) -> None:
    bench = made(rate_hz)
    with publisher(bench, list(JOINT_NAMES)) as count:
        bench.graph.wait_for(lambda: count[0] > 20, 'two publishers')
        bench.wait_for_status('a status', lambda s: True)
        answer = bench.call('start')
        assert not answer.success
        assert 'joint_state_publisher' in answer.message and '/test' in answer.message
        assert not bench.arm.commands
    # Once one of them has ended the robot may start.
    bench.move()


@RATES
def test_two_publishers_that_hardly_differ_stop_the_robot_and_refuse_the_start_as_well(
    made: Callable[..., Bench], rate_hz: float
) -> None:
    bench = made(rate_hz)
    bench.move()
    with publisher(bench, list(JOINT_NAMES), positions=lambda: near(bench)):
        status = bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
        assert status['reason'] == 'state_doubled'
        bench.arm.mark()
        bench.assert_stays()
        answer = bench.call('start')
        assert not answer.success and 'joint_state_publisher' in answer.message
    bench.move()


@pytest.mark.parametrize(('rate_hz', 'replan_interval'), [(10.0, 1), (100.0, 25), (500.0, 1)])
def test_a_second_publisher_stops_a_moving_robot_and_its_zeros_move_nothing(
    made: Callable[..., Bench], rate_hz: float, replan_interval: int
) -> None:
    bench = made(rate_hz, replan_interval)
    bench.move()
    elbow = bench.arm.positions[ELBOW]
    with publisher(bench, list(JOINT_NAMES)):
        status = bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
        bench.wait_for_status('their names', lambda s: 'joint_state_publisher' in s['text'])
        assert status['reason'] in ('state_doubled', 'state_implausible')
        bench.arm.mark()
        bench.assert_stays()
        assert not bench.call('start').success
    assert abs(bench.arm.positions[ELBOW] - elbow) <= STAYS_RAD


@RATES
def test_a_second_publisher_moves_no_stopped_robot(
    made: Callable[..., Bench], rate_hz: float
) -> None:
    bench = made(rate_hz)
    bench.move()
    bench.stop()
    bench.arm.mark()
    with publisher(bench, list(JOINT_NAMES), 10.0) as count:
        bench.graph.wait_for(lambda: count[0] > 20, 'zeros')
        bench.assert_stays()
        assert not bench.call('start').success
    bench.assert_stays()


def test_two_publishers_of_different_joints_go_on_working(made: Callable[..., Bench]) -> None:
    bench = made()
    bench.arm.names = list(JOINT_NAMES[:5])
    gripper = publisher(bench, ['gripper'], positions=lambda: [float(bench.arm.positions[5])])
    with gripper as count, publisher(bench, ['wheel_left', 'wheel_right']):
        bench.move()
        bench.graph.wait_for(lambda: count[0] > 100, 'two publishers')
        reasons = {status['reason'] for status in bench.watch()}
        assert not reasons & {'state_doubled', 'state_implausible'}
        bench.move()


# ---------------------------------------------------------------- moved by hand


@pytest.mark.parametrize(('rate_hz', 'stopped_by'), [(10.0, 'stop'), (500.0, 'motors off')])
def test_an_arm_that_was_guided_by_hand_while_stopped_stays_there_with_motors_on(
    made: Callable[..., Bench], rate_hz: float, stopped_by: str
) -> None:
    bench = made(rate_hz)
    bench.move()
    if stopped_by == 'stop':
        bench.stop()
    bench.arm.follows = False
    bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
    for by in (BY_HAND, -0.4 * BY_HAND):
        bench.arm.guide(by)
        bench.graph.wait_for(
            lambda: np.abs(bench.arm.latch - bench.arm.positions).max() <= STAYS_RAD,
            'a hold that was taken along',
        )
    bench.wait_for_silence()
    bench.arm.mark()
    bench.arm.follows = True
    bench.assert_stays()
    bench.move()


@RATES
def test_an_arm_that_was_moved_while_its_states_were_away_stays_there_when_they_are_back(
    made: Callable[..., Bench], rate_hz: float
) -> None:
    bench = made(rate_hz)
    bench.move()
    bench.arm.follows, bench.arm.silent = False, True
    bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
    bench.arm.guide(BY_HAND)
    bench.arm.power_on()
    bench.assert_stays()
    bench.move()


# ---------------------------------------------------------------- outages


@pytest.mark.parametrize(('rate_hz', 'replan_interval'), [(10.0, 1), (100.0, 25), (500.0, 8)])
def test_after_a_long_outage_of_states_nothing_moves_before_a_start(
    made: Callable[..., Bench], rate_hz: float, replan_interval: int
) -> None:
    bench = made(rate_hz, replan_interval)
    bench.move()
    bench.arm.follows, bench.arm.silent = False, True
    bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
    # A command of before would be taken for the answer to the first joint state.
    bench.wait_for_silence()
    bench.arm.power_on()
    bench.assert_stays()
    bench.move()


@INTERVALS
def test_after_a_long_silence_of_the_policy_nothing_moves_before_a_start(
    made: Callable[..., Bench], replan_interval: int
) -> None:
    bench = made(100.0, replan_interval)
    bench.move()
    bench.arm.answers = False
    bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
    bench.arm.mark()
    bench.arm.answers = True
    bench.assert_stays()
    bench.move()


# ---------------------------------------------------------------- false readings


def zero_elbow(message: JointState) -> JointState:
    message.position[ELBOW] = 0.0
    return message


@pytest.mark.parametrize(
    ('rate_hz', 'samples'),
    thorough_after(3, [(10.0, 1), (100.0, 50), (500.0, 30), (10.0, 5), (100.0, 1), (100.0, 30)]),
)
def test_false_readings_move_no_stopped_robot(
    made: Callable[..., Bench], rate_hz: float, samples: int
) -> None:
    bench = made(rate_hz)
    bench.move()
    bench.stop()

    def refused() -> bool:
        # A queue of five states loses all of them while the executor waits for a processor.
        bench.arm.glitch(samples, zero_elbow)
        bench.assert_stays()
        return any(int(status['states_implausible']) for status in bench.statuses('tick'))

    bench.graph.wait_for(refused, 'readings that were refused')


@pytest.mark.parametrize(
    ('rate_hz', 'replan_interval', 'samples'),
    thorough_after(
        3,
        [
            (10.0, 1, 1),
            (100.0, 25, 50),
            (500.0, 1, 5),
            (10.0, 25, 30),
            (100.0, 1, 30),
            (500.0, 25, 1),
        ],
    ),
)
def test_false_readings_move_no_joint_of_a_moving_robot_towards_them(
    made: Callable[..., Bench], rate_hz: float, replan_interval: int, samples: int
) -> None:
    bench = made(rate_hz, replan_interval)
    bench.move()
    bench.arm.glitch(samples, zero_elbow)
    statuses = bench.watch()
    # The policy leaves the elbow where it is.
    assert bench.arm.moved()[ELBOW] <= STAYS_RAD
    # Where the reading stayed for half a second it needs a person; a short one heals alone.
    if samples / rate_hz < 0.4:
        doubted = [status for status in statuses if status['reason'] == 'state_implausible']
        assert {status['mode'] for status in doubted} <= {'running'}
    bench.move()


@RATES
def test_a_reading_that_is_one_turn_off_moves_nothing_and_keeps_the_robot_from_starting(
    made: Callable[..., Bench], rate_hz: float
) -> None:
    bench = made(rate_hz)
    bench.move()
    bench.stop()

    def turn(message: JointState) -> JointState:
        message.position[ROLL] += 2.0 * math.pi
        return message

    bench.arm.mark()
    bench.arm.change, bench.arm.false_samples = turn, 10**6
    bench.assert_stays()
    answer = bench.call('start')
    assert not answer.success and JOINT_NAMES[ROLL] in answer.message
    bench.arm.false_samples = 0
    bench.assert_stays()
    bench.move()
