"""Subscriptions that are looked at now and then: only the newest message is ever converted.

Callbacks for controller states, up to a thousand a second, would cost a good part of a core.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message
from rclpy.subscription import Subscription

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.nodes.qos import NEWEST_HEARD


@dataclass(frozen=True)
class Taken:
    """A message, the system time (ns) at which it came, and its publisher's number of it.

    The number is 0 where the middleware tells none.
    """

    message: Any
    received_ns: int
    number: int = 0


class PolledTopics:
    """Subscriptions of a hidden node that nobody spins, beside the given one."""

    def __init__(self, node: Node, purpose: str = 'watch') -> None:
        self._node = Node(
            f'_{node.get_name()}_{purpose}',
            namespace=node.get_namespace(),
            context=node.context,
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )

    def subscribe(
        self, message_type: type, topic: str, qos: QoSProfile = NEWEST_HEARD
    ) -> PolledTopic:
        return PolledTopic(self._node.create_subscription(message_type, topic, lambda _: None, qos))

    def close(self) -> None:
        self._node.destroy_node()


class PolledTopic:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def take(self, *, decode: bool = True) -> Taken | None:
        """Return the oldest message that waits, or its bytes; None without one.

        With a queue of one that is the newest that came since the last call.
        """
        handle = self._subscription.handle
        with handle:
            taken = handle.take_message(self._subscription.msg_type, not decode)
        if taken is None:
            return None
        message, info = taken
        number = int(info.get('publication_sequence_number') or 0)
        return Taken(message, int(info['received_timestamp']), number)

    def take_bytes(self) -> bytes | None:
        """Return the oldest message that waits, not decoded; None without one."""
        taken = self.take(decode=False)
        return None if taken is None else taken.message


# What this package's nodes say on `/diagnostics`, heard without a callback: a transition runs in
# the thread of callbacks, and must hear whether another node has the robot.

# A node that loads a policy hears nothing for a minute; the newest messages count.
_HEARD = QoSProfile(depth=100, reliability=ReliabilityPolicy.BEST_EFFORT)
# The slowest of these nodes says everything once a second.
FRESH_S = 3.0


@dataclass(frozen=True)
class HeardItem:
    """A line of a node's status.

    Attributes:
        heard_s: steady seconds.
        since_ns: the process's own mark, where the message had it; two nodes may have one name.
    """

    node: str
    item: str
    level: int
    text: str
    values: Mapping[str, str]
    heard_s: float
    since_ns: str = ''


def read_items(message: DiagnosticArray, heard_s: float) -> list[HeardItem]:
    """Read lines as `to_message` wrote them; of others the node is ''."""
    found = []
    for status in message.status:
        node, _, item = status.name.rpartition(': ')
        values = values_of(status)
        # A byte, which a bag's reader gives as a number.
        level = status.level if isinstance(status.level, int) else status.level[0]
        found.append(HeardItem(node, item, level, status.message, values, heard_s))
    mark = next((one.values['since_ns'] for one in found if 'since_ns' in one.values), '')
    return [replace(one, since_ns=mark) for one in found]


class HeardStatus:
    """The newest lines of status of all nodes, of these subjects or all, of the last seconds."""

    def __init__(self, node: Node, items: Collection[str] = ()) -> None:
        self._topics = PolledTopics(node, 'status')
        topic = node.resolve_topic_name('/diagnostics')
        self._topic = self._topics.subscribe(DiagnosticArray, topic, _HEARD)
        self._items = frozenset(items)
        self._marks = tuple(f': {item}\0'.encode() for item in items)
        # By node, item and the process's own mark.
        self._heard: dict[tuple[str, str, str], HeardItem] = {}
        self._taking = Lock()

    def take(self) -> None:
        """Take the messages that wait. Others may look meanwhile: what they see does not change.

        For any thread.
        """
        with self._taking:
            self._take()

    def _take(self) -> None:
        now_s = time.monotonic()
        heard = self._heard.copy()
        while (raw := self._topic.take_bytes()) is not None:
            # Others publish much there; most of it is not worth decoding.
            if self._items and not any(mark in raw for mark in self._marks):
                continue
            for found in read_items(deserialize_message(raw, DiagnosticArray), now_s):
                if found.item in self._items or not self._items:
                    heard[found.node, found.item, found.since_ns] = found
        self._heard = {
            key: found for key, found in heard.items() if now_s - found.heard_s < FRESH_S
        }

    def items(self, item: str = '') -> Iterator[HeardItem]:
        return (found for found in self._heard.values() if item in ('', found.item))

    def of(self, node: str, item: str) -> HeardItem | None:
        """Return a node's newest line of a subject; None where it has said none."""
        found = [one for one in self.items(item) if one.node == node]
        return max(found, key=lambda one: one.heard_s, default=None)

    def close(self) -> None:
        self._topics.close()
