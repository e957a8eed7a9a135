"""The measured positions: taken by name from any number of sources, each with its own stamps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.plausibility import (
    ONE_TURN,
    REPORTED_NS,
    REPORTED_SAMPLES,
    DoubledJoints,
    Plausibility,
)

_NEVER = np.iinfo(np.int64).min
_FULL_TURN = 2.0 * math.pi
_SOURCES_KEPT = 32
# So many joints, and more than half of them, are at exactly zero by chance on no real robot.
_ZEROS = 3
# A message that is no further ahead of the clock is taken when its time comes; one of the future is
# reported for so long after it.
_SOON_NS, _AHEAD_COUNTS_NS = 20_000_000, 500_000_000
# No joint of any robot measures more, in any unit; far from where single precision overflows.
FURTHEST = 1e9
# Fault of a message with a zero stamp, in the words of every node that reads it.
UNSTAMPED = (
    'header.stamp is zero: the driver does not stamp its messages; mend the driver, or give the '
    "topic 'stamp: receive' in the robot file"
)
# Clocks of two computers differ by less; a simulator's clock begins at zero.
_OTHER_CLOCK_S = 3600.0
OTHER_CLOCK = (
    'a new message so far from now is stamped by another clock: set use_sim_time of every node to '
    'true with a simulator, to false with real drivers; a driver with a clock of its own needs '
    "'stamp: receive' for its topic in the robot file"
)


def clock_hint(age_s: float, otherwise: str = '') -> str:
    """Return the hint at another clock, to follow the age of a message in a text.

    `age_s` is negative for a stamp of the future; `otherwise` follows an age below an hour.
    """
    return f'; {OTHER_CLOCK}' if abs(age_s) > _OTHER_CLOCK_S else otherwise


class _Mapping(NamedTuple):
    """Where a message's positions go: `source` in the message, `target` columns.

    `angles` are those that are continuous; `twice` the first column named twice, or ''.
    """

    source: np.ndarray
    target: np.ndarray
    angles: tuple[int, ...]
    twice: str


class MeasuredState:
    """Latest measured position of every column with feedback, and the stamp it came with.

    The driver of a continuous joint either wraps its angle or counts turns. To one that wraps, a
    command a whole turn away is the same; to one that counts, it is a whole turn of motion. Numbers
    that jump by more than half a turn between messages are wrapped; numbers further than a turn
    from zero, or more than a turn apart, are counted. A message with a position that the joint
    cannot have is refused whole (`Plausibility`).

    Args:
        gap_ns: time without a message of a column that is a gap.
        outage_ns: time without one in which the robot may have been moved anywhere.
        simulated: stamps are of `/clock`, in a world that may begin anew.

    Attributes:
        positions: (columns,) the newest that were accepted.
        stamps: (columns,) int64, stamps that they came with; the least number before the first.
        since_ns: (columns,) int64, stamp since which each has stayed where it is, but for noise.
        samples: (columns,) int, messages since then.
        largest_step: (columns,) largest distance from one message to the next, but for those over
            a time without messages; for the reader to set to zero.
    """

    def __init__(
        self,
        model: ColumnModel,
        gap_ns: int = 200_000_000,
        outage_ns: int = 1_500_000_000,
        *,
        simulated: bool = False,
    ) -> None:
        columns = model.columns
        self._columns = columns
        self.plausibility = Plausibility(model, gap_ns, outage_ns, simulated=simulated)
        self.doubled = DoubledJoints(columns.measured_as)
        self._noise = model.noise
        self._place = np.full(columns.count, np.nan)
        self.since_ns = np.zeros(columns.count, dtype=np.int64)
        self.samples = np.zeros(columns.count, dtype=np.int64)
        self.largest_step = np.zeros(columns.count)
        self._index = {
            name: column
            for column, name in enumerate(columns.names)
            if columns.has_feedback[column]
        }
        self._maps: dict[tuple[str, ...], _Mapping] = {}
        # Why the newest message of these names was refused.
        self._refused: dict[tuple[str, ...], str] = {}
        self.positions = np.zeros(columns.count)
        # As they came; the last that was a number, and the furthest on either side.
        self._came = np.zeros(columns.count)
        self._before = [math.nan] * columns.count
        self._lowest = [math.inf] * columns.count
        self._highest = [-math.inf] * columns.count
        # Columns that jumped by more than half a turn, and those whose angles are wrapped.
        self._jumped = [False] * columns.count
        self._wraps = np.zeros(columns.count, dtype=bool)
        self.stamps = np.full(columns.count, _NEVER, dtype=np.int64)
        self._oldest = _NEVER if self._index else None
        self._newest = _NEVER
        # Columns whose stamp an older message may replace.
        self._distrusted = np.zeros(columns.count, dtype=bool)
        # Stamp of the newest message, where that was of the future and was not taken.
        self._ahead = np.full(columns.count, _NEVER, dtype=np.int64)
        # The last message, where it was a little ahead of the clock.
        self._waits: tuple[Sequence[str], Sequence[float], int, str] | None = None
        # Columns that have been at exactly zero since the first message.
        self._only_zero = columns.has_feedback & columns.is_position
        self.malformed = 0
        self.out_of_order = 0

    @property
    def guarded(self) -> bool:
        return self._oldest is not None

    @property
    def oldest_stamp_ns(self) -> int:
        """Oldest stamp of any measured column; only when `complete`."""
        return self._oldest if self._oldest is not None else 0

    @property
    def newest_stamp_ns(self) -> int:
        """Stamp of the column that reported last; only when `complete`."""
        return self._newest

    @property
    def complete(self) -> bool:
        return self._oldest is None or self._oldest != _NEVER

    @property
    def missing(self) -> list[str]:
        """What measures the columns whose position has never been received."""
        return self._stamped(_NEVER)

    def oldest_columns(self) -> list[str]:
        """What measures the columns that carry the oldest stamp."""
        return self._stamped(self.oldest_stamp_ns)

    def newest_columns(self) -> list[str]:
        """What measures the columns that carry the newest stamp."""
        return self._stamped(self.newest_stamp_ns)

    def _stamped(self, stamp_ns: int) -> list[str]:
        return self._columns.measured_by(
            column for column in self._index.values() if self.stamps[column] == stamp_ns
        )

    @property
    def refused(self) -> list[str]:
        """Reasons of refused messages whose columns no later message has brought."""
        return list(self._refused.values())

    def clear(self) -> None:
        self.stamps[:] = _NEVER
        self._oldest = _NEVER if self._index else None
        self._newest = _NEVER
        self._distrusted[:] = False
        self._ahead[:] = _NEVER
        self.plausibility.clear()
        self.doubled.clear()
        # A simulated world that begins anew puts joints elsewhere: no driver wrapped an angle.
        self._before = [math.nan] * len(self._before)

    def distrust_beyond(self, stamp_ns: int) -> None:
        """Accept the next message of columns with a later stamp than this, even if it is older.

        After a stamp of the future all messages would be dropped until time has caught up.
        """
        self._distrusted |= self.stamps > stamp_ns

    def observe(
        self,
        names: Sequence[str],
        positions: Sequence[float],
        stamp_ns: int,
        source: str = '',
        latest_ns: int | None = None,
        commanded: np.ndarray | None = None,
    ) -> None:
        """Add one message. Names that are not commanded are ignored; bad messages are counted.

        A message older than the last one is dropped, unless that one is distrusted. One that names
        a commanded joint twice is refused whole. One with a stamp of the future is noted (`ahead`),
        and changes nothing else.

        Args:
            positions: one position for each name, rad or m. Those beyond `FURTHEST` count as
                not-a-number, which is kept: it is for the watchdog.
            source: topic and publisher that it came from, as `topic#publisher`; the topic alone
                where the middleware does not tell publishers apart.
            latest_ns: stamp beyond which a message is of the future; None: all are believed.
            commanded: (columns,) commanded positions; see `Plausibility.accepts`.
        """
        key = tuple(names)
        found = self._maps.get(key)
        if found is None:
            found = self._map(key)
        places, target, angles, twice = found
        if len(positions) != len(key) or twice:
            fault = f'the message has {len(positions)} positions for {len(key)} names'
            if twice:
                fault = f"the message names '{twice}' twice; mend the node that publishes it"
            self.malformed += 1
            if len(target):
                self._refused[key] = fault
            return
        if not len(target):
            return
        if self._refused:
            self._forgive(target)
        if latest_ns is not None and stamp_ns > latest_ns:
            self._ahead[target] = stamp_ns
            soon = stamp_ns - latest_ns <= _SOON_NS
            self._waits = (names, positions, stamp_ns, source) if soon else None
            return
        self._ahead[target] = _NEVER
        self._waits = None
        if '#' in source:
            self.doubled.observe(target, source, stamp_ns)
        if stamp_ns < np.where(self._distrusted[target], _NEVER, self.stamps[target]).max():
            self.out_of_order += 1
            return
        values = np.asarray(positions, dtype=np.float64)[places]
        values = np.where(np.abs(values) <= FURTHEST, values, np.nan)
        if commanded is None and (heard := target[(values != 0.0) & self.at_nothing[target]]).size:
            # A driver that said zeros has heard from its robot.
            self.plausibility.begin_anew(heard)
        returns = self.plausibility.accepts(target, values, stamp_ns, source, commanded)
        if returns is None:
            return
        self._only_zero[target] &= values == 0.0
        self._note_motion(target, values, returns, stamp_ns)
        self._came[target] = values
        self.positions[target] = values
        if angles:
            self._note_turns(angles)
        self.stamps[target] = stamp_ns
        self._distrusted[target] = False
        measured = self.stamps[self._columns.has_feedback]
        self._oldest, self._newest = int(measured.min()), int(measured.max())

    def _note_motion(
        self, target: np.ndarray, values: np.ndarray, returns: np.ndarray, stamp_ns: int
    ) -> None:
        """Note which of these columns moved, and since when the others have not."""
        step = np.abs(values - self._came[target])
        if self._columns.any_continuous:
            # A driver that wraps angles stays within a turn: so may this step be none.
            angles = self._columns.is_continuous[target]
            angles = angles & (np.maximum(np.abs(values), np.abs(self._came[target])) <= ONE_TURN)
            step[angles] = np.minimum(step[angles], np.abs(_FULL_TURN - step[angles]))
        step[returns] = 0.0
        self.largest_step[target] = np.fmax(step, self.largest_step[target])
        # Not near its place either where there is none.
        moved = ~(np.abs(values - self._place[target]) <= self._noise[target]) | returns
        self.samples[target] += 1
        if moved.any():
            at = target[moved]
            self._place[at] = values[moved]
            self.since_ns[at] = stamp_ns
            self.samples[at] = 0

    def still_for(self, seconds: float | np.ndarray) -> np.ndarray:
        """Return which columns (bool) have stayed for so long, by stamps of over two messages."""
        return (self.stamps - self.since_ns >= np.round(seconds * 1e9)) & (self.samples >= 3)

    def take_waiting(self, latest_ns: int, commanded: np.ndarray | None) -> None:
        """Take the last message if it was a little ahead of the clock, once its time has come."""
        if self._waits is not None and self._waits[2] <= latest_ns:
            names, positions, stamp_ns, source = self._waits
            self.observe(names, positions, stamp_ns, source, latest_ns, commanded)

    def ahead(self, latest_ns: int) -> tuple[int, list[str]] | None:
        """Return the newest stamp of the future and what measures its columns; None without one."""
        newest = int(self._ahead.max(initial=_NEVER))
        if newest <= latest_ns - _AHEAD_COUNTS_NS:
            return None
        return newest, self._columns.measured_by(np.flatnonzero(self._ahead == newest))

    def too_new(self) -> str:
        """Say which column one publisher has not reported for long enough; empty without one."""
        needed = self._columns.has_feedback
        lasted = np.where(needed, self.stamps - self.plausibility.reported_since_ns, REPORTED_NS)
        short = needed & (self.plausibility.reports < REPORTED_SAMPLES)
        short |= lasted < REPORTED_NS
        if not short.any():
            return ''
        worst = int(np.argmin(np.where(short, lasted, REPORTED_NS)))
        return (
            f"the position of '{self._columns.measured_as[worst]}' has been coming from one "
            f'publisher for {lasted[worst] * 1e-9:.2f} s, and a start needs '
            f'{REPORTED_NS * 1e-9:g} s of it: call ~/start again'
        )

    @property
    def at_nothing(self) -> np.ndarray:
        """Columns (bool) that have only ever been at exactly zero; None where they are few.

        A driver that has not heard from its robot yet says zeros.
        """
        count, of = int(self._only_zero.sum()), int(self._columns.has_feedback.sum())
        many = count >= _ZEROS and 2 * count > of
        return self._only_zero if many else np.zeros_like(self._only_zero)

    def trust(self, columns: np.ndarray) -> None:
        """Believe that these columns (columns,) bool are where they are said to be."""
        self.plausibility.trust(columns)
        self._only_zero[columns] = False

    def _map(self, names: tuple[str, ...]) -> _Mapping:
        pairs = [(at, self._index[name]) for at, name in enumerate(names) if name in self._index]
        counted = Counter(column for _, column in pairs)
        twice = next(
            (self._columns.measured_as[c] for c, count in counted.items() if count > 1), ''
        )
        if len(self._maps) >= _SOURCES_KEPT:
            self._maps.clear()
            self._refused.clear()
        target = np.array([column for _, column in pairs], dtype=np.int64)
        found = _Mapping(
            source=np.array([at for at, _ in pairs], dtype=np.int64),
            target=target,
            angles=tuple(int(at) for at in target if self._columns.is_continuous[at]),
            twice=twice,
        )
        self._maps[names] = found
        return found

    def _forgive(self, target: np.ndarray) -> None:
        """Forget the refusals of messages that bring any of these columns."""
        self._refused = {
            key: fault
            for key, fault in self._refused.items()
            if not np.isin(self._maps[key].target, target).any()
        }

    def _note_turns(self, angles: tuple[int, ...]) -> None:
        """Note which of these columns show by their numbers that the driver wraps angles."""
        for at in angles:
            came = self._came.item(at)
            if math.isnan(came):
                continue
            # Not after the first, whose predecessor is not a number.
            self._jumped[at] |= abs(came - self._before[at]) > 0.5 * _FULL_TURN
            self._before[at] = came
            lowest, highest = min(self._lowest[at], came), max(self._highest[at], came)
            self._lowest[at], self._highest[at] = lowest, highest
            counts = max(highest - lowest, highest, -lowest) > ONE_TURN
            self.plausibility.counts[at] = counts
            self._wraps[at] = self._jumped[at] and not counts

    def near(self, reference: np.ndarray | None) -> np.ndarray:
        """Return the positions (columns,), angles that are wrapped counted nearest to a reference.

        Without a reference as the driver counts them.
        """
        if reference is None:
            return self._came.copy()
        turns = np.round((reference - self._came) / _FULL_TURN)
        return np.where(self._wraps, self._came + np.nan_to_num(turns) * _FULL_TURN, self.positions)

    def bring_near(self, reference: np.ndarray) -> None:
        """Count whole turns of wrapped angles so that they lie nearest to the reference."""
        where = self._wraps
        turns = np.round((reference[where] - self._came[where]) / _FULL_TURN)
        self.positions[where] = self._came[where] + np.nan_to_num(turns) * _FULL_TURN

    def carry_on(self, columns: np.ndarray, ways: np.ndarray) -> None:
        """Add to the measured positions of these columns the ways gone since their stamps."""
        self.positions[columns] = self._came[columns] + ways
