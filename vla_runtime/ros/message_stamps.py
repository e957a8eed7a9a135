"""Times of a topic's messages: the stamps of their headers, or the times at which they came.

The times at which a message came differ from node to node. The time at which it was sent, by the
middleware of whoever sent it, does not: it is whatever that machine's clock shows, but it says
which message is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from rclpy.clock import Clock, ROSClock

from vla_runtime.ros.messages.conversions import stamp_to_ns
from vla_runtime.ros.robot.schema import StampSource

# Longer than a message waits for a callback; beyond it the machine's clock was set.
_LONGEST_WAIT_NS = 10_000_000_000
# Messages that came together are put in order; a clock that goes back by more was set back.
_SAME_MOMENT_NS = 100_000_000


class Stamped(NamedTuple):
    """Times of one message.

    Attributes:
        stamp_ns: ROS time that counts as its stamp.
        sent_ns: see the module; None for a message whose own stamp counts.
    """

    stamp_ns: int
    sent_ns: int | None


class MessageStamps:
    """Gives the messages of one topic their times; one thread at a time calls.

    Args:
        clock: the node's clock.
        source: `header` or `receive`.
    """

    def __init__(self, clock: Clock, source: StampSource) -> None:
        self._clock = clock
        self._source = source
        self._last_ns = 0

    def of(self, message: Any, info: Any) -> Stamped:
        """Return the times of a message with a header.

        Args:
            message: the message.
            info: rclpy's message info.
        """
        if self._source == 'header':
            return Stamped(stamp_to_ns(message.header.stamp), None)
        stamp_ns = self._received_ns(info)
        if self._last_ns - _SAME_MOMENT_NS < stamp_ns <= self._last_ns:
            stamp_ns = self._last_ns + 1
        self._last_ns = stamp_ns
        return Stamped(stamp_ns, sent_ns(info))

    def _received_ns(self, info: Any) -> int:
        now_ns = int(self._clock.now().nanoseconds)
        # The middleware tells the machine's time at which a message came, also of one that then
        # waited for a busy node. A simulated clock has no past.
        received_ns = info.get('received_timestamp') or 0
        simulated = isinstance(self._clock, ROSClock) and self._clock.ros_time_is_active
        if simulated or not 0 <= now_ns - received_ns < _LONGEST_WAIT_NS:
            return now_ns
        return int(received_ns)


def with_info(callback: Callable[..., None]) -> Any:
    """Return a subscription's callback of message and info.

    rclpy looks at the signature for two parameters. Jazzy's events executor gives both as one tuple.
    """

    def take(*args: Any) -> None:
        message, info = args if len(args) == 2 else args[0]
        callback(message, info)

    take.__signature__ = signature(lambda message, info: None)  # type: ignore[attr-defined]
    return take


def sent_ns(info: Any) -> int:
    """Return the time at which a message was sent, from rclpy's message info."""
    return int(info['source_timestamp'])
