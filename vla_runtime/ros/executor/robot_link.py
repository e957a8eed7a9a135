"""The executor's topics on the robot's side: commands out, joint states in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.subscription import Subscription
from sensor_msgs.msg import JointState

from vla_runtime.ros.executor.outputs import MESSAGE_TYPES, OutputWriter
from vla_runtime.ros.message_stamps import MessageStamps
from vla_runtime.ros.node_runner import OnError, guarded
from vla_runtime.ros.qos import NEWEST
from vla_runtime.ros.robot.match import RobotMatch
from vla_runtime.ros.robot.schema import Robot

# Names, positions and stamp (ns, ROS clock) of one message.
TakeState = Callable[[Sequence[str], Sequence[float], int], None]

_ACKNOWLEDGE = Duration(seconds=0.5)


class RobotLink:
    """Publishers from configure to cleanup, subscriptions while the node is active.

    Args:
        node: the executor node.
        robot: the robot file.
        match: map of the command's columns onto the robot's outputs.
    """

    def __init__(self, node: LifecycleNode, robot: Robot, match: RobotMatch) -> None:
        self._node = node
        self._robot = robot
        self._outputs = match.outputs
        self._subscriptions: list[Subscription] = []
        self._publishers = [
            node.create_lifecycle_publisher(
                MESSAGE_TYPES[matched.output.kind], matched.output.topic, NEWEST
            )
            for matched in match.outputs
        ]

    def writers(self, period_s: float) -> list[OutputWriter]:
        """Return the outputs that send a command's columns once a control period."""
        return [
            OutputWriter(matched, publisher, period_s)
            for matched, publisher in zip(self._outputs, self._publishers, strict=True)
        ]

    def listen(self, take: TakeState, on_error: OnError) -> None:
        """Hand over measured positions under the robot's own joint names, until `ignore`."""
        for source in self._robot.joint_states:
            names = source.joints or tuple(joint.name for joint in self._robot.joints)
            mine = {self._robot.joint(name).in_messages: name for name in names}
            qos = (
                qos_profile_sensor_data
                if source.reliability == 'best_effort'
                else QoSProfile(depth=source.depth)
            )
            stamps = MessageStamps(self._node.get_clock(), source.stamp)
            callback = guarded(on_error, source.topic, _StateTaker(take, mine, stamps))
            self._subscriptions.append(
                self._node.create_subscription(JointState, source.topic, callback, qos)
            )

    def ignore(self) -> None:
        """Stop handing over positions."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            self._node.destroy_subscription(subscription)

    @property
    def topics(self) -> list[str]:
        """Full name of the topic of every output."""
        return [publisher.topic_name for publisher in self._publishers]

    def wait_until_heard(self) -> None:
        """Give the last command time to arrive."""
        for publisher in self._publishers:
            publisher.wait_for_all_acked(_ACKNOWLEDGE)

    def close(self) -> None:
        """Destroy the publishers."""
        publishers, self._publishers = self._publishers, []
        for publisher in publishers:
            self._node.destroy_lifecycle_publisher(publisher)


class _StateTaker:
    """One topic's messages under the robot's joint names."""

    def __init__(self, take: TakeState, mine: Mapping[str, str], stamps: MessageStamps) -> None:
        self._take = take
        self._mine = mine
        self._stamps = stamps
        self._in_message: list[str] = []
        self._names: tuple[str, ...] = ()

    def __call__(self, message: JointState) -> None:
        if message.name != self._in_message:
            self._in_message = list(message.name)
            # Joints of other topics may bear the same name there: an empty name is nobody's.
            self._names = tuple(self._mine.get(name, '') for name in message.name)
        self._take(self._names, message.position, self._stamps.of(message))
