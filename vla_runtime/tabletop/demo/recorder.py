"""Listens to a session's topics: all of them into the bag, what the report shows into telemetry.

Messages are taken serialised and written as they came. Raw images are the exception: at 20 Hz they
would be 100 MB a minute, so a few a second are kept, as JPEG, under `<topic>/compressed`.
Each topic is recorded with the QoS that its publisher offers, so that a replay offers the same.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable
from typing import Any

import cv2
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_profile_sensor_data
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.ros.executor.outputs import MESSAGE_TYPES
from vla_runtime.ros.messages.conversions import stamp_to_ns
from vla_runtime.ros.messages.diagnostics import values_of
from vla_runtime.ros.messages.images import to_rgb
from vla_runtime.ros.node_runner import OnError, guarded
from vla_runtime.ros.robot.file import Robot, RobotCamera, RobotOutput
from vla_runtime.tabletop.demo.bag import Bag, Offer
from vla_runtime.tabletop.demo.telemetry import (
    IMAGE_RATE_HZ,
    JPEG_QUALITY,
    Inference,
    Seam,
    Series,
    Telemetry,
    Thumbnail,
)

_IMAGE_PERIOD_NS = 1_000_000_000 // IMAGE_RATE_HZ
_COUNTERS = frozenset(
    {
        'requests', 'received', 'accepted', 'taken_over', 'late', 'clamped', 'steps',
        'starved_ticks', 'overrun_ticks', 'limited_ticks', 'late_ticks', 'ticks', 'sent',
    }
)  # fmt: skip
_RELIABLE = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE)
_LATCHED = QoSProfile(
    depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)

# Of the nodes' own topics.
_USUAL_OFFER = Offer(depth=10)


class Recorder:
    """Subscribes with a node of the caller's.

    Args:
        node: its namespace is the session's.
        robot: names the topics of joints, cameras and outputs.
        bag: written to.
        telemetry: written to.
        on_error: called with an exception of a callback.
    """

    def __init__(
        self, node: Node, robot: Robot, bag: Bag, telemetry: Telemetry, on_error: OnError
    ) -> None:
        self._node = node
        self._robot = robot
        self._bag = bag
        self._telemetry = telemetry
        self._on_error = on_error
        self._image_due_ns: dict[str, int] = {}
        for source in robot.joint_states:
            self._listen(
                source.topic,
                JointState,
                qos_profile_sensor_data,
                self._on_joints,
                Offer(source.depth, source.reliability == 'reliable'),
            )
        for output in robot.outputs:
            self._listen(
                output.topic,
                MESSAGE_TYPES[output.kind],
                _RELIABLE,
                self._commands(output),
                Offer(depth=1),
            )
        for camera in robot.cameras:
            self._listen_to_camera(camera)
        for topic in ('action_chunk', 'committed_plan'):
            self._listen(topic, JointTrajectory, _RELIABLE)
        self._listen('vla_policy/instruction', String, _LATCHED, offer=Offer(depth=1, latched=True))
        self._listen('vla_policy/report', DiagnosticArray, _RELIABLE, self._on_inference)
        self._listen('vla_executor/report', DiagnosticArray, _RELIABLE, self._on_seam)
        self._listen('tabletop/report', DiagnosticArray, _RELIABLE, self._on_verdict)
        self._listen('/diagnostics', DiagnosticArray, _RELIABLE, self._on_diagnostics)

    def _listen(
        self,
        topic: str,
        message_type: type,
        qos: QoSProfile,
        keep: Callable[[Any, int], None] | None = None,
        offer: Offer = _USUAL_OFFER,
    ) -> None:
        """Record a topic; `keep` gets each message and the ROS time of its arrival."""
        name = self._node.resolve_topic_name(topic)
        self._bag.add_topic(name, _type_name(message_type), offer)

        def on_bytes(serialised: bytes) -> None:
            now_ns = self._now_ns()
            self._bag.write(name, now_ns, serialised)
            if keep is not None:
                keep(deserialize_message(serialised, message_type), now_ns)

        self._node.create_subscription(
            message_type, topic, guarded(self._on_error, topic, on_bytes), qos, raw=True
        )

    def _listen_to_camera(self, camera: RobotCamera) -> None:
        message_type = CompressedImage if camera.type == 'compressed' else Image
        name = self._node.resolve_topic_name(camera.topic)
        if camera.type == 'raw':
            name += '/compressed'
        offer = Offer(camera.depth, camera.reliability == 'reliable')
        self._bag.add_topic(name, _type_name(CompressedImage), offer)

        def on_bytes(serialised: bytes) -> None:
            now_ns = self._now_ns()
            if now_ns < self._image_due_ns.get(name, 0):
                return
            self._image_due_ns[name] = now_ns + _IMAGE_PERIOD_NS
            message = deserialize_message(serialised, message_type)
            if camera.type == 'raw':
                message = _compress(message)
                serialised = serialize_message(message)
            self._bag.write(name, now_ns, serialised)
            self._telemetry.thumbnails.append(
                Thumbnail(stamp_to_ns(message.header.stamp), camera.name, bytes(message.data))
            )

        self._node.create_subscription(
            message_type,
            camera.topic,
            guarded(self._on_error, camera.topic, on_bytes),
            qos_profile_sensor_data,
            raw=True,
        )

    def _on_joints(self, message: JointState, _: int) -> None:
        stamp_ns = stamp_to_ns(message.header.stamp)
        for name, position in zip(message.name, message.position, strict=True):
            self._telemetry.measured.setdefault(name, Series()).add(stamp_ns, [position])

    def _commands(self, output: RobotOutput) -> Callable[[Any, int], None]:
        names = [self._robot.joint(name).in_messages for name in output.joints]

        def keep(message: Any, now_ns: int) -> None:
            for name, position in zip(names, _positions(output.kind, message), strict=True):
                self._telemetry.commanded.setdefault(name, Series()).add(now_ns, [position])

        return keep

    def _on_inference(self, message: DiagnosticArray, now_ns: int) -> None:
        for status in message.status:
            given = values_of(status)
            self._telemetry.inferences.append(
                Inference(
                    time_ns=now_ns,
                    number=int(given['number']),
                    milliseconds=_numbers(given, 'ms.'),
                    ages_ms=_numbers(given, 'age_ms.'),
                    overhead_ms=float(given['overhead_ms']),
                    cache=_cache(given),
                    beta=float(given['beta']),
                    denoise_steps=int(given['denoise_steps']),
                )
            )

    def _on_seam(self, message: DiagnosticArray, _: int) -> None:
        for status in message.status:
            given = values_of(status)
            self._telemetry.seams.append(
                Seam(
                    time_ns=int(given['stamp_ns']),
                    chunk=int(given['chunk']),
                    delay_steps=int(given['delay_steps']),
                    late=given['late'] == 'true',
                    from_hold=given['from_hold'] == 'true',
                    position_jump=float(given['position_jump']),
                    velocity_jump=float(given['velocity_jump']),
                )
            )

    def _on_verdict(self, message: DiagnosticArray, now_ns: int) -> None:
        for status in message.status:
            given = values_of(status)
            for attempt in reversed(self._telemetry.attempts):
                if not attempt.outcome and attempt.instruction == given['instruction']:
                    attempt.end_ns = now_ns
                    attempt.outcome = given.get('outcome', 'unknown task')
                    break

    def _on_diagnostics(self, message: DiagnosticArray, now_ns: int) -> None:
        prefix = self._node.get_namespace().rstrip('/') + '/vla_executor: '
        episode, is_executor = '', False
        for status in message.status:
            if not status.name.startswith(prefix):
                continue
            condition, is_executor = status.name.removeprefix(prefix), True
            given = values_of(status)
            self._telemetry.executor[condition] = {**given, 'text': status.message}
            episode = given.get('episode', episode)
            refused = {name for name in given if name.startswith('refused.')}
            for counter in (_COUNTERS & given.keys()) | refused:
                by_episode = self._telemetry.counters.setdefault(counter, {})
                by_episode[episode] = int(given[counter])
            _, refusal, why = status.message.partition('the newest was refused: ')
            if condition == 'chunks' and refusal and why not in self._telemetry.refusals:
                self._telemetry.refusals.append(why)
            if condition == 'tick':
                self._telemetry.tick_p99_ms.add(now_ns, [float(given['late_p99_ms'])])
            if status.level == DiagnosticStatus.ERROR:
                self._note_problem(f'executor: {status.message}')
        # Last: who waits for it finds the counters there.
        self._telemetry.executor_reports += is_executor

    def _note_problem(self, text: str) -> None:
        if text not in self._telemetry.problems:
            self._telemetry.problems.append(text)

    def _now_ns(self) -> int:
        return time.time_ns()


def _positions(kind: str, message: Any) -> list[float]:
    if kind == 'joint_trajectory':
        return list(message.points[-1].positions)
    return list(message.data if kind == 'float64_multi_array' else message.position)


def _compress(message: Image) -> CompressedImage:
    """A raw image as JPEG, with its own stamp."""
    quality = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    encoded = cv2.imencode('.jpg', to_rgb(message)[:, :, ::-1], quality)[1]
    compressed = CompressedImage(header=message.header, format='rgb8; jpeg compressed bgr8')
    compressed.data = array.array('B', encoded.tobytes())
    return compressed


def _cache(given: dict[str, str]) -> str:
    """Describe what was reused: `vision 1 of 2, prefix miss`."""
    cameras = [word for key, word in given.items() if key.startswith('cache.camera.')]
    rows = given.get('cache.rows', 'off').split()
    if set(cameras) | set(rows) <= {'off'}:
        return 'off'
    return f'vision {cameras.count("hit")} of {len(cameras)}, prefix {" and ".join(rows)}'


def _numbers(given: dict[str, str], prefix: str) -> dict[str, float]:
    return {
        key.removeprefix(prefix): float(value)
        for key, value in given.items()
        if key.startswith(prefix)
    }


def _type_name(message_type: type) -> str:
    package, kind, _ = message_type.__module__.split('.', 2)
    return f'{package}/{kind}/{message_type.__name__}'
