"""A robot that is stopped or holds stays where it is, whatever its joint states say.

One of each kind of fault that people met: a second node that publishes the same joints, an arm that
was guided by hand while it was stopped or without power, joint states that were away for long, and
false readings. The arm follows its last command, as servos do. `execution/test_stopped_robot` and
`execution/test_who_is_believed` have all that may be read, and of a moving robot too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from executor_bench import ExecutorProcess, Status
from graph import Graph, graph
from latched_arm import LatchedArm
from paths import ROOT
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import JointState
from thorough import thorough_after, thorough_but

from vla_runtime.messages.trajectories import ns_to_stamp
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

# `hold_follows` of the tabletop robot, which gives none; and rounding.
STAYS_RAD = 0.05 + 1e-6
# Statuses that show that nothing goes on; they come five times a second.
_STATUSES = 8
ELBOW = JOINT_NAMES.index('elbow_flex')
BY_HAND = np.array([-1.0, 0.0, 0.0, -1.0, 0.0, 0.0])


class Bench(ExecutorProcess):
    """An executor with the demo's policy file, and an arm that follows its latch."""

    def __init__(self, made: Graph) -> None:
        age = ('-p', 'max_state_age_s:=0.5')
        super().__init__(made, ROOT / 'engines' / 'demo', '', *age, robot='tabletop')

    def begin(self, rate_hz: float, replan_interval: int) -> None:
        """Activate it beside a new arm."""
        self.become_inactive()
        self.arm = LatchedArm(self.graph, '', rate_hz)
        assert self.graph.transition(self.node, 'activate')
        changed = self.graph.set_parameter(self.node, 'replan_interval', replan_interval)
        assert changed.successful, changed.reason

    def move(self) -> None:
        """Start it, and see it move; again where a machine that is far too busy stops it."""
        self.diagnostics.clear()
        self.arm.mark()

        def moves() -> bool:
            status = next(self.statuses(), None)
            if status is not None and status['mode'] != 'running':
                self.call('start')
                self.diagnostics.clear()
            return bool(self.arm.moved().max() > 0.1)

        self.graph.wait_for(moves, 'motion')

    def stop(self) -> None:
        """Stop it, and wait until it is at rest and sent nothing more."""
        assert self.call('stop').success
        self.wait_for_status('the stop', lambda s: s['reason'] == 'stopped')
        self.wait_for_silence()

    def wait_for_silence(self) -> None:
        """Wait until nothing was sent between two statuses."""
        self.diagnostics.clear()

        def silent() -> bool:
            sent = [status['sent'] for status in self.statuses()]
            return len(sent) >= 2 and sent[0] == sent[1]

        self.graph.wait_for(silent, 'an executor that sends nothing')

    def watch(self) -> list[Status]:
        """Statuses of the next moments, oldest first."""
        self.diagnostics.clear()
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


# ---------------------------------------------------------------- two publishers of one joint


def near(bench: Bench) -> list[float]:
    """Positions that the arm could be at: only by its publisher is such a message known."""
    return [float(position) + 0.01 for position in bench.arm.positions]


def test_two_publishers_of_the_same_joints_refuse_the_start_and_are_both_named(
    made: Callable[..., Bench],
) -> None:
    bench = made(500.0)
    with publisher(bench, list(JOINT_NAMES)) as count:
        bench.graph.wait_for(lambda: count[0] > 20, 'two publishers')
        bench.wait_for_status('a status', lambda s: True)
        answer = bench.call('start')
        assert not answer.success
        assert 'joint_state_publisher' in answer.message and '/test' in answer.message
        assert not bench.arm.commands
    # Once one of them has ended the robot may start.
    bench.move()


@pytest.mark.parametrize('hardly_differs', [False, True])
@pytest.mark.parametrize(
    ('rate_hz', 'replan_interval'), thorough_but([(500.0, 1)], [(10.0, 1), (100.0, 25), (500.0, 1)])
)
def test_a_second_publisher_stops_a_moving_robot_and_moves_nothing(
    made: Callable[..., Bench], rate_hz: float, replan_interval: int, hardly_differs: bool
) -> None:
    bench = made(rate_hz, replan_interval)
    bench.move()
    elbow = bench.arm.positions[ELBOW]
    positions = partial(near, bench) if hardly_differs else None
    with publisher(bench, list(JOINT_NAMES), positions=positions):
        status = bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
        bench.wait_for_status('their names', lambda s: 'joint_state_publisher' in s['text'])
        # A reading that is near is wrong by its publisher alone.
        said = ('state_doubled',) if hardly_differs else ('state_doubled', 'state_implausible')
        assert status['reason'] in said
        bench.arm.mark()
        bench.assert_stays()
        assert not bench.call('start').success
    assert abs(bench.arm.positions[ELBOW] - elbow) <= STAYS_RAD


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


@pytest.mark.parametrize(
    ('rate_hz', 'stopped_by'),
    thorough_but([(500.0, 'motors off')], [(10.0, 'stop'), (500.0, 'motors off')]),
)
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


# ---------------------------------------------------------------- outages


@pytest.mark.parametrize(
    ('rate_hz', 'replan_interval', 'moved'),
    thorough_but([(100.0, 25, True)], [(10.0, 1, False), (100.0, 25, True), (500.0, 8, False)]),
)
def test_after_a_long_outage_of_states_nothing_moves_before_a_start(
    made: Callable[..., Bench], rate_hz: float, replan_interval: int, moved: bool
) -> None:
    bench = made(rate_hz, replan_interval)
    bench.move()
    bench.arm.follows, bench.arm.silent = False, True
    bench.wait_for_status('a stop', lambda s: s['mode'] == 'stopped')
    # A command of before would be taken for the answer to the first joint state.
    bench.wait_for_silence()
    if moved:
        bench.arm.guide(BY_HAND)
    bench.arm.power_on()
    bench.assert_stays()
    bench.move()


def test_after_a_long_silence_of_the_policy_nothing_moves_before_a_start(
    made: Callable[..., Bench],
) -> None:
    bench = made()
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
    thorough_after(1, [(100.0, 50), (10.0, 1), (500.0, 30), (10.0, 5), (100.0, 1)]),
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
