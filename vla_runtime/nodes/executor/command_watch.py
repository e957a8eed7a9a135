"""Who else sends on the executor's command topics.

A publisher that merely exists does no harm: a teleoperation node has one all day. A message of
another node on a command topic means that somebody else moves the robot.

rclpy does not say which publisher a message came from, so this node knows its own by the time at
which the middleware stamped them: while its `publish` ran, by this process's system clock. Of two
messages within one `publish` one is another node's.

Invariants:
- own messages are never taken for another node's; another node's is missed only where it was sent
  during an own `publish` whose message was lost;
- Humble's rclpy does not say when a message was sent: whoever may send counts as a sender at a
  start, and nobody is heard later;
- the subscription asks for the least quality of service, to hear every publisher, and decodes
  nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription

from vla_runtime.nodes.executor.outputs import Publisher
from vla_runtime.nodes.graph_faults import describe_publishers, publisher_names
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.qos import TELLS_INFO, with_info

_ANY_PUBLISHER = QoSProfile(
    depth=50, reliability=ReliabilityPolicy.BEST_EFFORT, durability=DurabilityPolicy.VOLATILE
)
# More own commands than can wait to be heard.
_KEPT = 200
# The middleware's stamps are rounded.
_ROUNDING_NS = 1_000
_OPEN_NS = 1 << 62
# The graph is asked no more often, however fast the other node sends.
_ASK_AGAIN_S = 0.2
# A leader arm sends at least every other second while a person has it.
_QUIET_AFTER_S = 1.0

# The topic as the robot file has it, and who sends there, for the person at the robot.
OnSender = Callable[[str, str], None]


@dataclass(eq=False)
class _Span:
    """Times of the system clock around one `publish`, and whether its message was heard."""

    start_ns: int
    end_ns: int = _OPEN_NS
    is_heard: bool = False

    def holds(self, stamp_ns: int) -> bool:
        # A clock that is set in the middle of a publish leaves the ends reversed.
        ends = self.start_ns, self.end_ns
        return min(ends) <= stamp_ns <= max(ends)


class OwnPublisher:
    """A publisher that remembers when it published."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._sent: deque[_Span] = deque(maxlen=_KEPT)

    def publish(self, msg: Any) -> None:
        """Publish. For one thread at a time."""
        # Kept before it is sent: it may be heard before this returns.
        span = _Span(time.time_ns() - _ROUNDING_NS)
        self._sent.append(span)
        try:
            self._publisher.publish(msg)
        finally:
            span.end_ns = time.time_ns() + _ROUNDING_NS

    def claim(self, stamp_ns: int) -> bool:
        """Return whether a message with this stamp is its own; ask once a message, in order."""
        # A copy: the control thread may be adding one.
        for span in self._sent.copy():
            if not span.is_heard and span.holds(stamp_ns):
                span.is_heard = True
                return True
        return False


@dataclass(frozen=True)
class WatchedTopic:
    """A command topic.

    Attributes:
        topic: as the robot file has it; `full_name` is its name in the graph.
        shared_with: full names of nodes that may send there too.
    """

    topic: str
    full_name: str
    message_type: type
    publisher: OwnPublisher
    shared_with: frozenset[str]


class CommandWatch:
    """Hears other nodes on command topics, from `listen` to `ignore`."""

    def __init__(self, node: Node, topics: Sequence[WatchedTopic]) -> None:
        self._node = node
        self._topics = tuple(topics)
        self._subscriptions: list[Subscription] = []
        # By topic: who may have sent, and the steady time at which the graph was asked.
        self._asked: dict[str, tuple[float, list[str]]] = {}
        self._heard: dict[str, tuple[float, str]] = {}

    def listen(self, on_sender: OnSender, on_error: OnError) -> None:
        """Call `on_sender` for each message of a node that the robot file does not allow there."""
        for topic in self._topics if TELLS_INFO else ():
            self._subscriptions.append(
                self._node.create_subscription(
                    topic.message_type,
                    topic.full_name,
                    self._taker(topic, on_sender, on_error),
                    _ANY_PUBLISHER,
                    raw=True,
                )
            )

    def ignore(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            self._node.destroy_subscription(subscription)
        self._asked.clear()
        self._heard.clear()

    def senders(self) -> str:
        if not TELLS_INFO:
            return '; '.join(filter(None, map(self._describe_others, self._topics)))
        now_s = time.monotonic()
        heard = list(self._heard.values())
        return '; '.join(text for when_s, text in heard if now_s - when_s < _QUIET_AFTER_S)

    def _taker(
        self, topic: WatchedTopic, on_sender: OnSender, on_error: OnError
    ) -> Callable[..., None]:
        def take(_: bytes, info: Mapping[str, Any]) -> None:
            if not topic.publisher.claim(info['source_timestamp']):
                self._hear(topic, on_sender)

        return with_info(guarded(on_error, topic.full_name, take))

    def _hear(self, topic: WatchedTopic, on_sender: OnSender) -> None:
        now_s = time.monotonic()
        names = self._others(topic, now_s)
        if topic.shared_with and not names:
            return
        who = describe_publishers(self._node, names) or 'a node that has left the graph'
        text = f'{who} sends commands on {topic.full_name}'
        self._heard[topic.topic] = now_s, text
        on_sender(topic.topic, text)

    def _describe_others(self, topic: WatchedTopic) -> str:
        names = self._others(topic, time.monotonic())
        who = describe_publishers(self._node, names)
        return f'{who} may send commands on {topic.full_name}' if names else ''

    def _others(self, topic: WatchedTopic, now_s: float) -> list[str]:
        asked_s, names = self._asked.get(topic.full_name, (float('-inf'), []))
        if now_s - asked_s > _ASK_AGAIN_S:
            names = publisher_names(self._node, topic.full_name, 1)
            self._asked[topic.full_name] = now_s, names
        if topic.shared_with:
            # A name may be discovered after its publisher: the next message has it.
            return [name for name in names if name and name not in topic.shared_with]
        return names
