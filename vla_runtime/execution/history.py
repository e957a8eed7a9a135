"""Which plan step was current at a moment of the past: a ring of (ROS time, steps consumed).

A chunk carries the time of its observation; the index at which it is joined is the number of steps
that the robot consumed since then. Time in which the robot held consumed none, so this cannot be
computed from the clock: it has to be remembered.
"""

from __future__ import annotations

import numpy as np


class StepHistory:
    """The last ticks: when they were, how much plan had been consumed, how much was asked for.

    Both amounts are nanoseconds of plan time. `consumed` stands still while the robot holds;
    `elapsed` goes on while it holds for want of a chunk, which is what a delay is measured in.
    """

    def __init__(self, capacity: int) -> None:
        self._stamps = np.zeros(capacity, dtype=np.int64)
        self._consumed = np.zeros(capacity, dtype=np.int64)
        self._elapsed = np.zeros(capacity, dtype=np.int64)
        self._capacity = capacity
        self._count = 0
        self._floor_ns: int | None = None

    def clear(self) -> None:
        """Forget everything: what was before cannot be related to what comes."""
        self._count = 0
        self._floor_ns = None

    def forget_before(self, stamp_ns: int) -> None:
        """Answer nothing about earlier times: what was seen then is not to be acted on."""
        self._floor_ns = stamp_ns

    def record(self, stamp_ns: int, consumed_ns: int, elapsed_ns: int) -> None:
        """Remember one tick. Stamps never go back (a clock that does clears the history)."""
        slot = self._count % self._capacity
        self._stamps[slot] = stamp_ns
        self._consumed[slot] = consumed_ns
        self._elapsed[slot] = elapsed_ns
        self._count += 1

    def at(self, stamp_ns: int) -> tuple[int, int] | None:
        """Consumed and elapsed plan time, nanoseconds, at a ROS time.

        Between two ticks the plan ran on from the first, at most to where the second found it.
        After the last tick it is where that tick left it. `None` before the oldest tick kept.
        """
        held = min(self._count, self._capacity)
        if held == 0 or (self._floor_ns is not None and stamp_ns < self._floor_ns):
            return None
        split = self._count % self._capacity if self._count > self._capacity else 0
        # Oldest first: the part after the write position, then the part before it.
        if split and stamp_ns < self._stamps[0]:
            start, stop = split, self._capacity
        else:
            start, stop = 0, split or held
        found = start + int(np.searchsorted(self._stamps[start:stop], stamp_ns, side='right')) - 1
        if found < start:
            return None
        consumed, elapsed = int(self._consumed[found]), int(self._elapsed[found])
        following = (found + 1) % self._capacity
        if following == self._count % self._capacity:
            return consumed, elapsed
        since = stamp_ns - int(self._stamps[found])
        return (
            min(consumed + since, int(self._consumed[following])),
            min(elapsed + since, int(self._elapsed[following])),
        )
