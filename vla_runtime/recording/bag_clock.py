"""One clock for all messages of a bag: that of the stamps in their headers.

A stamp says when something was measured, a bag when it was received, maybe by another clock, such
as a simulation's, which runs slower, pauses or is set back. Topics whose stamps are of one clock
are paired by them. Others, and those with `stamp: receive`, have the time of their recording, put
between the two stamps that were recorded around it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from vla_runtime.recording.storage_file import RawMessage, header_stamp_ns
from vla_runtime.recording.topics import CHUNK_TYPES, IMAGE_TYPES, JOINT_STATE, PLAN_TYPES

_WITH_HEADER = frozenset(
    (
        *IMAGE_TYPES,
        JOINT_STATE,
        *CHUNK_TYPES,
        *PLAN_TYPES,
        'geometry_msgs/msg/PoseStamped',
        'geometry_msgs/msg/TwistStamped',
    )
)
# Further than any message travels: such stamps are of another clock, or of one that was set back.
_SAME_CLOCK_NS = 1_000_000_000
# Put between what was before a clock was set back and what came after: nothing is used so long.
_APART_NS = 7200 * 1_000_000_000


class ClockError(ValueError):
    """Messages of a bag cannot be put in order; the message names the bag and what mends it."""


class StampLog:
    """Stamps of messages and times of their recording, noted in the order of the bag."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[array[int], array[int]]] = {}

    def note(self, raw: RawMessage) -> None:
        times, stamps = self._noted.setdefault(raw.topic, (array('q'), array('q')))
        times.append(raw.time_ns)
        stamps.append(_stamp_ns(raw))

    def clock(self, path: Path, topics: Iterable[str], received: Collection[str] = ()) -> BagClock:
        """Return the clock of the first of these topics that has stamps.

        Args:
            topics: topics whose messages are paired, those that are sent most often first.
            received: those of them whose times of recording count, and not their stamps.

        Raises:
            ClockError: the clock of the recording was set back.
        """
        noted = {topic: (np.array(one), np.array(two)) for topic, (one, two) in self._noted.items()}
        return BagClock(path, noted, [topic for topic in topics if topic in noted], received)


