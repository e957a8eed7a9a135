"""Frames of a bag, read once in its order and held until their last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.recording.storage_file import RawMessage, header_stamp_ns
from vla_runtime.recording.topics import IMAGE_TYPES

Frame = TypeVar('Frame')
# Topic, and time of the message in ns.
FrameKey = tuple[str, int]


class NeededFrames(Generic[Frame]):
    """Frames that will be taken, in memory only from their reading to their last use.

    Args:
        uses: key of every use to come.
        make: makes a frame of its message; None for a damaged one.
        time_ns: gives the time of a message in its key; its stamp by default.
    """

    def __init__(
        self,
        reader: BagReader,
        uses: Iterable[FrameKey],
        make: Callable[[RawMessage], Frame | None],
        time_ns: Callable[[RawMessage], int | None] = lambda raw: header_stamp_ns(raw.serialised),
    ) -> None:
        self._reader = reader
        self._make = make
        self._time_ns = time_ns
        self._uses = Counter(uses)
        self._held: dict[FrameKey, Frame | None] = {}
        self._stream = self._read()

    def take(self, key: FrameKey) -> Frame | None:
        """Return a frame, and drop it after its last use; None: damaged, or not in the bag."""
        while key not in self._held:
            read, frame = next(self._stream, (key, None))
            self._held[read] = frame
        self._uses[key] -= 1
        return self._held[key] if self._uses[key] else self._held.pop(key)

    def _read(self) -> Iterator[tuple[FrameKey, Frame | None]]:
        """Yield the frames that are used, each once, in the order of the bag."""
        topics = {topic for topic, _ in self._uses}
        given: set[FrameKey] = set()
        for raw in self._reader.messages(
            lambda topic, kind: topic in topics and kind in IMAGE_TYPES
        ):
            time_ns = self._time_ns(raw)
            if time_ns is None:
                continue
            key = raw.topic, time_ns
            if self._uses.get(key) and key not in given:
                given.add(key)
                yield key, self._make(raw)
