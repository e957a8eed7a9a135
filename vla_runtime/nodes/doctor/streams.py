"""What comes on a topic while the doctor listens: how often, how old, how much is lost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState, Joy

from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.nodes.graph_faults import type_name
from vla_runtime.nodes.qos import with_info
from vla_runtime.robot.schema import JointStateTopic, LeaderButton, RobotCamera, RobotLeader

Source = JointStateTopic | RobotCamera | RobotLeader | LeaderButton
IMAGE_TYPES = {'raw': Image, 'compressed': CompressedImage}
# Where the middleware counts nothing it says the largest number.
_UNCOUNTED = 2**64 - 1


@dataclass
class Stream:
    """Messages of one topic.

    Attributes:
        source: entry of the robot file, or one made from the graph.
        newest: the last message.
        arrivals_s: steady times.
        ended_s: steady time at which the listening ended; None while it goes on.
        offsets_s: age of each message by its stamp when it came; negative for the future.
        sent_s: age of each by the sender's system clock, where the middleware says it.
        sent_at_s: that clock, likewise.
        numbers: the middleware's own numbers, of one publisher.
        names: positions by joint name, of joint states.
        spans: least and largest position of each since `spans` was emptied.
    """

    topic: str
    source: Source
    message_type: type
    qos: QoSProfile
    newest: Any = None
    unstamped: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    offsets_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    sent_at_s: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    names: dict[str, float] = field(default_factory=dict)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return type_name(self.message_type)

    @property
    def rate_hz(self) -> float:
        """Messages a second as they came; 0.0 for fewer than two.

        The time since the last one counts, where it is longer than usual.
        """
        if len(self.arrivals_s) < 2:
            return 0.0
        first_s, last_s = self.arrivals_s[0], self.arrivals_s[-1]
        late_s = max(0.0, self.silent_s - self.period_s)
        return (len(self.arrivals_s) - 1) / (last_s - first_s + late_s)

    @property
    def period_s(self) -> float:
        """The usual time between two messages; 0.0 for fewer than two."""
        return median(_gaps(self.arrivals_s)) if len(self.arrivals_s) > 1 else 0.0

    @property
    def silent_s(self) -> float:
        """Time from the last message to the end of the listening."""
        ended_s = time.monotonic() if self.ended_s is None else self.ended_s
        return ended_s - self.arrivals_s[-1]

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two messages.

        A gap is one by both clocks. Where this process stood still the sender's has none, and the
        clocks of two senders differ.
        """
        gaps_s = [max(_gaps(self.arrivals_s), default=0.0)]
        if len(self.sent_at_s) == len(self.arrivals_s):
            gaps_s.append(max(_gaps(self.sent_at_s), default=0.0))
        return min(gaps_s)

    @property
    def lost_share(self) -> float:
        """Share that the sender numbered and that did not come; 0.0 where nobody counts."""
        if len(self.numbers) < 2:
            return 0.0
        sent = self.numbers[-1] - self.numbers[0] + 1
        return max(0.0, 1.0 - len(self.numbers) / sent) if sent > 0 else 0.0

    @property
    def age_s(self) -> float | None:
        """The usual age of a message when it comes, by its stamp; None before the first."""
        return median(self.offsets_s) if self.offsets_s else None

    @property
    def sender_age_s(self) -> float | None:
        """The same by the sender's system clock; None where the middleware does not tell it."""
        return median(self.sent_s) if self.sent_s else None

    def take(self, message: Any, info: Mapping[str, Any], now_ns: int) -> None:
        """Note a message that has just come; `now_ns` is the ROS time."""
        self.newest = message
        self.arrivals_s.append(time.monotonic())
        stamp_ns = stamp_to_ns(message.header.stamp)
        if stamp_ns:
            self.offsets_s.append((now_ns - stamp_ns) * 1e-9)
        else:
            self.unstamped += 1
        if sent_ns := info.get('source_timestamp'):
            self.sent_s.append((time.time_ns() - sent_ns) * 1e-9)
            self.sent_at_s.append(sent_ns * 1e-9)
        number = info.get('publication_sequence_number', _UNCOUNTED)
        if number != _UNCOUNTED:
            self.numbers.append(number)
        if isinstance(message, JointState):
            self._note_positions(dict(zip(message.name, message.position, strict=False)))

    def _note_positions(self, positions: Mapping[str, float]) -> None:
        self.names.update(positions)
        for name, position in positions.items():
            low, high = self.spans.get(name, (position, position))
            self.spans[name] = (min(low, position), max(high, position))


def _gaps(times_s: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


class Streams:
    """Subscriptions of the node to these sources; a spun node fills them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.all: list[Stream] = []

    def listen(self, source: Source) -> Stream:
        stream = Stream(
            self._node.resolve_topic_name(source.topic),
            source,
            _message_type(source),
            subscription_qos(source),
        )

        def take(message: Any, info: Mapping[str, Any]) -> None:
            stream.take(message, info, int(self._node.get_clock().now().nanoseconds))

        self._node.create_subscription(
            stream.message_type, stream.topic, with_info(take), stream.qos
        )
        self.all.append(stream)
        return stream

    def end(self) -> None:
        """Note that nobody listens any more."""
        for stream in self.all:
            stream.ended_s = time.monotonic()


def _message_type(source: Source) -> type:
    if isinstance(source, RobotCamera):
        return IMAGE_TYPES[source.type]
    return Joy if isinstance(source, LeaderButton) else JointState


def subscription_qos(source: Source) -> QoSProfile:
    """Return the quality of service that the nodes ask for, with a queue that loses nothing."""
    is_reliable = (
        isinstance(source, JointStateTopic | RobotCamera) and source.reliability == 'reliable'
    )
    return QoSProfile(
        depth=10 if isinstance(source, RobotCamera) else 100,
        reliability=ReliabilityPolicy.RELIABLE if is_reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.VOLATILE,
    )


def published_sources(node: Node) -> list[JointStateTopic | RobotCamera]:
    """Return all cameras and joint states that have a publisher, as a robot file has them."""
    images = {type_name(message) for message in IMAGE_TYPES.values()}
    found: list[JointStateTopic | RobotCamera] = []
    for topic, types in node.get_topic_names_and_types():
        if not node.count_publishers(topic):
            continue
        if types[0] == type_name(JointState):
            found.append(JointStateTopic(topic))
        elif types[0] in images:
            raw = types[0] == type_name(Image)
            found.append(RobotCamera('', topic, 'raw' if raw else 'compressed'))
    return found
