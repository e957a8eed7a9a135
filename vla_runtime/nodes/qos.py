"""Quality of service of the nodes' own topics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from rclpy.clock import Clock
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription

from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.robot.schema import StampSource

# Callbacks that get `rmw_message_info_t` as a dict: rclpy gives it to a callback with room for two
# arguments. Jazzy's wait-set executors give two, its events executor one tuple, Humble none.

TELLS_INFO = hasattr(Subscription, 'CallbackType')
_TWO = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in ('message', 'info')])


def with_info(call: Callable[[Any, Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """Return a callback for a subscription that calls `call(message, info)`.

    `info` has `source_timestamp`, `received_timestamp` (ns) and `publication_sequence_number`; it
    is empty on Humble.
    """

    def take(*arguments: Any) -> None:
        found = arguments[0] if isinstance(arguments[0], tuple) else arguments
        message, info = (*found, {})[:2]
        call(message, info)

    take.__signature__ = _TWO  # type: ignore[attr-defined]
    return take


# Times of a topic's messages: the stamps of their headers, or the times at which they come. No
# callback of Jazzy's events executor learns when the middleware got one: late ones count as new.

# Messages of one moment of the clock are put in order; one that goes back by more was set back.
_SAME_MOMENT_NS = 100_000_000


class MessageStamps:
    """Gives the messages of one topic their times, by `header` or `receive`; one thread calls."""

    def __init__(self, clock: Clock, source: StampSource) -> None:
        self._clock = clock
        self._source = source
        self._last_ns = 0

    def of(self, message: Any) -> int:
        """Return the ROS time (ns) that counts as the stamp of a message that has just come."""
        if self._source == 'header':
            return stamp_to_ns(message.header.stamp)
        stamp_ns = int(self._clock.now().nanoseconds)
        if self._last_ns - _SAME_MOMENT_NS < stamp_ns <= self._last_ns:
            stamp_ns = self._last_ns + 1
        self._last_ns = stamp_ns
        return stamp_ns


RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
# Where nothing may be lost, as in a recording and its replay.
LOSSLESS = QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE)
# Of a stream whose older messages are of no use.
NEWEST = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
# How requests and their chunks are heard. A request is sent again until its chunk has come: a lost
# one costs 0.1 s. To a reliable reader it costs more, because all after it waits for the writer's
# next heartbeat, which Fast DDS sends every 3 s.
REPEATED = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
# Every chunk is judged and counted, also where several come at once.
CHUNKS = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED = QoSProfile(
    depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)
# How a stream of states is heard by who wants the newest state only.
NEWEST_HEARD = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
