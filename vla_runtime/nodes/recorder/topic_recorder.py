"""Listens to all topics of a policy and its robot, and writes them into a recording.

Messages are written as they came. Of images those are written that a chunk's report names (`used`),
by stamp or by content (`stamp: receive`), or all, or a few a second as JPEG (`reduced`), under
`<topic>/compressed`. Each topic is recorded with the QoS of its publisher, for the replay.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import Log, ParameterEvent
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.images import content_id, to_rgb
from vla_runtime.messages.jpeg import encode_jpeg
from vla_runtime.messages.trajectories import (
    chunk_type,
    plan_type,
    stamp_to_ns,
    typed_messages,
)
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.output_types import message_type, require_types
from vla_runtime.nodes.policy.description import CONTENT, read_description
from vla_runtime.nodes.qos import LATCHED, LOSSLESS
from vla_runtime.recording.bag_writer import Offer
from vla_runtime.recording.frame_store import FrameStore, HeldFrame
from vla_runtime.recording.recording import Recording
from vla_runtime.recording.stamp_book import StampBook
from vla_runtime.recording.storage_file import header_stamp_ns
from vla_runtime.recording.topics import IMAGE_RATE_HZ, JPEG_QUALITY, ImageMode
from vla_runtime.robot.schema import Robot, RobotCamera, by_name, received_topics

_IMAGE_PERIOD_NS = 1_000_000_000 // IMAGE_RATE_HZ
_REPORT = 'vla_policy/report'
_DESCRIPTION = 'vla_policy/description'
_STAMP = 'stamp_ns.'
_STATE_STAMP = f'{_STAMP}state'

# Frames of two seconds: a busy machine may keep this process waiting for as long.
_CAMERA = QoSProfile(depth=60, reliability=ReliabilityPolicy.BEST_EFFORT)

# A second of a 1 kHz driver: a state is made of single messages, and one that is lost is missed.
_JOINTS = QoSProfile(depth=1000, reliability=ReliabilityPolicy.BEST_EFFORT)
_STATES = 4000
# Reports that wait for the description, which comes as soon as the policy node is found.
_EARLY = 64

# Of the nodes' own topics.
_USUAL = Offer(depth=10)
_USUAL_LATCHED = Offer(depth=1, latched=True)

# Gets each message of a topic and the ROS time of its arrival.
Listener = Callable[[Any, int], None]
# Gets each reduced image: its camera's name, its stamp and the JPEG or whatever the camera sends.
OnReduced = Callable[[str, int, bytes], None]


class TopicRecorder:
    """Subscribes with a node of the caller's.

    Args:
        node: in the namespace of policy and executor.
        frame_bytes: most memory for frames that wait for their report (`used`).
        listeners: topic, as the robot file or this module has it, to who else gets its messages.

    Attributes:
        frames: those that wait in memory.
        chunks: number of reports of the policy so far.
        states: stamps of joint states, and which of those that an inference used did not come.
        found: the policy node has found this recorder; what it sent before is not here.
    """

    def __init__(
        self,
        node: Node,
        robot: Robot,
        recording: Recording,
        *,
        images: ImageMode,
        frame_bytes: int,
        on_error: OnError,
        listeners: Mapping[str, Listener] | None = None,
        on_reduced: OnReduced | None = None,
    ) -> None:
        self.frames = FrameStore(frame_bytes)
        self.states = StampBook(_STATES)
        self.chunks = 0
        self.found = False
        self._description: String | None = None
        # Reports that came before it: it tells the topics of the cameras that they name.
        self._early: deque[DiagnosticArray] = deque(maxlen=_EARLY)
        self._node = node
        self._recording = recording
        self._images = images
        self._on_error = on_error
        self._listeners = listeners or {}
        self._on_reduced = on_reduced
        self._reduced_due_ns: dict[str, int] = {}
        # Their stamps are the policy's own: a report has the positions themselves.
        self._received = bool(received_topics(robot))
        # Policies know cameras by name or alias; a description says it of earlier frames too.
        self._camera_topics = {
            name: node.resolve_topic_name(camera.topic)
            for name, camera in by_name(robot.cameras).items()
        }
        for camera in robot.cameras:
            self._listen_to_camera(camera)
        for source in robot.joint_states:
            offer = Offer(source.depth, source.reliability == 'reliable')
            self._listen(source.topic, JointState, offer, _JOINTS)
        for output in robot.outputs:
            require_types(robot, output, listens_only=True)
            self._listen(output.command_topic, message_type(output.kind), Offer(depth=1))
        if robot.leader is not None:
            self._listen(robot.leader.topic, JointState, _USUAL, _JOINTS)
        self._listen('action_chunk', chunk_type())
        self._listen('committed_plan', plan_type())
        if (typed := typed_messages()) is not None:
            self._listen('vla_executor/state', typed.ExecutorState)
            self._listen('vla_policy/state', typed.PolicyState)
        for topic in ('instruction', 'current_instruction'):
            self._listen(f'vla_policy/{topic}', String, _USUAL_LATCHED, LATCHED)
        # The robot's shape, for whoever shows the recording.
        self._listen('robot_description', String, _USUAL_LATCHED, LATCHED)
        for topic in (_REPORT, 'vla_executor/report', 'tabletop/report', '/diagnostics'):
            self._listen(topic, DiagnosticArray)
        self._listen('/parameter_events', ParameterEvent, Offer(depth=1000))
        self._listen('/rosout', Log, Offer(depth=1000))
        # Last: subscriptions are discovered in order, so who sends this has found all of them.
        self._listen(_DESCRIPTION, String, _USUAL_LATCHED, LATCHED)

    def _listen(
        self,
        topic: str,
        message_type: type,
        offer: Offer = _USUAL,
        qos: QoSProfile = LOSSLESS,
    ) -> None:
        name = self._node.resolve_topic_name(topic)
        self._recording.add_topic(name, type_name(message_type), offer)
        listeners = [self._listeners[topic]] if topic in self._listeners else []
        if topic == _REPORT:
            listeners.append(self._on_report)
        elif topic == _DESCRIPTION:
            listeners.append(self._on_description)

        def on_bytes(serialised: bytes) -> None:
            now_ns = self._now_ns()
            self._recording.write(name, now_ns, serialised)
            if message_type is JointState and (stamp_ns := header_stamp_ns(serialised)):
                self.states.came(stamp_ns)
            for listener in listeners:
                listener(deserialize_message(serialised, message_type), now_ns)

        self._subscribe(topic, message_type, on_bytes, qos)

    def _listen_to_camera(self, camera: RobotCamera) -> None:
        raw = camera.type == 'raw'
        message_type = Image if raw else CompressedImage
        name = self._node.resolve_topic_name(camera.topic)
        offer = Offer(camera.depth, camera.reliability == 'reliable')
        reduced = f'{name}/compressed' if raw else name
        if self._images == 'reduced':
            self._recording.add_topic(reduced, type_name(CompressedImage), offer)
        else:
            self._recording.add_topic(name, type_name(message_type), offer)

        def key_of(serialised: bytes) -> int | None:
            if camera.stamp == 'header':
                return header_stamp_ns(serialised)
            return content_id(deserialize_message(serialised, message_type))

        reduces = self._images == 'reduced' or self._on_reduced is not None

        def on_bytes(serialised: bytes) -> None:
            now_ns = self._now_ns()
            if self._images == 'all':
                self._recording.write(name, now_ns, serialised)
            elif self._images == 'used':
                self._hold(name, key_of(serialised), serialised, now_ns)
            left_ns = self._reduced_due_ns.get(name, 0) - now_ns
            # More than a period is left after the clock was set back.
            if reduces and not 0 < left_ns <= _IMAGE_PERIOD_NS:
                self._reduced_due_ns[name] = now_ns + _IMAGE_PERIOD_NS
                self._reduce(camera, reduced, deserialize_message(serialised, message_type), now_ns)

        self._subscribe(camera.topic, message_type, on_bytes, _CAMERA)

    def _subscribe(
        self,
        topic: str,
        message_type: type,
        on_bytes: Callable[[bytes], None],
        qos: QoSProfile,
    ) -> None:
        callback = guarded(self._on_error, topic, on_bytes)
        self._node.create_subscription(message_type, topic, callback, qos, raw=True)

    def _hold(self, topic: str, key: int | None, serialised: bytes, now_ns: int) -> None:
        if key is not None:
            frame = self.frames.add(topic, key, HeldFrame(now_ns, serialised))
            if frame is not None:
                self._recording.write(topic, frame.arrived_ns, frame.serialised)

    def _on_report(self, message: DiagnosticArray, _: int) -> None:
        self.chunks += len(message.status)
        for status in message.status:
            values = values_of(status)
            if _STATE_STAMP in values and not self._received:
                self.states.wanted(int(values[_STATE_STAMP]))
        if self._images == 'used' and self.found:
            self._name_frames(message)
        elif self._images == 'used':
            self._early.append(message)

    def _name_frames(self, message: DiagnosticArray) -> None:
        for status in message.status:
            values = values_of(status)
            # A policy may see several frames of a camera.
            used: dict[str, list[int]] = {}
            for key, value in values.items():
                topic = self._camera_topics.get(key.removeprefix(_STAMP))
                if key.startswith(_STAMP) and topic is not None:
                    named = values.get(key.replace(_STAMP, CONTENT, 1), value)
                    used.setdefault(topic, []).append(int(named))
            for topic, keys in used.items():
                for frame in self.frames.name(topic, keys):
                    self._recording.write(topic, frame.arrived_ns, frame.serialised)

    def finish(self) -> None:
        """Write the description once more: without it a bag with a damaged begin says little."""
        if self._description is not None:
            name = self._node.resolve_topic_name(_DESCRIPTION)
            self._recording.write(name, self._now_ns(), serialize_message(self._description))

    def _on_description(self, message: String, _: int) -> None:
        self.found, self._description = True, message
        self._camera_topics |= read_description(message.data).cameras
        while self._early:
            self._name_frames(self._early.popleft())

    def _reduce(self, camera: RobotCamera, name: str, message: Any, now_ns: int) -> None:
        if camera.type == 'raw':
            message = _compress(message, camera.encoding)
        if self._images == 'reduced':
            self._recording.write(name, now_ns, serialize_message(message))
        if self._on_reduced is not None:
            self._on_reduced(camera.name, stamp_to_ns(message.header.stamp), bytes(message.data))

    def _now_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)


def _compress(message: Image, encoding: str | None) -> CompressedImage:
    encoded = encode_jpeg(to_rgb(message, encoding=encoding), JPEG_QUALITY)
    compressed = CompressedImage(header=message.header, format='rgb8; jpeg compressed bgr8')
    compressed.data = array.array('B', encoded)
    return compressed


def type_name(message_type: type) -> str:
    package, kind, _ = message_type.__module__.split('.', 2)
    return f'{package}/{kind}/{message_type.__name__}'
