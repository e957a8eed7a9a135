"""Times of a topic's messages: the stamps of their headers, or the times at which they come.

rclpy tells a callback neither when the middleware got its message nor when it was sent, not with
Jazzy's events executor: a message that waited for a busy node counts as new.
"""

from __future__ import annotations

from typing import Any

from rclpy.clock import Clock

from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.robot.schema import StampSource

# Messages of one moment of the clock are put in order; one that goes back by more was set back.
_SAME_MOMENT_NS = 100_000_000


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

    def of(self, message: Any) -> int:
        """Return the ROS time (ns) that counts as the stamp of a message that has just come."""
        if self._source == 'header':
            return stamp_to_ns(message.header.stamp)
        stamp_ns = int(self._clock.now().nanoseconds)
        if self._last_ns - _SAME_MOMENT_NS < stamp_ns <= self._last_ns:
            stamp_ns = self._last_ns + 1
        self._last_ns = stamp_ns
        return stamp_ns
