"""Frames of the cameras, held in memory until a report names those that an inference used.

A key names a frame of its camera: its stamp, or a number of its content. Invariants:
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
        # By camera and key, in the order of arrival.
        self._frames: OrderedDict[tuple[str, int], HeldFrame] = OrderedDict()
        self._wanted: dict[str, deque[int]] = {}
        # When those that were given out had come.
        self._done: dict[str, OrderedDict[int, int]] = {}
        self.held_bytes = 0
        self.given = 0
        self.crowded_out = 0

    @property
    def missing(self) -> int:
        """Frames that were named and never came."""
        return sum(map(len, self._wanted.values()))

    def add(self, camera: str, key: int, frame: HeldFrame) -> HeldFrame | None:
        """Hold a frame; returned at once where it has been named already."""
        wanted = self._wanted.get(camera, ())
        if key in wanted:
            self._wanted[camera].remove(key)
            return self._give(camera, key, frame)
        self._drop((camera, key))
        self._frames[camera, key] = frame
        self.held_bytes += len(frame.serialised)
        while self.held_bytes > self._most_bytes:
            self._drop(next(iter(self._frames)))
            self.crowded_out += 1
        return None

    def name(self, camera: str, keys: Iterable[int]) -> list[HeldFrame]:
        """Take the held frames that an inference used; `add` returns those that come later.

        Frames of the camera that came before all of them are dropped: a later inference uses none.
        """
        taken: list[HeldFrame] = []
        came_ns: list[int] = []
        done = self._done.get(camera, OrderedDict[int, int]())
        all_came = True
        for key in keys:
            if key in done:
                came_ns.append(done[key])
                continue
            frame = self._drop((camera, key))
            if frame is None:
                self._want(camera, key)
                all_came = False
            else:
                came_ns.append(frame.arrived_ns)
                taken.append(self._give(camera, key, frame))
        if all_came and came_ns:
            older = [
                key
                for key, frame in self._frames.items()
                if key[0] == camera and frame.arrived_ns < min(came_ns)
            ]
            for one in older:
                self._drop(one)
        return sorted(taken, key=lambda frame: frame.arrived_ns)

    def _give(self, camera: str, key: int, frame: HeldFrame) -> HeldFrame:
        done = self._done.setdefault(camera, OrderedDict())
        done[key] = frame.arrived_ns
        if len(done) > _REMEMBERED:
            done.popitem(last=False)
        self.given += 1
        return frame

    def _drop(self, key: tuple[str, int]) -> HeldFrame | None:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self.held_bytes -= len(frame.serialised)
        return frame

    def _want(self, camera: str, key: int) -> None:
        wanted = self._wanted.setdefault(camera, deque(maxlen=_REMEMBERED))
        if key not in wanted:
            wanted.append(key)
