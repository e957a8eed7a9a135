"""Joint states and poses on their way to the core: whose they are, and which of their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import rclpy
from geometry_msgs.msg import PoseStamped
from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import JointState
from thorough import thorough_after
from twist_robot import BOX, ROBOT, SPEC

from vla_runtime.execution.plausibility import DoubledJoints
from vla_runtime.messages.trajectories import ns_to_stamp
from vla_runtime.nodes.executor.robot_link import PublisherStreams, RobotLink, _StateTaker
from vla_runtime.nodes.executor.setup import measured_columns
from vla_runtime.nodes.qos import MessageStamps
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot
from vla_runtime.robot.schema import JointStateTopic

ARM, GRIPPER = ('shoulder', 'elbow'), ('gripper',)
WHEELS = ('left', 'right')
NAMES = (*ARM, *GRIPPER)
PERIOD_NS = 10_000_000


class Topic:
    """One topic's messages, up to the core's verdict."""

    def __init__(self) -> None:
        self.streams = PublisherStreams()
        self.doubled = DoubledJoints(NAMES)
        self.messages = 0

    def take(self, number: int, joints: tuple[str, ...]) -> int:
        name = self.streams.name_of(number, joints)
        target = np.array(
            [NAMES.index(joint) for joint in joints if joint in NAMES], dtype=np.int64
        )
        self.messages += 1
        if len(target):
            self.doubled.observe(target, f'topic#{name}', self.messages * PERIOD_NS)
        return name

    @property
    def found(self) -> bool:
        return self.doubled.until_ns > 0


def play(
    topic: Topic,
    publishers: Sequence[tuple[int, tuple[str, ...]]],
    rounds: int,
    random: np.random.Generator,
    lost: float,
) -> None:
    """Let publishers send at one rate, in an order that changes; some messages are lost."""
    numbers = [first for first, _ in publishers]
    for _ in range(rounds):
        for at in random.permutation(len(publishers)):
            if random.random() >= lost:
                topic.take(numbers[at], publishers[at][1])
            numbers[at] += 1


@pytest.mark.parametrize('lost', [0.0, 0.05])
@pytest.mark.parametrize('seed', thorough_after(10, range(200)))
def test_publishers_of_different_joints_with_the_same_numbers_are_no_two_of_one_joint(
    seed: int, lost: float
) -> None:
    topic, random = Topic(), np.random.default_rng(seed)
    # As nodes of one launch have them: at most a few messages apart.
    firsts = random.integers(1, 4, 3).tolist()
    play(topic, list(zip(firsts, (ARM, GRIPPER, WHEELS), strict=True)), 2_000, random, lost)
    assert not topic.found


@pytest.mark.parametrize('apart', [0, 1, 500])
@pytest.mark.parametrize('other', [NAMES, NAMES[::-1], ('elbow', 'wheel')])
def test_two_publishers_of_a_joint_are_found_whatever_their_numbers_are(
    apart: int, other: tuple[str, ...]
) -> None:
    topic, random = Topic(), np.random.default_rng(0)
    play(topic, [(100, NAMES), (100 + apart, other)], 10, random, 0.0)
    assert topic.found


def test_one_publisher_that_sends_its_joints_by_turns_is_one() -> None:
    topic = Topic()
    names = {topic.take(number, (NAMES, ARM, GRIPPER)[number % 3]) for number in range(1, 300)}
    assert len(names) == 1
    assert not topic.found


def test_a_driver_that_was_started_again_is_another_publisher_and_no_second_one() -> None:
    topic = Topic()
    first = {topic.take(number, NAMES) for number in range(400, 500)}
    second = {topic.take(number, NAMES) for number in range(1, 100)}
    assert len(first) == len(second) == 1 and first != second
    assert not topic.found


@pytest.mark.parametrize('seed', range(10))
def test_a_publisher_of_efforts_alone_is_no_second_one_of_positions(seed: int) -> None:
    topic, random = Topic(), np.random.default_rng(seed)
    source = JointStateTopic('joint_states')

    def take(names: Sequence[str], positions: Sequence[float], stamp_ns: int, name: str) -> None:
        if len(positions):
            topic.doubled.observe(np.arange(len(names)), name, stamp_ns)

    stamps = MessageStamps(None, 'header')  # type: ignore[arg-type]
    taker = _StateTaker(take, {name: name for name in ARM}, 'topic', stamps, source, ())
    for number in range(2000):
        for position in random.permutation(2):
            if random.random() < 0.95:
                values = {'position' if position else 'effort': [0.0, 0.0]}
                message = JointState(name=list(ARM), **values)
                message.header.stamp = ns_to_stamp(number * PERIOD_NS)
                taker(message, {'publication_sequence_number': number})
    assert not topic.found


# ---------------------------------------------------------------- the measured pose of a twist


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


@pytest.mark.graph
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
