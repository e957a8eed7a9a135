"""Requests for chunks: the estimate of the delay, and the open request."""

from __future__ import annotations

import math
from collections import deque

from vla_runtime.execution.parameters import DelayParameters


class DelayEstimator:
    """A quantile of the delays observed in this episode, in steps.

    The first inference warms up engines and caches and never counts.
    """

    def __init__(self) -> None:
        self._delays: deque[int] = deque()
        self._warming_up = True

    def clear(self) -> None:
        """Forget all delays: a new episode or policy process, with its warm-up to come."""
        self._delays.clear()
        self._warming_up = True

    def observe(self, delay_steps: int, parameters: DelayParameters) -> None:
        """Count one delay, unless it is the warm-up's."""
        if self._warming_up:
            self._warming_up = False
            return
        self._delays.append(delay_steps)
        while len(self._delays) > parameters.window:
            self._delays.popleft()

    @property
    def shortest(self) -> int:
        """The shortest of the delays observed, steps; 0 before the first."""
        return min(self._delays, default=0)

    def estimate(self, parameters: DelayParameters) -> int:
        """Return the smallest delay that covers the quantile of those observed, in bounds."""
        if not self._delays:
            return parameters.floor_steps
        ordered = sorted(self._delays)
        rank = math.ceil(parameters.quantile * len(ordered)) - 1
        return min(max(ordered[rank], parameters.floor_steps), parameters.ceiling_steps)


# Frames older than this at a request are those of a policy that was suspended, nanoseconds.
_LONGEST_FRAME_AGE_NS = 500_000_000
# Ages that are kept.
_AGES = 32


class FrameAge:
    """Age of the frames that requests were answered from, at the time of the request.

    One age is too few where frames come slower than requests, or out of step with them: ages differ
    by up to the time between two frames. The last two follow a camera that becomes faster at once.
    The last 32 leave next to no frame that is older than expected.

    Attributes:
        longest_ns: the longer of the last two, nanoseconds; 0 before the first.
        longest_of_many_ns: the longest of the last 32, nanoseconds. From the third answer on, one
            late frame counts for no more than twice the second longest.
    """

    def __init__(self) -> None:
        self._ages: deque[int] = deque(maxlen=_AGES)
        self.longest_ns = 0
        self.longest_of_many_ns = 0

    def clear(self) -> None:
        """Forget all ages: a new episode."""
        self._ages.clear()
        self.longest_ns = 0
        self.longest_of_many_ns = 0

    def observe(self, age_ns: int) -> None:
        """Count one answer; frames from after the request are of age 0."""
        self._ages.append(min(max(0, age_ns), _LONGEST_FRAME_AGE_NS))
        self.longest_ns = max(list(self._ages)[-2:])
        second, longest = sorted((0, *self._ages))[-2:]
        self.longest_of_many_ns = max(self.longest_ns, min(longest, 2 * second))


# An open request is sent again after this, seconds: a message that is lost costs no more.
_SEND_AGAIN_S = 0.1


class Requests:
    """The request for a chunk that is still awaited.

    Attributes:
        number: number of the newest request, counted from 1; an answer carries it back.
        asked_ros_ns: ROS time of the newest request.
        answered: a chunk that serves the coming boundary was accepted.
    """

    def __init__(self) -> None:
        self._asked_at_s: float | None = None
        self._sent_at_s = -math.inf
        self.number = 0
        self.asked_ros_ns = 0
        self.answered = False

    @property
    def open(self) -> bool:
        return self._asked_at_s is not None

    def ask(self, now_s: float, now_ros_ns: int) -> None:
        """Note that a new request has been sent."""
        self._asked_at_s = self._sent_at_s = now_s
        self.asked_ros_ns = now_ros_ns
        self.number += 1

    def send_again(self, now_s: float) -> bool:
        """Return whether to send the open request once more; counts as sent."""
        if not self.open or now_s - self._sent_at_s < _SEND_AGAIN_S:
            return False
        self._sent_at_s = now_s
        return True

    def answer(self) -> None:
        """Note that a chunk for the coming boundary was accepted."""
        self._asked_at_s = None
        self.answered = True

    def close(self) -> None:
        """End the request without a chunk: it was refused, or the plan was dropped."""
        self._asked_at_s = None

    def renew(self) -> None:
        """Note that a boundary was passed: the next chunk is to be asked for."""
        self.answered = False

    def timed_out(self, now_s: float, timeout_s: float) -> bool:
        """Return whether the open request has timed out."""
        return self._asked_at_s is not None and now_s - self._asked_at_s > timeout_s