class BagClock:
    """Gives messages their times.

    `notes` are for a person, on topics not paired by their stamps.
    """

    def __init__(
        self,
        path: Path,
        noted: dict[str, tuple[np.ndarray, np.ndarray]],
        topics: list[str],
        received: Collection[str],
    ) -> None:
        self.notes: list[str] = []
        self._noted = noted
        # Without any stamps the clock is the recording's.
        self._fit(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self._begins: np.ndarray = np.zeros(1, np.int64)
        self._shifts: np.ndarray = np.zeros(1, np.int64)
        self._others: set[str] = set(received)
        stamped = [
            topic
            for topic in topics
            if topic not in self._others and np.mean(noted[topic][1] > 0) > 0.5
        ]
        if stamped:
            self._read(path, stamped[0])
        for topic in dict.fromkeys(topics):
            self._compare(topic, stamped[0] if stamped else None)

    def times(self, topic: str) -> np.ndarray:
        """Return a topic's message times, (n,) int64, in order."""
        return self._of(topic, *self._noted[topic])

    def time_ns(self, raw: RawMessage) -> int:
        return int(self._of(raw.topic, np.array([raw.time_ns]), np.array([_stamp_ns(raw)]))[0])

    def at(self, recorded_ns: np.ndarray) -> np.ndarray:
        """Return the times (n,) int64 at which something was recorded then."""
        there = self._there(recorded_ns)
        return there + self._generation(there) * _APART_NS

    def _read(self, path: Path, topic: str) -> None:
        times, stamps = self._noted[topic]
        known = stamps > 0
        times, stamps = times[known], stamps[known]
        sound = _is_steady(times) & _is_steady(stamps)
        times, stamps = times[sound], stamps[sound]
        back = np.flatnonzero(np.diff(times) < -_SAME_CLOCK_NS)
        if len(back):
            raise ClockError(
                f'{path}: the clock of the recording was set back {len(back)} times, so messages '
                'of before and after have the same times; record without use_sim_time, or each '
                'stretch by itself'
            )
        back = np.flatnonzero(np.diff(stamps) < -_SAME_CLOCK_NS) + 1
        # A generation's stamps go on where those of the one before end.
        self._shifts = np.concatenate(([0], np.cumsum(stamps[back - 1] - stamps[back] + 1)))
        begins = np.concatenate(([0], back))
        lengths = np.diff(np.append(begins, len(stamps)))
        stamps = np.maximum.accumulate(stamps + np.repeat(self._shifts, lengths))
        self._begins = stamps[begins]
        order = np.argsort(times, kind='stable')
        self._fit(times[order], stamps)
        if len(back):
            self.notes.append(
                f'the stamps of {topic} go back {len(back)} times, as of a simulation that began '
                'anew: times after it go on from those before'
            )

    def _fit(self, times: np.ndarray, stamps: np.ndarray) -> None:
        """Note which stamps were recorded when, both rising; as floats that are exact."""
        self._times, self._first_ns = times, stamps[0]
        self._since = (times - times[0]).astype(np.float64)
        self._ahead = (stamps - stamps[0]).astype(np.float64)

    def _compare(self, topic: str, first: str | None) -> None:
        times, stamps = self._noted[topic]
        known = stamps > 0
        used = 'the times of their recording are used'
        if first is not None:
            used += f', on the clock of {first}'
        if topic in self._others:
            self.notes.append(f"{topic} has 'stamp: receive' in the robot file: {used}")
            return
        if not known.any():
            self.notes.append(f'messages of {topic} have no stamps: {used}')
            return
        away = float(np.median(np.abs(self._near(times, stamps)[0] - self._there(times))[known]))
        if away > _SAME_CLOCK_NS:
            self._others.add(topic)
            self.notes.append(
                f'stamps of {topic} are of another clock, {away * 1e-9:.4g} s away: {used}'
            )
        elif not known.all():
            count = len(known) - int(known.sum())
            self.notes.append(f'{count} messages of {topic} have no stamps: {used}')

    def _of(self, topic: str, times: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        there = self.at(times)
        if topic in self._others:
            return there
        near, generation = self._near(times, stamps)
        # A damaged stamp may be years away.
        sound = (stamps > 0) & (np.abs(near - self._there(times)) < _APART_NS)
        return np.where(sound, near + generation * _APART_NS, there)

    def _there(self, recorded_ns: np.ndarray) -> np.ndarray:
        """Return the times of a recording, as if none passed while the clock was set back."""
        # Before the first stamp and after the last one both clocks are taken to run alike.
        inside = np.clip(recorded_ns, self._times[0], self._times[-1])
        ahead = np.interp((inside - self._times[0]).astype(np.float64), self._since, self._ahead)
        return self._first_ns + np.round(ahead).astype(np.int64) + (recorded_ns - inside)

    def _near(self, times: np.ndarray, stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stamps, each of the generation that puts it near its recording, and which."""
        there = self._there(times)
        now = self._generation(there)
        before = np.maximum(now - 1, 0)
        first, second = stamps + self._shifts[now], stamps + self._shifts[before]
        earlier = np.abs(second - there) < np.abs(first - there)
        return np.where(earlier, second, first), np.where(earlier, before, now)

    def _generation(self, there: np.ndarray) -> np.ndarray:
        """Return how often the clock was set back before these times."""
        return np.maximum(np.searchsorted(self._begins, there, side='right') - 1, 0)


def _stamp_ns(raw: RawMessage) -> int:
    found = header_stamp_ns(raw.serialised) if raw.type_name in _WITH_HEADER else None
    return found or 0


def _is_steady(values: np.ndarray) -> np.ndarray:
    """Return which values are near the middle one of themselves and their neighbours."""
    steady = np.ones(len(values), dtype=bool)
    if len(values) > 2:
        middle = np.median([values[:-2], values[1:-1], values[2:]], axis=0)
        steady[1:-1] = np.abs(values[1:-1] - middle) < _SAME_CLOCK_NS
    return steady
