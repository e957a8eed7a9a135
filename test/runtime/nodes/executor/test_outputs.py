"""Every kind of output carries exactly the command's numbers, tick after tick."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from rclpy.serialization import deserialize_message, serialize_message

from vla_runtime.bundle.schema import PoseSpec
from vla_runtime.nodes.executor.outputs import OutputWriter
from vla_runtime.nodes.executor.trajectory_message import TrajectoryController
from vla_runtime.nodes.output_types import message_type
from vla_runtime.robot.match import MatchedOutput, Scaling
from vla_runtime.robot.schema import RobotOutput

STAMP = Time(sec=7, nanosec=8)
needs_interbotix = pytest.mark.skipif(
    find_spec('interbotix_xs_msgs') is None,
    reason='interbotix_xs_msgs of Interbotix/interbotix_ros_core is not built and sourced here',
)


class Wire:
    """Keeps what a subscriber would get: the bytes at the moment of publishing."""

    def __init__(self, kind):
        self._type = message_type(kind)
        self.messages = []

    def publish(self, message):
        self.messages.append(deserialize_message(serialize_message(message), self._type))


def written(matched, *commands):
    wire = Wire(matched.output.kind)
    writer = OutputWriter(matched, wire, period_s=0.01)
    for command in commands:
        writer.send(np.array(command, dtype=np.float64), STAMP, follows=True)
    return wire.messages


def joint_output(kind, interface='position'):
    output = RobotOutput(kind=kind, topic='t', joints=('b', 'a'), interface=interface)
    return MatchedOutput(output, columns=(2, 0), message_names=('joint_b', 'joint_a'))


def pose(kind='absolute'):
    return PoseSpec(
        name='hand',
        position=('x', 'y', 'z'),
        rotation=('r', 's', 't'),
        form='axis_angle',
        kind=kind,
        frame='base',
    )


def test_joint_trajectory_goes_from_the_last_command_to_this_one_in_a_period():
    first, second = written(joint_output('joint_trajectory'), [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert list(first.joint_names) == ['joint_b', 'joint_a']
    assert [list(point.positions) for point in first.points] == [[3.0, 1.0], [3.0, 1.0]]
    assert [list(point.positions) for point in second.points] == [[3.0, 1.0], [6.0, 4.0]]
    due = [(point.time_from_start.sec, point.time_from_start.nanosec) for point in second.points]
    assert due == [(0, 0), (0, 10_000_000)]
    assert (first.header.stamp.sec, first.header.stamp.nanosec) == (0, 0)


@pytest.mark.parametrize(
    'controller',
    [None, TrajectoryController(0.004, True), TrajectoryController(0.004, False)],
)
def test_an_output_that_was_withheld_for_a_while_begins_where_the_robot_is(controller):
    wire = Wire('joint_trajectory')
    writer = OutputWriter(joint_output('joint_trajectory'), wire, period_s=0.01)
    writer.controller = controller

    def send(position, at_ms):
        stamp = Time(sec=1000 + at_ms // 1000, nanosec=at_ms % 1000 * 1_000_000)
        writer.send(np.full(3, position), stamp, follows=True)

    for tick in range(50):
        send(0.5 + 0.008 * tick, 10 * tick)
    moving = [point.positions[0] for point in wire.messages[-1].points]
    assert moving[0] < moving[-1]
    send(0.7, 2490)
    assert all(point.positions[0] == 0.7 for point in wire.messages[-1].points)
    # From there on it goes on as ever.
    send(0.71, 2500)
    assert {point.positions[0] for point in wire.messages[-1].points} >= {0.7, 0.71}


def test_joint_trajectory_goes_on_from_what_was_sent_unless_the_command_is_a_new_beginning():
    wire = Wire('joint_trajectory')
    writer = OutputWriter(joint_output('joint_trajectory'), wire, period_s=0.01)
    first, lost, third, anew = (np.full(3, number) for number in (1.0, 2.0, 3.0, 9.0))
    writer.send(first, STAMP, follows=True)
    publish, wire.publish = wire.publish, None
    with pytest.raises(TypeError):
        writer.send(lost, STAMP, follows=True)
    wire.publish = publish
    writer.send(third, STAMP, follows=True)
    writer.send(anew, STAMP, follows=False)
    positions = [[point.positions[0] for point in message.points] for message in wire.messages]
    assert positions == [[1.0, 1.0], [1.0, 3.0], [9.0, 9.0]]


def test_joint_trajectory_has_no_velocities_because_a_moving_end_is_refused():
    (message,) = written(joint_output('joint_trajectory'), [1.0, 2.0, 3.0])
    assert not any(point.velocities for point in message.points)


def test_float64_multi_array_is_in_the_outputs_order():
    first, second = written(joint_output('float64_multi_array'), [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert list(first.data) == [3.0, 1.0]
    assert list(second.data) == [6.0, 4.0]


@pytest.mark.parametrize('interface', ['position', 'velocity'])
def test_joint_state_fills_the_field_of_its_interface(interface):
    (message,) = written(joint_output('joint_state', interface), [1.0, 2.0, 3.0])
    other = 'velocity' if interface == 'position' else 'position'
    assert list(message.name) == ['joint_b', 'joint_a']
    assert list(getattr(message, interface)) == [3.0, 1.0]
    assert not getattr(message, other)
    assert message.header.stamp == STAMP


def test_numbers_are_in_the_units_of_the_message():
    matched = replace(
        joint_output('joint_trajectory'),
        units=Scaling(scale=np.array([-2.0, 1000.0]), offset=np.array([40.0, 0.0])),
    )
    first, second = written(matched, [0.5, 9.0, 10.0], [0.25, 9.0, 20.0])
    assert [list(point.positions) for point in first.points] == [[20.0, 500.0]] * 2
    assert [list(point.positions) for point in second.points] == [[20.0, 500.0], [0.0, 250.0]]


@needs_interbotix
@pytest.mark.parametrize(('group', 'said'), [(None, 'arm'), ('all', 'all')])
def test_a_joint_group_command_is_in_the_groups_order(group, said):
    output = RobotOutput(kind='joint_group_command', topic='t', joints=('b', 'a'), group=group)
    matched = MatchedOutput(output, columns=(2, 0), message_names=('joint_b', 'joint_a'))
    first, second = written(matched, [1.0, 2.0, 3.0], [0.1, 5.0, 6.0])
    assert (first.name, second.name) == (said, said)
    assert list(first.cmd) == [3.0, 1.0]
    assert list(second.cmd) == pytest.approx([6.0, 0.1], rel=1e-6)


@needs_interbotix
def test_a_joint_single_command_has_the_commands_name_and_unit():
    output = RobotOutput(kind='joint_single_command', topic='t', joints=('hand',))
    units = Scaling(scale=np.array([50.0]), offset=np.array([-1.0]))
    matched = MatchedOutput(output, columns=(1,), message_names=('gripper',), units=units)
    (message,) = written(matched, [0.0, 0.04])
    assert message.name == 'gripper'
    assert message.cmd == pytest.approx(1.0, rel=1e-6)


def test_pose_carries_position_and_quaternion_of_the_command():
    matched = MatchedOutput(
        RobotOutput(kind='pose_stamped', topic='t', pose='hand'),
        columns=(1, 2, 3, 4, 5, 6, 7),
        pose=pose(),
        frame_id='base_link',
    )
    first, second = written(
        matched,
        [9.0, 0.1, 0.2, 0.3, 0.8, 0.0, 0.0, 0.6],
        [9.0, 0.4, 0.5, 0.6, 0.0, -0.6, 0.8, 0.0],
    )
    assert first.header.frame_id == 'base_link' and first.header.stamp == STAMP
    position, q = first.pose.position, first.pose.orientation
    assert (position.x, position.y, position.z) == (0.1, 0.2, 0.3)
    assert (q.w, q.x, q.y, q.z) == (0.8, 0.0, 0.0, 0.6)
    q = second.pose.orientation
    assert (second.pose.position.x, q.w, q.x, q.y, q.z) == (0.4, 0.0, -0.6, 0.8, 0.0)


def test_twist_carries_linear_and_angular_velocity():
    matched = MatchedOutput(
        RobotOutput(kind='twist_stamped', topic='t', pose='hand'),
        columns=(5, 4, 3, 2, 1, 0),
        pose=pose('velocity'),
        frame_id='tool',
    )
    (message,) = written(matched, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    twist = message.twist
    assert (twist.linear.x, twist.linear.y, twist.linear.z) == (1.0, 2.0, 3.0)
    assert (twist.angular.x, twist.angular.y, twist.angular.z) == (4.0, 5.0, 6.0)
    assert message.header.frame_id == 'tool'
