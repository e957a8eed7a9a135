"""Two robots in one launch, each in a namespace of its own, do not hear each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip(
    'launch_pytest', reason='launch_pytest comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)

import launch_pytest
from graph import LATCHED, Graph, graph
from launch import LaunchDescription
from launch_pytest.actions import ReadyToTest
from launch_robot import FollowingRobot, write_files
from launch_tools import included, start_motion, wait_active
from std_msgs.msg import String

pytestmark = pytest.mark.graph

TASKS = {'left': 'wave', 'cell/right': 'point'}


@launch_pytest.fixture(scope='module')
def two_robots(tmp_path_factory: pytest.TempPathFactory) -> LaunchDescription:
    files = write_files(tmp_path_factory.mktemp('launch'))
    runtimes = [
        included('vla.launch.py', **files.arguments(namespace=namespace, instruction=task))
        for namespace, task in TASKS.items()
    ]
    return LaunchDescription([*runtimes, ReadyToTest()])


@pytest.fixture(scope='module')
def peer(two_robots: Any) -> Iterator[Graph]:
    with graph() as made:
        yield made


@pytest.mark.launch(fixture=two_robots)
def test_only_the_robot_that_is_started_moves(peer: Graph) -> None:
    left, right = (FollowingRobot(peer, namespace) for namespace in TASKS)
    for namespace in TASKS:
        wait_active(peer, f'/{namespace}/vla_policy', f'/{namespace}/vla_executor')
    start_motion(peer, '/left/vla_executor')
    peer.wait_for(lambda: left.moves, 'motion of the left robot')
    # Chunks went round on the left side alone; the first command of the right one is its hold.
    assert not right.arm and not right.chunks and not right.plans
    start_motion(peer, '/cell/right/vla_executor')
    peer.wait_for(lambda: right.moves, 'motion of the right robot')


@pytest.mark.launch(fixture=two_robots)
@pytest.mark.parametrize('namespace', TASKS)
def test_each_policy_has_its_own_instruction(peer: Graph, namespace: str) -> None:
    node = f'/{namespace}/vla_policy'
    wait_active(peer, node)
    said = peer.collect(String, f'{node}/current_instruction', LATCHED)
    peer.wait_for(lambda: said, 'the instruction')
    assert said[0].data == TASKS[namespace]


@pytest.mark.launch(fixture=two_robots)
def test_no_relative_topic_of_a_node_is_outside_its_namespace(peer: Graph) -> None:
    for namespace in TASKS:
        wait_active(peer, f'/{namespace}/vla_policy', f'/{namespace}/vla_executor')
    of_all = {'/diagnostics', '/rosout', '/parameter_events'}
    for namespace in TASKS:
        for node in ('vla_policy', 'vla_executor'):
            ends = peer.node.get_publisher_names_and_types_by_node(node, f'/{namespace}')
            topics = {topic for topic, _ in ends} - of_all
            assert topics and all(topic.startswith(f'/{namespace}/') for topic in topics)
