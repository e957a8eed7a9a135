"""The last frames of one camera, and the count of what became of all of them.

Pure: times come in as integer nanoseconds. ROS 2 headers have no sequence number, so lost frames
are estimated: a gap of k median periods (over the last `_PERIODS`) counts as k - 1 lost frames, one
longer than `_OUTAGE_NS` as an outage. It is too low where half of the frames or more are lost.

Frames are kept as long as a slower camera's may pair with them. A fast camera's are thinned, never
cut off at the old end: beyond `_FULL` a frame goes whose neighbours lie within the synchroniser's
tolerance of each other, so that every span of that length that held a usable frame still does.
Where the tolerance is too small for that, the closest frames go beyond `_MOST`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from vla_runtime.execution.state import UNSTAMPED
from vla_runtime.messages.images import ImageFacts
from vla_runtime.sensors.frame_content import FrameContent
from vla_runtime.sensors.future_stamp import describe_ahead, describe_future, old_hint

# Frames kept whatever their distance: 28 MB of 480x640 pixels.
_FULL = 30
# Half a second (`max_observation_age_s`) at 240 Hz: 111 MB of 480x640 pixels.
_MOST = 120
_PERIODS = 31
_ENOUGH_PERIODS = 5
_OUTAGE_NS = 1_000_000_000
# So long, by the stamps, a status tells of a frame that could not be used.
_TOLD_NS = 10_000_000_000


@dataclass(frozen=True)
class Frame:
    """One image message.

    Attributes:
        arrived_ns: steady time at which the node got it.
        facts: what its header says; None where nobody has looked.
    """

    stamp_ns: int
    arrived_ns: int
    message: Any
    facts: ImageFacts | None = None


@dataclass
class CameraCounters:
    """Counts of a camera's frames since the node was activated; they never go down.

    `received` counts all that came. Of these `late` were older than the age limit on arrival,
    `out_of_order` not newer than the frame before, `refused` unusable (encoding, size, stamp).
    `lost` and `outages` are estimates of what never came.
    """

    received: int = 0
    late: int = 0
    out_of_order: int = 0
    refused: int = 0
    lost: int = 0
    outages: int = 0


class CameraBuffer:
    """Frames of one camera, oldest first, with strictly increasing stamps.

    Args:
        name: for people, like the topic.
        kept_ns: time for which frames too old to be used are kept as earlier ones.

    Attributes:
        first_ns: stamp of the first frame since the last `clear`.
        silence: why no message can come, from the graph; '' where one can.
        content: what the frames show of the camera's faults.
    """

    def __init__(self, name: str, topic: str, kept_ns: int = 0) -> None:
        self.name = name
        self.topic = topic
        self.counters = CameraCounters()
        self.content = FrameContent()
        self.first_ns: int | None = None
        self.silence = ''
        self._kept_ns = kept_ns
        self._kept: list[Frame] = []
        # Frames from before are kept as earlier ones only.
        self._usable_from_ns = 0
        # Stamps of the last selection: while they stay, no later one is of an earlier time.
        self._selected_ns: frozenset[int] = frozenset()
        # Why the latest message could not be used; None when it could.
        self.fault: str | None = None
        self._last_ns: int | None = None
        self._periods: deque[int] = deque(maxlen=_PERIODS)
        # Facts of the first and the newest frame since the last `clear`.
        self._first_facts: ImageFacts | None = None
        self._facts: ImageFacts | None = None
        # The newest stamp when a frame could not be used for the last time, and why.
        self._refused_ns: int | None = None
        self._refusal = ''

    def clear(self) -> None:
        """Drop all frames and stamps; counters stay."""
        self._kept.clear()
        self.content.clear()
        self._usable_from_ns = 0
        self._selected_ns = frozenset()
        self.first_ns = None
        self.fault = None
        self._last_ns = None
        self._periods.clear()
        self._first_facts = self._facts = None
        self._refused_ns = None

    @property
    def warning(self) -> str | None:
        """What is wrong with frames that are used, or with some of them; None for nothing."""
        last_ns, refused_ns = self._last_ns, self._refused_ns
        if last_ns is not None and refused_ns is not None and last_ns - refused_ns < _TOLD_NS:
            return (
                f'{self.counters.refused} frames could not be used, the last '
                f'{(last_ns - refused_ns) * 1e-9:.1f} s ago: {self._refusal}'
            )
        first, now = self._first_facts, self._facts
        if first is None or now is None:
            return None
        if (first.width, first.height) != (now.width, now.height):
            return (
                f'frames are {now.width}x{now.height} pixels, and were {first.width}x'
                f'{first.height}: the policy sees another part of the scene, or another scale; set '
                'the driver back, or call ~/reset if it is meant'
            )
        if now.grey:
            return (
                'frames are grey, and the policy was trained with colours: set the driver to a '
                "colour encoding, or give the colour stream's topic in the robot file"
            )
        content = self.content.warning(last_ns or 0)
        return f"camera '{self.name}' ({self.topic}): {content}" if content else None

    def compare(self) -> None:
        """Look whether the newest frame repeats the ones before it, once a status."""
        if self._kept:
            newest = self._kept[-1]
            self.content.compare(newest.stamp_ns, newest.message)

    @property
    def frames(self) -> list[Frame]:
        return self._kept[bisect_left(self._kept, self._usable_from_ns, key=_stamp) :]

    @property
    def rate_hz(self) -> float:
        """Frames a second by their stamps; 0 while unknown."""
        if len(self._periods) < _ENOUGH_PERIODS:
            return 0.0
        return 1e9 / median(self._periods)

    def add(self, frame: Frame, now_ns: int, max_age_ns: int, tolerance_ns: int) -> bool:
        """Keep a frame, unless its stamp forbids it.

        `now_ns` is ROS time, `max_age_ns` the largest age of a usable frame, `tolerance_ns` the
        largest difference of the stamps of frames that belong together. Returns whether it was
        kept.
        """
        self.counters.received += 1
        if frame.stamp_ns == 0:
            return self._refuse(UNSTAMPED)
        age_ns = now_ns - frame.stamp_ns
        # Not remembered as the last stamp: else no frame would follow it for a long time.
        if age_ns < -max_age_ns:
            return self._refuse(describe_future(-age_ns * 1e-9))
        if self._last_ns is not None and frame.stamp_ns <= self._last_ns:
            self.counters.out_of_order += 1
            step = frame.stamp_ns - self._last_ns
            # Until its clock has caught up, a driver that was set back is never just late.
            hint = old_hint(age_ns * 1e-9) if age_ns > max_age_ns else ''
            self.fault = (
                f'stamps go back in time (by {-step * 1e-9:.3f} s){hint}'
                if step
                else f'the stamp does not advance: the same frame again{hint}'
            )
            return False
        self._estimate_lost(frame.stamp_ns)
        self._last_ns = frame.stamp_ns
        self.fault = describe_ahead(-age_ns, 'and the executor refuses chunks from such frames')
        if age_ns > max_age_ns:
            self.counters.late += 1
            age_s = age_ns * 1e-9
            self.fault = f'frames arrive {age_s:.3f} s after their stamp{old_hint(age_s)}'
            # It may still be an earlier frame for one that comes in time.
            if age_ns > max_age_ns + self._kept_ns:
                return False
        if self.first_ns is None:
            self.first_ns = frame.stamp_ns
        self._facts = frame.facts
        if self._first_facts is None:
            self._first_facts = frame.facts
        self._kept.append(frame)
        self._thin(tolerance_ns)
        return True

    def refuse(self, reason: str) -> None:
        self.counters.received += 1
        self._refuse(reason)

    def discard(self, frame: Frame, reason: str) -> None:
        if frame in self._kept:
            self._kept.remove(frame)
        self._refuse(reason)

    def expire(self, now_ns: int, max_age_ns: int) -> None:
        self._usable_from_ns = now_ns - max_age_ns
        oldest_ns = self._usable_from_ns - self._kept_ns
        del self._kept[: bisect_left(self._kept, oldest_ns, key=_stamp)]

    def mark_selected(self, stamps_ns: Iterable[int]) -> None:
        """Keep the frames of a selection, by stamp, from being thinned until the next one."""
        self._selected_ns = frozenset(stamps_ns)

    def nearest(self, stamp_ns: int) -> Frame:
        """Return the frame of the nearest stamp, however old; one must be usable."""
        return min(self._kept, key=lambda frame: abs(frame.stamp_ns - stamp_ns))

    def age_s(self, now_ns: int) -> float | None:
        """Return the age of the newest frame by its stamp; None before the first."""
        return None if self._last_ns is None else (now_ns - self._last_ns) * 1e-9

    def why_empty(self, now_ns: int, max_age_ns: int) -> str:
        if self.fault is not None:
            return f"camera '{self.name}' ({self.topic}): {self.fault}"
        why = f': {self.silence}' if self.silence else ''
        age_s = self.age_s(now_ns)
        if age_s is None:
            return f"camera '{self.name}': no frame yet on {self.topic}{why}"
        return (
            f"camera '{self.name}' ({self.topic}): last frame is {age_s:.2f} s old, limit "
            f'{max_age_ns * 1e-9:g} s{why}'
        )

    def _thin(self, tolerance_ns: int) -> None:
        # An earlier frame is looked for by its exact age: all of them are kept as long as possible.
        enough = _MOST if self._kept_ns else _FULL
        while len(self._kept) > enough:
            stamps = [frame.stamp_ns for frame in self._kept]
            gaps = [
                (after - before, place)
                for place, (before, after) in enumerate(zip(stamps, stamps[2:], strict=False), 1)
                if stamps[place] not in self._selected_ns
            ]
            gap_ns, place = min(gaps)
            if gap_ns > tolerance_ns and len(self._kept) <= _MOST:
                return
            del self._kept[place]

    def _refuse(self, reason: str) -> bool:
        self.counters.refused += 1
        self.fault = self._refusal = reason
        self._refused_ns = self._last_ns
        return False

    def _estimate_lost(self, stamp_ns: int) -> None:
        if self._last_ns is None:
            return
        gap = stamp_ns - self._last_ns
        if gap > _OUTAGE_NS:
            self.counters.outages += 1
            return
        if len(self._periods) >= _ENOUGH_PERIODS:
            self.counters.lost += max(0, round(gap / median(self._periods)) - 1)
        self._periods.append(gap)


def _stamp(frame: Frame) -> int:
    return frame.stamp_ns
