"""The executor's topics on the robot's side: commands out, joint states in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.subscription import Subscription
from sensor_msgs.msg import JointState

from vla_runtime.ros.executor.outputs import MESSAGE_TYPES, OutputWriter
from vla_runtime.ros.executor.publisher_streams import PublisherStreams
from vla_runtime.ros.graph_faults import several_publishers
from vla_runtime.ros.messages.conversions import stamp_to_ns
from vla_runtime.ros.node_runner import OnError, guarded
from vla_runtime.ros.qos import NEWEST
from vla_runtime.ros.robot.match import RobotMatch
from vla_runtime.ros.robot.schema import Robot

# Names, positions, stamp (ns, ROS clock) and source (`topic#publisher`) of one message.
TakeState = Callable[[Sequence[str], Sequence[float], int, str], None]
# From ROS 2 Iron on a callback may ask for what the middleware knows of a message.
_TELLS_PUBLISHERS = hasattr(Subscription, 'CallbackType')
# rmw's number of messages that the middleware does not count.
_UNCOUNTED = 2**64 - 1

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
            topic = self._node.resolve_topic_name(source.topic)
            taker = _StateTaker(take, mine, topic)
            callback = guarded(on_error, source.topic, taker)
            if _TELLS_PUBLISHERS:
                callback = _with_info(guarded(on_error, source.topic, taker.take_with_info))
            self._subscriptions.append(
                self._node.create_subscription(JointState, source.topic, callback, qos)
            )

    def state_publishers(self) -> str:
        """Name the publishers of joint-state topics that have several; empty without any."""
        topics = [self._node.resolve_topic_name(source.topic) for source in self._robot.joint_states]
        found = [several_publishers(self._node, topic) for topic in dict.fromkeys(topics)]
        return '; '.join(text for text in found if text)

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

    def __init__(self, take: TakeState, mine: Mapping[str, str], topic: str) -> None:
        self._topic = topic
        self._streams = PublisherStreams()
        self._take = take
        self._mine = mine
        self._in_message: list[str] = []
        self._names: tuple[str, ...] = ()

    def take_with_info(self, message: JointState, info: Mapping[str, Any]) -> None:
        """Take a message of which the middleware says how its publisher numbered it."""
        number = info.get('publication_sequence_number')
        if number is None or number == _UNCOUNTED:
            self(message)
        else:
            self._hand_over(message, f'{self._topic}#{self._streams.name_of(number)}')

    def __call__(self, message: JointState) -> None:
        self._hand_over(message, self._topic)

    def _hand_over(self, message: JointState, source: str) -> None:
        if message.name != self._in_message:
            self._in_message = list(message.name)
            # Joints of other topics may bear the same name there: an empty name is nobody's.
            self._names = tuple(self._mine.get(name, '') for name in message.name)
        self._take(self._names, message.position, stamp_to_ns(message.header.stamp), source)


def _with_info(call: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a callback that asks rclpy for what the middleware knows of a message.

    rclpy looks at the signature for two arguments. Jazzy's events executor gives both as one tuple.
    """

    def take(*args: Any) -> None:
        message, info = args if len(args) == 2 else args[0]
        call(message, info)

    take.__signature__ = signature(lambda message, info: None)  # type: ignore[attr-defined]
    return take
