"""Frames of the cameras, held in memory until a report names those that an inference used.

Pure: stamps come in as integer nanoseconds. Invariants:
- the frames held take no more than `most_bytes`; the oldest give way;
- a frame is given out once, however many inferences used it;
- a frame that is named before it came is given out when it comes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

# Names and answers remembered of each camera: more than any inference takes frames to run.
_REMEMBERED = 64
# Three raw cameras of 640x480 at 30 Hz fill it in three seconds.
DEFAULT_FRAME_BYTES = 256 << 20


@dataclass(frozen=True)
class HeldFrame:
    """A camera's message.

    Attributes:
        arrived_ns: ROS time at which it came.
        serialised: bytes of the message as it came from the wire.
    """

    arrived_ns: int
    serialised: bytes


class FrameStore:
    """Frames of several cameras; one thread at a time calls.

    Args:
        most_bytes: most bytes of all frames held.

    Attributes:
        held_bytes: bytes of the frames held now.
        given: frames given out.
        crowded_out: frames that gave way before a later one of their camera was named.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # By camera and stamp, in the order of arrival.
        self._frames: OrderedDict[tuple[str, int], HeldFrame] = OrderedDict()
        self._wanted: dict[str, deque[int]] = {}
        self._done: dict[str, deque[int]] = {}
        self.held_bytes = 0
        self.given = 0
        self.crowded_out = 0

    @property
    def missing(self) -> int:
        """Frames that were named and never came."""
        return sum(map(len, self._wanted.values()))

    def add(self, camera: str, stamp_ns: int, frame: HeldFrame) -> HeldFrame | None:
        """Hold a frame; returned at once where it has been named already."""
        wanted = self._wanted.get(camera, ())
        if stamp_ns in wanted:
            self._wanted[camera].remove(stamp_ns)
            return self._give(camera, stamp_ns, frame)
        self._drop((camera, stamp_ns))
        self._frames[camera, stamp_ns] = frame
        self.held_bytes += len(frame.serialised)
        while self.held_bytes > self._most_bytes:
            self._drop(next(iter(self._frames)))
            self.crowded_out += 1
        return None

    def name(self, camera: str, stamps_ns: Iterable[int]) -> list[HeldFrame]:
        """Take the held frames that an inference used; `add` returns those that come later.

        Frames of the camera before the oldest are dropped: a later inference uses none of them.
        """
        taken = []
        named = sorted(stamps_ns)
        for stamp_ns in named:
            if stamp_ns in self._done.get(camera, ()):
                continue
            frame = self._drop((camera, stamp_ns))
            if frame is None:
                self._remember(self._wanted, camera, stamp_ns)
            else:
                taken.append(self._give(camera, stamp_ns, frame))
        for key in [key for key in self._frames if key[0] == camera and key[1] < named[0]]:
            self._drop(key)
        return taken

    def _give(self, camera: str, stamp_ns: int, frame: HeldFrame) -> HeldFrame:
        self._remember(self._done, camera, stamp_ns)
        self.given += 1
        return frame

    def _drop(self, key: tuple[str, int]) -> HeldFrame | None:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self.held_bytes -= len(frame.serialised)
        return frame

    @staticmethod
    def _remember(stamps: dict[str, deque[int]], camera: str, stamp_ns: int) -> None:
        known = stamps.setdefault(camera, deque(maxlen=_REMEMBERED))
        if stamp_ns not in known:
            known.append(stamp_ns)
