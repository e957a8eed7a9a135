"""`vla.launch.py` brings policy and executor up, with its arguments in force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    'launch_pytest', reason='launch_pytest comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)

import launch_pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, graph
from launch import LaunchDescription
from launch.actions import RegisterEventHandler
from launch.event_handlers import OnProcessStart
from launch_pytest.actions import ReadyToTest
from launch_robot import FollowingRobot, write_files
from launch_tools import included, newest_values, start_motion, wait_active
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

pytestmark = pytest.mark.graph

BEST_EFFORT, RELIABLE = ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE
VOLATILE, LATCHED = DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL
TRAJECTORY = 'trajectory_msgs/msg/JointTrajectory'
DIAGNOSTICS = 'diagnostic_msgs/msg/DiagnosticArray'
POLICY, EXECUTOR = 'vla_policy', 'vla_executor'
# Topic, type, reliability, durability and node; what docs/reference/topics.md and the robot file
# say.
PUBLISHED = (
    ('action_chunk', TRAJECTORY, RELIABLE, VOLATILE, POLICY),
    ('committed_plan', TRAJECTORY, RELIABLE, VOLATILE, EXECUTOR),
    ('arm/joint_trajectory', TRAJECTORY, RELIABLE, VOLATILE, EXECUTOR),
    ('gripper/rate', 'std_msgs/msg/Float64MultiArray', RELIABLE, VOLATILE, EXECUTOR),
    ('vla_policy/report', DIAGNOSTICS, RELIABLE, VOLATILE, POLICY),
    ('vla_executor/report', DIAGNOSTICS, RELIABLE, VOLATILE, EXECUTOR),
    ('vla_policy/current_instruction', 'std_msgs/msg/String', RELIABLE, LATCHED, POLICY),
)
SUBSCRIBED = (
    ('top/image', 'sensor_msgs/msg/Image', BEST_EFFORT, VOLATILE, POLICY),
    ('wrist/image', 'sensor_msgs/msg/CompressedImage', BEST_EFFORT, VOLATILE, POLICY),
    ('joint_states', 'sensor_msgs/msg/JointState', BEST_EFFORT, VOLATILE, POLICY),
    ('joint_states', 'sensor_msgs/msg/JointState', BEST_EFFORT, VOLATILE, EXECUTOR),
    ('committed_plan', TRAJECTORY, BEST_EFFORT, VOLATILE, POLICY),
    ('action_chunk', TRAJECTORY, BEST_EFFORT, VOLATILE, EXECUTOR),
    ('vla_policy/instruction', 'std_msgs/msg/String', RELIABLE, LATCHED, POLICY),
)


@dataclass
class Running:
    """One graph, the robot on it, and what the nodes report."""

    peer: Graph
    robot: FollowingRobot
    policy_reports: list[DiagnosticArray]
    executor_reports: list[DiagnosticArray]

    def next_inference(self) -> dict[str, str]:
        """The report of an inference that ends from now on."""
        return self._next(self.policy_reports, '/vla_policy: inference report')

    def next_seam(self) -> dict[str, str]:
        """The report of a chunk that takes over from now on."""
        return self._next(self.executor_reports, '/vla_executor: seam')

    def _next(self, reports: list[DiagnosticArray], name: str) -> dict[str, str]:
        reports.clear()
        return self.peer.wait_for(lambda: newest_values(reports, name), name)


@pytest.fixture(scope='module')
def started() -> list[str]:
    """Names of the processes in the order in which launch started them."""
    return []


@launch_pytest.fixture(scope='module')
def both(tmp_path_factory: pytest.TempPathFactory, started: list[str]) -> LaunchDescription:
    files = write_files(tmp_path_factory.mktemp('launch'))
    arguments = files.arguments(instruction='wave', replan_interval='4', cfg_beta='1.5')
    note = OnProcessStart(on_start=lambda event, _: started.append(event.process_name))
    return LaunchDescription(
        [RegisterEventHandler(note), included('vla.launch.py', **arguments), ReadyToTest()]
    )


@pytest.fixture(scope='module')
def running(both: Any) -> Iterator[Running]:
    with graph() as peer:
        robot = FollowingRobot(peer)
        yield Running(
            peer,
            robot,
            peer.collect(DiagnosticArray, 'vla_policy/report'),
            peer.collect(DiagnosticArray, 'vla_executor/report'),
        )


@pytest.fixture
def moving(running: Running) -> Running:
    wait_active(running.peer, '/vla_policy', '/vla_executor')
    if not running.robot.moves:
        start_motion(running.peer)
        running.peer.wait_for(lambda: running.robot.moves, 'motion')
    return running


# ---------------------------------------------------------------- bring-up


@pytest.mark.launch(fixture=both)
def test_the_policy_is_started_before_the_executor(running: Running, started: list[str]) -> None:
    running.peer.wait_for(lambda: len(started) == 2, 'two processes')
    assert [name.rpartition('-')[0] for name in started] == ['policy_node', 'executor_node']


@pytest.mark.launch(fixture=both)
def test_nothing_is_commanded_before_start_and_then_the_measured_position(
    running: Running,
) -> None:
    wait_active(running.peer, '/vla_policy', '/vla_executor')
    robot = running.robot
    before = robot.position()
    assert not robot.arm and not robot.gripper
    start_motion(running.peer)
    # The first messages that these publishers ever sent.
    running.peer.wait_for(lambda: robot.arm and robot.gripper, 'a command')
    assert np.allclose(robot.arm[0], before, atol=1e-6)
    assert robot.gripper[0] == 0.0


# ---------------------------------------------------------------- topics


@pytest.mark.launch(fixture=both)
@pytest.mark.parametrize('row', PUBLISHED, ids=lambda row: row[0])
def test_a_topic_is_published_as_the_pages_say(moving: Running, row: tuple[Any, ...]) -> None:
    topic, *wanted = row
    require(moving, moving.peer.node.get_publishers_info_by_topic, topic, wanted)


@pytest.mark.launch(fixture=both)
@pytest.mark.parametrize('row', SUBSCRIBED, ids=lambda row: f'{row[0]}-{row[-1]}')
def test_a_topic_is_subscribed_as_the_pages_say(moving: Running, row: tuple[Any, ...]) -> None:
    topic, *wanted = row
    require(moving, moving.peer.node.get_subscriptions_info_by_topic, topic, wanted)


def require(running: Running, ends: Any, topic: str, wanted: list[Any]) -> None:
    """Wait until the node's end of a topic is discovered, and compare it."""
    node = wanted[-1]
    (end,) = running.peer.wait_for(
        lambda: [end for end in ends(f'/{topic}') if end.node_name == node], f'{topic} of {node}'
    )
    qos = end.qos_profile
    assert [end.topic_type, qos.reliability, qos.durability, end.node_name] == wanted


@pytest.mark.launch(fixture=both)
def test_the_arguments_are_in_force(moving: Running) -> None:
    inference = moving.next_inference()
    assert (inference['beta'], inference['instruction']) == ('1.5', 'wave')
    assert float(inference['parameter.max_observation_age_s']) == 5.0
    assert moving.next_seam()['parameter.replan_interval'] == '4'
