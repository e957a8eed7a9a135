"""The measured pose of a twist: which of its numbers reach the executor, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import rclpy
from geometry_msgs.msg import PoseStamped
from rclpy.lifecycle import LifecycleNode
from twist_robot import BOX, ROBOT, SPEC

from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.nodes.executor.robot_link import RobotLink
from vla_runtime.nodes.executor.setup import measured_columns
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot

pytestmark = pytest.mark.graph


@pytest.fixture
def node() -> Iterator[LifecycleNode]:
    rclpy.init()
    try:
        made = LifecycleNode('link', namespace='left')
        yield made
        made.destroy_node()
    finally:
        rclpy.shutdown()


def pose(frame: str) -> PoseStamped:
    message = PoseStamped()
    message.header.frame_id = frame
    message.header.stamp = ns_to_stamp(1_500_000_000)
    place = message.pose.position
    place.x, place.y, place.z = 0.4, 0.1, 0.3
    return message


def test_a_pose_in_the_boxs_frame_is_the_measured_position(
    node: LifecycleNode, tmp_path: Path
) -> None:
    path = tmp_path / 'cart.yaml'
    box = BOX.replace('lower: [0.2,', 'lower: [-1e9,').replace('upper: [0.7,', 'upper: [1e9,')
    text = ROBOT.replace('UNIT', 'm').replace('KIND', 'twist_stamped')
    path.write_text(text.replace('BOX', f'{box} topic: tcp_pose,'))
    robot = load_robot(path)
    match = match_robot(robot, SPEC, 'bundle')
    link = RobotLink(node, robot, match, lambda name, error: None)
    taken: list[tuple[object, ...]] = []
    (tool,) = match.tools
    sources = {one.name: one.measured_as for one in measured_columns(match)}
    assert {sources[name] for name in tool.columns} == {tool.topic}
    take = link._pose_taker(lambda *given: taken.append(given), match.tools[0])
    take(pose('/base'))
    assert taken == [(('vy', 'vz'), [0.1, 0.3], 1_500_000_000, '/left/tcp_pose')]
    take(pose('tool0'))
    assert len(taken) == 1
    assert "'tool0'" in link.state_faults(2_000_000_000, 10.0) and "'base'" in link.state_faults(
        2_000_000_000, 10.0
    )
    take(pose('base'))
    assert len(taken) == 2 and "'tool0'" not in link.state_faults(2_000_000_000, 10.0)
    link.close()
