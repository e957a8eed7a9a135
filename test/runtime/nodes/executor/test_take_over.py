"""A person takes the robot over: who may command, how it is released, and how it is taken back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rclpy
from executor_bench import TABLETOP, Bench
from graph import Graph, graph
from rclpy.node import Node
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from vla_runtime.nodes.executor import command_watch
from vla_runtime.nodes.executor.command_watch import CommandWatch, OwnPublisher, WatchedTopic
from vla_runtime.nodes.executor.robot_link import _full_name
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

TOPIC = 'arm_controller/joint_trajectory'
# A step of the leader arm, rad a message.
STEP_RAD = 0.002


@pytest.fixture(scope='module')
def shared(bundle: Path) -> Iterator[Bench]:
    with graph() as made:
        bench = Bench(made, bundle, '/taken')
        yield bench
        bench.arm.close()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.begin()
    return shared


class Leader:
    """A teleoperation node: it has its publisher all the time, and sends while it is asked to."""

    def __init__(self, bench: Bench, name: str = 'leader') -> None:
        self.name = name
        self._bench = bench
        self._node = rclpy.create_node(name, context=bench.graph.node.context)
        self._publisher = self._node.create_publisher(
            JointTrajectory, f'{bench.node.rpartition("/")[0]}/{TOPIC}', 10
        )
        bench.graph.wait_for(
            lambda: self._publisher.get_subscription_count() >= 2,
            'the arm and the executor to hear the leader',
        )

    def send(self) -> None:
        """One small step from where the arm is."""
        positions = (self._bench.arm.positions[:5] - STEP_RAD).tolist()
        point = JointTrajectoryPoint(positions=positions)
        self._publisher.publish(
            JointTrajectory(joint_names=['of the leader', *JOINT_NAMES[1:5]], points=[point])
        )

    def close(self) -> None:
        self._node.destroy_node()


@contextmanager
def leader(bench: Bench, name: str = 'leader') -> Iterator[Leader]:
    made = Leader(bench, name)
    try:
        yield made
    finally:
        made.close()


def of_executor(bench: Bench) -> list[JointTrajectory]:
    """Commands that the arm got from the executor."""
    return [one for one in list(bench.arm.commands) if one.joint_names[0] != 'of the leader']


def in_motion(bench: Bench) -> None:
    bench.start()
    bench.move()


def is_silent(status: dict[str, Any]) -> bool:
    return status['reason'] == 'released' and status['kind'] == 'idle'


def assert_nothing_is_published(bench: Bench, meanwhile: Callable[[], None] | None = None) -> None:
    """The count of sent commands stays, over five statuses and whatever is done meanwhile."""
    sent = bench.wait_for_status('silence', is_silent, meanwhile=meanwhile)['sent']
    before = len(of_executor(bench))
    bench.diagnostics.clear()
    later = bench.graph.wait_for(
        lambda: (found := list(bench.statuses()))[4:] and found[0],
        'five statuses',
        meanwhile=meanwhile,
    )
    assert (later['sent'], later['reason']) == (sent, 'released')
    assert len(of_executor(bench)) == before


def test_a_node_that_sends_has_the_robot_and_is_named(bench: Bench) -> None:
    with leader(bench) as person:
        # Its publisher alone is no reason, and one message is enough.
        in_motion(bench)
        person.send()
        status = bench.wait_for_status('the release', is_silent)
        assert (status['mode'], status['level']) == ('stopped', 1)
        assert '/leader ' in status['detail'] and f'/taken/{TOPIC}' in status['detail']
        before = bench.arm.positions[:5].copy()
        assert_nothing_is_published(bench, meanwhile=person.send)
        # And the arm goes where the person leads it.
        assert (bench.arm.positions[:5] < before).all()


def test_no_start_while_it_sends_and_afterwards_one_from_where_the_arm_is(bench: Bench) -> None:
    with leader(bench) as person:
        in_motion(bench)
        bench.wait_for_status('the release', is_silent, meanwhile=person.send)
        for _ in range(50):
            person.send()
        person.send()
        refused = bench.call('start')
        assert not refused.success
        assert '/leader ' in refused.message and 'shared_with' in refused.message
        bench.arm.commands.clear()
        bench.graph.wait_for(lambda: bench.call('start').success, 'a start')
        # It is there still, and sends nothing.
        bench.graph.wait_for(lambda: of_executor(bench), 'a command')
        first = of_executor(bench)[0].points
        for point in first:
            assert np.allclose(point.positions, bench.arm.positions[:5], atol=1e-9)
        bench.wait_for_status('running', lambda s: s['mode'] == 'running')


def test_release_comes_to_rest_publishes_nothing_and_start_takes_the_robot_back(
    bench: Bench,
) -> None:
    in_motion(bench)
    assert bench.call('release').success
    assert_nothing_is_published(bench)
    assert bench.status()['level'] == 0
    last = bench.arm.commanded()[-1], bench.arm.commanded()[-2]
    assert np.array_equal(*last), 'the last command moved'
    # By hand, within what a start would have taken for the old hold.
    bench.arm.positions[:5] += 0.1
    there = bench.arm.positions[:5].copy()
    bench.arm.commands.clear()
    # Statuses are ten times as rare as joint states.
    for _ in range(2):
        bench.wait_for_status('a later status', is_silent)
    bench.graph.wait_for(lambda: bench.call('start').success, 'a start')
    bench.graph.wait_for(lambda: bench.arm.commands, 'a command')
    assert np.allclose(bench.arm.commanded()[0], there, atol=1e-9)


def test_release_before_a_start_and_of_an_inactive_node_is_answered(bench: Bench) -> None:
    assert bench.call('release').success
    bench.wait_for_status('a status', lambda s: s['reason'] == 'not_started')
    assert bench.graph.transition(bench.node, 'deactivate')
    assert bench.call('release').success


def test_a_dry_run_goes_on_beside_a_node_that_sends(bench: Bench) -> None:
    bench.wait_for_status('activity', lambda s: s['mode'] == 'idle')
    assert bench.graph.set_parameter(bench.node, 'dry_run', True).successful
    try:
        with leader(bench) as person:
            bench.wait_for_status('the dry run', lambda s: s['dry_run'] == 'true')
            bench.graph.wait_for(
                lambda: bench.call('start').success, 'a start', meanwhile=person.send
            )
            bench.graph.wait_for(lambda: bench.arm.plans, 'a request', meanwhile=person.send)
            bench.arm.answer(0)
            status = bench.wait_for_status(
                'a dry run', lambda s: s['kind'] == 'track', meanwhile=person.send
            )
            assert (status['mode'], status['sent']) == ('running', '0')
    finally:
        assert bench.graph.set_parameter(bench.node, 'dry_run', False).successful


def test_a_node_that_the_robot_file_names_may_send_too(bundle: Path, tmp_path: Path) -> None:
    assert TABLETOP.count(f'topic: {TOPIC}\n') == 1
    named = f'topic: {TOPIC}\n    shared_with: [/leader, home]\n'
    robot = tmp_path / 'shared.yaml'
    robot.write_text(TABLETOP.replace(f'topic: {TOPIC}\n', named), encoding='utf-8')
    with graph() as made:
        bench = Bench(made, bundle, '/named', '-p', f'robot:={robot}')
        bench.begin()
        with leader(bench) as allowed:
            for _ in range(20):
                allowed.send()
            in_motion(bench)
            number = itertools.count(1)

            def send_and_answer() -> None:
                allowed.send()
                bench.arm.answer(next(number))

            status = bench.wait_for_status(
                'steps', lambda s: int(s['steps']) > 10, meanwhile=send_and_answer
            )
            assert status['mode'] == 'running'
            with leader(bench, 'stranger') as stranger:
                status = bench.wait_for_status('the release', is_silent, meanwhile=stranger.send)
                assert '/stranger ' in status['detail'] and '/leader' not in status['detail']
        bench.process.stop()
        bench.arm.close()


# ---------------------------------------------------------------- telling messages apart


class Watched:
    """A watch in this process on a topic with a publisher of its own and one of another node."""

    def __init__(self, made: Graph, *shared_with: str) -> None:
        self.graph, node = made, made.node
        self.own_publisher = node.create_publisher(Float64MultiArray, '/watched', 1)
        self.own = OwnPublisher(self.own_publisher)
        topic = WatchedTopic(
            'watched', '/watched', Float64MultiArray, self.own, frozenset(shared_with)
        )
        self.watch = CommandWatch(node, [topic])
        self.heard: list[tuple[str, str]] = []
        self.errors: list[tuple[str, Exception]] = []
        self.arrived = made.collect(Float64MultiArray, '/watched')
        self.watch.listen(
            lambda *said: self.heard.append(said), lambda *said: self.errors.append(said)
        )
        made.wait_for(lambda: self.own_publisher.get_subscription_count() >= 2, 'own listeners')


def other(made: Graph, name: str) -> tuple[Node, Any]:
    node = rclpy.create_node(name, context=made.node.context)
    publisher = node.create_publisher(Float64MultiArray, '/watched', 10)
    made.wait_for(lambda: publisher.get_subscription_count() >= 2, 'listeners')
    return node, publisher


def test_of_thousands_of_own_messages_none_is_taken_for_another_nodes() -> None:
    with graph() as made:
        watched = Watched(made)
        for number in range(3000):
            watched.own.publish(Float64MultiArray(data=[float(number)]))
            # Never further ahead of the listener than a control loop gets.
            if number % 100 == 99:
                made.wait_for(
                    lambda number=number: (
                        watched.arrived and watched.arrived[-1].data[0] == float(number)
                    ),
                    'the last one so far',
                )
        assert (watched.heard, watched.errors) == ([], [])
        # The same numbers from another node are another node's.
        node, publisher = other(made, 'stranger')
        publisher.publish(Float64MultiArray(data=[2999.0]))
        made.wait_for(lambda: watched.heard, 'the other node')
        assert watched.heard[0] == ('watched', '/stranger sends commands on /watched')
        assert watched.watch.senders() == '/stranger sends commands on /watched'
        made.wait_for(lambda: not watched.watch.senders(), 'quiet')
        node.destroy_node()
        watched.heard.clear()
        node, publisher = other(made, made.node.get_name())
        publisher.publish(Float64MultiArray())
        made.wait_for(lambda: watched.heard, 'the twin')
        assert 'another node of the same name' in watched.heard[0][1]
        watched.watch.ignore()
        node.destroy_node()


def test_of_two_messages_that_were_sent_during_one_publish_one_is_another_nodes() -> None:
    """A busy machine may leave the executor waiting in the middle of a publish."""
    stamps: list[int] = []

    class Waiting:
        def publish(self, msg: Any) -> None:
            stamps.extend(time.time_ns() for _ in range(2))

    own = OwnPublisher(Waiting())
    own.publish(None)
    assert [own.claim(stamp) for stamp in stamps] == [True, False]


def test_where_rclpy_does_not_say_when_a_message_was_sent_whoever_may_send_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Humble's: `~/start` is refused beside a publisher, but for those that the file names."""
    monkeypatch.setattr(command_watch, 'TELLS_INFO', False)
    with graph() as made:
        publishers = [other_alone(made, name) for name in ('leader', 'stranger')]
        own = OwnPublisher(made.node.create_publisher(Float64MultiArray, '/watched', 1))
        topic = WatchedTopic('watched', '/watched', Float64MultiArray, own, frozenset(['/leader']))
        watch = CommandWatch(made.node, [topic])
        watch.listen(pytest.fail, pytest.fail)
        made.wait_for(lambda: '/stranger may send' in watch.senders(), 'the stranger')
        assert '/leader' not in watch.senders()
        publishers[1].destroy_node()
        made.wait_for(lambda: not watch.senders(), 'nobody but the leader')
        publishers[0].destroy_node()


def other_alone(made: Graph, name: str) -> Node:
    node = rclpy.create_node(name, context=made.node.context)
    node.create_publisher(Float64MultiArray, '/watched', 10)
    return node


def test_a_relative_name_is_in_the_nodes_own_namespace() -> None:
    node: Any = SimpleNamespace(get_namespace=lambda: '/left')
    assert [_full_name(node, name) for name in ('home', '/home')] == ['/left/home', '/home']
