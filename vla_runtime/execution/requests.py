"""Requests for chunks: the estimate of the delay, and the open requests."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from vla_runtime.execution.parameters import DelayParameters


class DelayEstimator:
    """A quantile of the delays observed in this episode, steps, but for the first, the warm-up."""

    def __init__(self) -> None:
        self._delays: deque[int] = deque()
        self._warming_up = True

    def clear(self) -> None:
        """Forget all delays: a new episode or policy process."""
        self._delays.clear()
        self._warming_up = True

    def observe(self, delay_steps: int, parameters: DelayParameters) -> None:
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

    Ages differ by up to the time between two frames, where frames are slower than requests. The
    last two follow a camera that becomes faster at once; hardly any frame is older than the longest
    of 32.

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
        self._ages.clear()
        self.longest_ns = 0
        self.longest_of_many_ns = 0

    def observe(self, age_ns: int) -> None:
        """Count one answer; frames from after the request are of age 0."""
        self._ages.append(min(max(0, age_ns), _LONGEST_FRAME_AGE_NS))
        self.longest_ns = max(list(self._ages)[-2:])
        second, longest = sorted((0, *self._ages))[-2:]
        self.longest_of_many_ns = max(self.longest_ns, min(longest, 2 * second))


# Open requests are sent again one by one, this far apart, seconds: many do not flood the topic.
_SEND_AGAIN_S = 0.1
# No policy has more stages than this.
MOST_OPEN = 64


@dataclass(eq=False)
class OpenRequest:
    """A request whose answer is awaited.

    Attributes:
        asked_s, sent_s: steady times at which it was made, and sent last.
        accepted: chunks accepted until then; another one since means another plan.
    """

    number: int
    asked_s: float
    sent_s: float
    asked_ros_ns: int
    accepted: int


class Requests:
    """The requests for chunks that are still awaited, each with its own time-out.

    Attributes:
        open: requests that are awaited, oldest first.
        most: requests that may be open at once: as many inferences as the policy has under way.
        answered: a chunk that serves the coming boundary was accepted.
        silent_since_s: steady time of the first request since the last answer; None without one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.open: list[OpenRequest] = []
        self.most = 1
        self.answered = False
        self.silent_since_s: float | None = None
        self._sent_again_s = -math.inf

    def ask(self, now_s: float, now_ros_ns: int, accepted: int = 0) -> OpenRequest:
        self.number += 1
        request = OpenRequest(self.number, now_s, now_s, now_ros_ns, accepted)
        self.open.append(request)
        if self.silent_since_s is None:
            self.silent_since_s = now_s
        return request

    def send_again(self, now_s: float) -> OpenRequest | None:
        """Return the open request to send again now, the one sent longest ago; counts as sent."""
        request = min(self.open, key=lambda one: one.sent_s, default=None)
        if request is None or now_s - max(request.sent_s, self._sent_again_s) < _SEND_AGAIN_S:
            return None
        request.sent_s = self._sent_again_s = now_s
        return request

    def find(self, number: int | None) -> OpenRequest | None:
        """Return the open request of this number; the oldest one for an answer that names none."""
        wanted = (one for one in self.open if number in (None, one.number))
        return next(wanted, None)

    def answer(self, number: int | None) -> None:
        """Note that the answer to a request was accepted, which closes older ones."""
        request = self.find(number)
        if request is not None:
            self.open = [one for one in self.open if one.number > request.number]
        self._hear()
        self.answered = True

    def close(self, number: int | None) -> None:
        """End a request without a chunk: its answer was refused."""
        request = self.find(number)
        if request is not None:
            self.open.remove(request)
        self._hear()

    def _hear(self) -> None:
        self.silent_since_s = self.open[0].asked_s if self.open else None

    def flush(self) -> None:
        """Await no answer and accept none: the plan was dropped."""
        self.open.clear()
        self.silent_since_s = None
        self.answered = False

    def renew(self) -> None:
        """Note that a boundary was passed: the next chunk is to be asked for."""
        self.answered = False

    def expire(self, now_s: float, timeout_s: float) -> int:
        """Give up requests that have timed out; return how many."""
        awaited = [one for one in self.open if now_s - one.asked_s <= timeout_s]
        expired = len(self.open) - len(awaited)
        self.open = awaited
        return expired
