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
    """A camera's message as it came from the wire, and the ROS time at which it came."""

    arrived_ns: int
    serialised: bytes


class FrameStore:
    """Frames of several cameras; one thread at a time calls.

    Attributes:
        held_bytes: bytes of the frames held now, `most_bytes` at most.
        crowded_out: frames that gave way before a later one of their camera was named.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._came = 0
        # By camera and key, in the order of arrival, with their numbers in it: a clock may go back.
        self._frames: OrderedDict[tuple[str, int], tuple[int, HeldFrame]] = OrderedDict()
        self._wanted: dict[str, deque[int]] = {}
        # Numbers of those that were given out.
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
        self._came += 1
        if key in self._wanted.get(camera, ()):
            self._wanted[camera].remove(key)
            self._give(camera, key, self._came)
            return frame
        if key in self._done.get(camera, ()):
            # The same picture again is in the recording.
            self._note(camera, key, self._came)
            return None
        self._drop((camera, key))
        self._frames[camera, key] = self._came, frame
        self.held_bytes += len(frame.serialised)
        while self.held_bytes > self._most_bytes:
            self._drop(next(iter(self._frames)))
            self.crowded_out += 1
        return None

    def name(self, camera: str, keys: Iterable[int]) -> list[HeldFrame]:
        """Take the held frames that an inference used, and drop older ones.

        `add` returns later ones.
        """
        taken: list[tuple[int, HeldFrame]] = []
        places: list[int] = []
        all_came = True
        done = self._done.setdefault(camera, OrderedDict())
        # Once each: a camera's first frame stands for its earlier ones, and two cameras of a policy
        # may share a topic.
        for key in dict.fromkeys(keys):
            place = done.get(key)
            if place is None and (held := self._drop((camera, key))) is not None:
                taken.append(held)
                place = held[0]
                self._give(camera, key, place)
            if place is None:
                self._want(camera, key)
                all_came = False
            else:
                places.append(place)
        if all_came and places:
            older = [
                key
                for key, (place, _) in self._frames.items()
                if key[0] == camera and place < min(places)
            ]
            for one in older:
                self._drop(one)
        return [frame for _, frame in sorted(taken, key=lambda one: one[0])]

    def _give(self, camera: str, key: int, place: int) -> None:
        self._note(camera, key, place)
        self.given += 1

    def _note(self, camera: str, key: int, place: int) -> None:
        done = self._done.setdefault(camera, OrderedDict())
        done[key] = place
        done.move_to_end(key)
        if len(done) > _REMEMBERED:
            done.popitem(last=False)

    def _drop(self, key: tuple[str, int]) -> tuple[int, HeldFrame] | None:
        held = self._frames.pop(key, None)
        if held is not None:
            self.held_bytes -= len(held[1].serialised)
        return held

    def _want(self, camera: str, key: int) -> None:
        wanted = self._wanted.setdefault(camera, deque(maxlen=_REMEMBERED))
        if key not in wanted:
            wanted.append(key)
