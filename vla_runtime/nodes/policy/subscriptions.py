"""Subscriptions of all cameras and joint states, feeding a synchroniser; pixels are not touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from sensor_msgs.msg import CompressedImage, Image, JointState

from vla_runtime.messages.images import ImageError, check_image
from vla_runtime.nodes.graph_faults import type_name, why_silent
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.qos import MessageStamps
from vla_runtime.robot.match import RobotMatch
from vla_runtime.robot.schema import JointStateTopic, Robot, RobotCamera
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.joint_buffer import JointSource
from vla_runtime.sensors.synchronizer import Synchronizer, SyncLimits

_GONE = 'no node publishes it any more: its driver has ended or its cable is off'
_IMAGE_TYPES = {'raw': Image, 'compressed': CompressedImage}


def make_synchronizer(
    node: Node, robot: Robot, match: RobotMatch, limits: SyncLimits
) -> Synchronizer:
    """Make one for the cameras and joints that the policy uses, under full topic names."""
    return Synchronizer(
        {name: node.resolve_topic_name(camera.topic) for name, camera in match.cameras.items()},
        [
            JointSource(
                topic=node.resolve_topic_name(robot.joint_source(name).topic),
                joint=robot.joint(name).in_messages,
                continuous=robot.joint(name).continuous,
            )
            for name in match.measured_joints
        ],
        limits,
        match.earlier,
        match.state_ages_ns,
    )


class Sensors:
    """The subscriptions; they exist until `destroy`."""

    def __init__(
        self,
        node: Node,
        robot: Robot,
        match: RobotMatch,
        synchronizer: Synchronizer,
        *,
        on_data: Callable[[], None],
        on_error: OnError,
    ) -> None:
        self._node = node
        self._synchronizer = synchronizer
        self._on_data = on_data
        self._group = MutuallyExclusiveCallbackGroup()
        self._subscriptions: list[Subscription] = []
        self._mends: list[str] = []
        # Topics that messages have come on.
        self._heard: set[str] = set()
        for name, camera in match.cameras.items():
            if name in match.earlier:
                continue
            take = partial(guarded(on_error, f'camera {name}', self._on_image), name, camera)
            mend = f"mend topic, type or reliability of camera '{camera.name}' in the robot file"
            self._subscribe(_IMAGE_TYPES[camera.type], camera, take, mend)
        for source in _used_topics(robot, match):
            topic = node.resolve_topic_name(source.topic)
            take = partial(guarded(on_error, topic, self._on_joints), topic)
            mend = 'mend topic or reliability in joint_states of the robot file'
            self._subscribe(JointState, source, take, mend)

    def destroy(self) -> None:
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions.clear()
        self._mends.clear()

    def silences(self) -> dict[str, str]:
        """Describe why no message can come, by topic; only topics that nobody can publish on."""
        images = [type_name(one) for one in _IMAGE_TYPES.values()]
        found = {}
        for subscription, mend in zip(self._subscriptions, self._mends, strict=True):
            if subscription.get_publisher_count():
                continue
            message_type: Any = subscription.msg_type
            kind, topic = type_name(message_type), subscription.topic_name
            if topic in self._heard and not self._node.count_publishers(topic):
                found[topic] = _GONE
                continue
            near = images if kind in images else [kind]
            if why := why_silent(self._node, topic, kind, subscription.qos_profile, near):
                found[topic] = f'{why}; {mend}'
        return found

    def _subscribe(
        self,
        message_type: type,
        source: RobotCamera | JointStateTopic,
        take: Callable[..., None],
        mend: str,
    ) -> None:
        stamps = MessageStamps(self._node.get_clock(), source.stamp)
        topic = self._node.resolve_topic_name(source.topic)

        def callback(message: Any) -> None:
            self._heard.add(topic)
            take(stamps, message)

        qos = QoSProfile(
            depth=source.depth,
            reliability=(
                ReliabilityPolicy.RELIABLE
                if source.reliability == 'reliable'
                else ReliabilityPolicy.BEST_EFFORT
            ),
            durability=DurabilityPolicy.VOLATILE,
        )
        self._subscriptions.append(
            self._node.create_subscription(
                message_type, source.topic, callback, qos, callback_group=self._group
            )
        )
        self._mends.append(mend)

    def _on_image(
        self,
        name: str,
        camera: RobotCamera,
        stamps: MessageStamps,
        message: Image | CompressedImage,
    ) -> None:
        arrived_ns = monotonic_ns()
        try:
            facts = check_image(
                message, width=camera.width, height=camera.height, encoding=camera.encoding
            )
        except ImageError as error:
            self._synchronizer.refuse_frame(name, str(error))
            return
        frame = Frame(stamps.of(message), arrived_ns, message, facts)
        if self._synchronizer.add_frame(name, frame, self._node.get_clock().now().nanoseconds):
            self._on_data()

    def _on_joints(self, topic: str, stamps: MessageStamps, message: JointState) -> None:
        taken = self._synchronizer.add_joints(
            topic,
            message.name,
            message.position,
            stamps.of(message),
            self._node.get_clock().now().nanoseconds,
        )
        if taken:
            self._on_data()


def _used_topics(robot: Robot, match: RobotMatch) -> Sequence[JointStateTopic]:
    sources = (robot.joint_source(name) for name in match.measured_joints)
    return tuple({source.topic: source for source in sources}.values())
