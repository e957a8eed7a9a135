"""A recording: one bag, or with a budget a ring of bags whose oldest is deleted.

Invariants:
- without limits the recording is one bag, the folder itself;
- with limits it is a folder of bags (`000000`, `000001`, …) with a `ring.yaml` beside them, each
  complete in itself: it begins with the newest message of every latched topic;
- the bags take no more than `most_bytes`, the one that is being written included;
- a disk that is full ends the recording, never its caller: the closed bags stay.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from vla_runtime.recording.bag_writer import Bag, BagError, Offer

# Layout of a ring of bags on disk: numbered bags, beside a file that makes them one recording.

_MARK = 'ring.yaml'
_TEXT = '# The folders beside this file are one recording, in the order of their numbers.\n'
_PART = re.compile(r'\d{6}')
_MOST_PARTS = 10**6


def make_ring(folder: Path) -> None:
    """Make the folder of a ring without bags; OSError without room or permission."""
    folder.mkdir(parents=True)
    (folder / _MARK).write_text(_TEXT, encoding='utf-8')


def is_ring(folder: Path) -> bool:
    return (folder / _MARK).is_file()


def part_of(folder: Path, number: int) -> Path:
    return folder / f'{number % _MOST_PARTS:06d}'


def parts_of(folder: Path) -> list[Path]:
    parts = (part for part in folder.iterdir() if part.is_dir() and _PART.fullmatch(part.name))
    return sorted(parts)


# Closed bags of a full ring, about: deleting one loses this fraction of the recording.
_PARTS = 8
# A bag has schemas and latched messages of its own, some 60 kB: it is worth so much of frames.
_LEAST_PART_BYTES = 1 << 20
# A bag ends with its schemas once more and with an index, some bytes a message.
_END_BYTES = 60_000


@dataclass(frozen=True)
class RecordingLimits:
    """Budget of a recording; zeros: none.

    Attributes:
        keep_s: bags whose end is older (steady clock) are deleted.
        most_bytes: size of all bags together.
    """

    keep_s: float = 0.0
    most_bytes: int = 0

    @property
    def is_ring(self) -> bool:
        return bool(self.keep_s or self.most_bytes)


@dataclass(frozen=True)
class _ClosedBag:
    folder: Path
    end_s: float
    size: int


class Recording:
    """An open recording; any thread may write.

    Args:
        folder: must not exist yet.
        on_failure: called once with the reason when a failure ends the recording, in the thread
            that writes or closes.
        clock: steady seconds.

    Raises:
        BagError: the folder exists.
        OSError: the disk has no room for it.
    """

    def __init__(
        self,
        folder: Path,
        limits: RecordingLimits,
        on_failure: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._limits = limits
        # Size at which a bag is closed. The open bag counts too, so there is one more than _PARTS.
        self._part_bytes = max(
            limits.most_bytes // (_PARTS + 1), min(limits.most_bytes // 4, _LEAST_PART_BYTES)
        )
        self._clock = clock
        self._begin_s = clock()
        self._on_failure = on_failure
        self._lock = RLock()
        self._topics: dict[str, tuple[str, Offer]] = {}
        self._latched: dict[str, bytes] = {}
        self._closed: list[_ClosedBag] = []
        self._number = 0
        self._ended = False
        self.messages = 0
        if limits.is_ring:
            if folder.exists():
                raise BagError(f'{folder} exists already: name another folder, or remove it')
            make_ring(folder)
            self._bag = self._next_bag()
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._bag = Bag(folder, self._on_end)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def size(self) -> int:
        with self._lock:
            return sum(bag.size for bag in self._closed) + self._bag.size

    def add_topic(self, topic: str, type_name: str, offer: Offer) -> None:
        """Announce a topic, once; `type_name` is like `sensor_msgs/msg/JointState`."""
        with self._lock:
            if topic not in self._topics:
                self._topics[topic] = type_name, offer
                self._bag.add_topic(topic, type_name, offer)

    def write(self, topic: str, stamp_ns: int, serialised: bytes) -> None:
        """Write one message as it came from the wire; an ended recording takes no more."""
        with self._lock:
            if self._ended:
                return
            if self._limits.is_ring and self._is_full():
                self._turn(stamp_ns)
                if self._ended:
                    return
            if self._topics[topic][1].latched:
                self._latched[topic] = serialised
            self._bag.write(topic, stamp_ns, serialised)
            self._drop_oldest()
            self.messages += 1

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._bag.close()

    def _is_full(self) -> bool:
        limits = self._limits
        too_long = limits.keep_s and self._clock() - self._begin_s > limits.keep_s / _PARTS
        # The chunk in memory counts whole only where there is room for little more than it.
        too_large = limits.most_bytes and (
            self._bag.written > self._part_bytes or self._bag.size > limits.most_bytes // 2
        )
        return bool(too_long or too_large)

    def _turn(self, now_ns: int) -> None:
        """Close the open bag and open the next one, with the newest of every latched topic."""
        folder = part_of(self.folder, self._number - 1)
        self._bag.close()
        if self._ended:
            return
        size = sum(path.stat().st_size for path in folder.iterdir())
        self._closed.append(_ClosedBag(folder, self._clock(), size))
        try:
            self._bag = self._next_bag()
        except OSError as error:
            self._on_end(f'{self.folder}: recording has ended: {error.strerror or error}')
            return
        for topic, serialised in self._latched.items():
            self._bag.write(topic, now_ns, serialised)

    def _drop_oldest(self) -> None:
        limits = self._limits
        while self._closed:
            open_bytes = self._bag.size
            size = sum(bag.size for bag in self._closed) + open_bytes + open_bytes // 16
            size += _END_BYTES
            too_large = limits.most_bytes and size > limits.most_bytes
            too_old = limits.keep_s and self._clock() - self._closed[0].end_s > limits.keep_s
            if not (too_large or too_old):
                return
            shutil.rmtree(self._closed.pop(0).folder, ignore_errors=True)

    def _next_bag(self) -> Bag:
        bag = Bag(part_of(self.folder, self._number), self._on_end)
        self._number += 1
        self._begin_s = self._clock()
        for topic, (type_name, offer) in self._topics.items():
            bag.add_topic(topic, type_name, offer)
        return bag

    def _on_end(self, text: str) -> None:
        self._ended = True
        self._on_failure(text)
