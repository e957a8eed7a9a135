"""Plan step at a moment of the past: a ring of (ROS time, steps consumed).

A chunk is joined at the number of steps that the robot consumed since its observation. Time in
which the robot held consumed none, so that number has to be remembered.
"""

from __future__ import annotations

import numpy as np


class StepHistory:
    """The last ticks: their times, and the plan time at each, nanoseconds.

    `consumed` stands still while the robot holds; `elapsed` goes on while it holds for want of a
    chunk, which is what a delay is measured in.
    """

    def __init__(self, capacity: int) -> None:
        self._stamps = np.zeros(capacity, dtype=np.int64)
        self._consumed = np.zeros(capacity, dtype=np.int64)
        self._elapsed = np.zeros(capacity, dtype=np.int64)
        self._capacity = capacity
        # Ticks are numbered; tick n lies in slot n % capacity.
        self._first = 0
        self._end = 0
        self._floor_ns: int | None = None
        # Number of the first tick after the plan was last dropped.
        self._dropped_after = 0

    def clear(self) -> None:
        self._first = self._end
        self._floor_ns = None

    def forget_before(self, stamp_ns: int) -> None:
        """Forget all earlier ticks: an observation from before them is not acted on."""
        self._floor_ns = stamp_ns

    def note_drop(self) -> None:
        self._dropped_after = self._end

    def before_drop(self, stamp_ns: int) -> bool:
        return self._newest_until(stamp_ns) < min(self._dropped_after, self._end)

    def record(self, stamp_ns: int, consumed_ns: int, elapsed_ns: int) -> None:
        """Remember one tick. Times that a clock passes twice mean the second passage."""
        while self._end > self._first and self._stamps[(self._end - 1) % self._capacity] > stamp_ns:
            self._end -= 1
        slot = self._end % self._capacity
        self._stamps[slot] = stamp_ns
        self._consumed[slot] = consumed_ns
        self._elapsed[slot] = elapsed_ns
        self._end += 1
        self._first = max(self._first, self._end - self._capacity)

    def at(self, stamp_ns: int) -> tuple[int, int] | None:
        """Consumed and elapsed plan time, nanoseconds, at a ROS time; `None` before the oldest.

        Between two ticks the plan ran on from the first, at most to where the second found it.
        """
        if self._floor_ns is not None and stamp_ns < self._floor_ns:
            return None
        number = self._newest_until(stamp_ns)
        if number < self._first:
            return None
        slot = number % self._capacity
        consumed, elapsed = int(self._consumed[slot]), int(self._elapsed[slot])
        if number + 1 == self._end:
            return consumed, elapsed
        since = stamp_ns - int(self._stamps[slot])
        following = (number + 1) % self._capacity
        return (
            min(consumed + since, int(self._consumed[following])),
            min(elapsed + since, int(self._elapsed[following])),
        )

    def before_newest(self, age_ns: int) -> tuple[int, int] | None:
        """Like `at`, for the time `age_ns` nanoseconds before the newest tick."""
        if self._first == self._end:
            return None
        return self.at(int(self._stamps[(self._end - 1) % self._capacity]) - age_ns)

    def _newest_until(self, stamp_ns: int) -> int:
        """Number of the newest tick that is not after a time; less than `_first` for none."""
        low, high = self._first, self._end
        while low < high:
            middle = (low + high) // 2
            if self._stamps[middle % self._capacity] <= stamp_ns:
                low = middle + 1
            else:
                high = middle
        return low - 1
