"""Measured positions that no motion of the robot can explain: nothing may move because of them."""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.execution.column_model import ColumnModel

# --- Joints that two publishers bring at the same time


# Turns of two publishers, in so short a time, that no restart explains.
_TURNS = 2
_WITHIN_NS = 10_000_000_000
# Two publishers that took turns are believed to be there for so long after the last turn.
_STAYS_NS = 3_000_000_000


class DoubledJoints:
    """Finds joints whose publishers take turns, as far as is known before `until_ns`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        # Publisher of the newest message of each column, and the one that it took over from.
        self._newest = [''] * len(names)
        self._before = [''] * len(names)
        self._turns = [0] * len(names)
        self._first_ns = [0] * len(names)
        self._found = 0
        self.until_ns = 0

    def clear(self) -> None:
        """Forget all turns: the clock jumped."""
        self._turns = [0] * len(self._names)
        self.until_ns = 0

    def observe(self, target: np.ndarray, source: str, stamp_ns: int) -> None:
        """Take note of who published these columns."""
        first = int(target[0])
        # All columns of a message share its publisher: mostly there is nothing to note.
        if not source or (self._newest[first] == source and len(target) == 1):
            return
        for at in target.tolist():
            newest = self._newest[at]
            if newest == source:
                continue
            if self._before[at] == source:
                self._count_turn(at, stamp_ns)
            self._newest[at], self._before[at] = source, newest

    def _count_turn(self, at: int, stamp_ns: int) -> None:
        if not 0 <= stamp_ns - self._first_ns[at] <= _WITHIN_NS:
            self._first_ns[at], self._turns[at] = stamp_ns, 0
        self._turns[at] += 1
        if self._turns[at] >= _TURNS:
            self._first_ns[at] = stamp_ns
            self._found = at
            self.until_ns = stamp_ns + _STAYS_NS

    def describe(self) -> str:
        """Name the joint that was found last, and the topics of its publishers."""
        at = self._found
        topics = sorted({source.split('#')[0] for source in (self._newest[at], self._before[at])})
        return (
            f"two nodes publish the position of '{self._names[at]}' on {' and '.join(topics)}: "
            'which of them is right is unknown; end one of them, and call ~/start'
        )


# --------------------------------------------------------------------------------------------------

# A joint may be pushed or fall faster than it is commanded.
_MARGIN = 1.5
# Unevenness of a driver's stamps, seconds; in a simulated world of the clock messages.
_STAMP_JITTER_S, _SIMULATED_JITTER_S = 0.01, 0.1
# Noise of an encoder, rad.
_NOISE = 0.01
# New values that agree with one another for so long are the robot's place after all.
_PERSIST_NS = 500_000_000
_PERSIST_SAMPLES = 5
# After a value that was refused nothing measured is trusted for so long.
DOUBT_NS = 500_000_000
# While values are refused the time since the last good one counts for no more than this, or any
# value would be near enough after a while.
_DOUBT_REACH_NS = 100_000_000
# Samples after a gap of which each may still show that the first one was wrong.
_PROBATION = 5
# A driver that sends seldom has an outage after so many of its intervals.
_SELDOM = 4
# One that sends seldom has lost a message after so many of its intervals.
_LOST = 2
# A joint found elsewhere after an outage, or after a shorter gap, rests there for so long before a
# hold comes to it.
_RESTS_S, _RESTS_AFTER_GAP_S = 0.5, 2.0
# No hand, and no fall, accelerates a joint by more, rad/s2. What jumps further was not seen going.
_SWIFTEST = 15.0
# One publisher has reported a joint for so long, and by so many messages, before a start.
REPORTED_NS, REPORTED_SAMPLES = 500_000_000, 3
_FULL_TURN = 2.0 * math.pi
# A driver that wraps stays within one turn; so much beyond is rounding.
ONE_TURN = _FULL_TURN + 0.01


def _way(to: np.ndarray, last: np.ndarray, wraps: np.ndarray | None) -> np.ndarray:
    """Return the ways (n,) from the last values, without whole turns where these are wrapped."""
    way = to - last
    if wraps is not None:
        way[wraps] -= _FULL_TURN * np.round(way[wraps] / _FULL_TURN)
    return way


class _Candidate:
    """Values that were refused, and agree with one another so far."""

    def __init__(
        self,
        source: str,
        target: np.ndarray,
        wrong: np.ndarray,
        values: np.ndarray,
        stamp_ns: int,
    ) -> None:
        self.source = source
        self.wrong = wrong
        self.target = target
        self.values = values
        self.first_ns = self.last_ns = stamp_ns
        self.samples = 1


class Plausibility:
    """Judges the values of a message by the last ones that were accepted.

    A joint may be as far from its last place as 1.5 times its `velocity` allows in the time between
    the two stamps, and in that between the two before: drivers send unevenly. All that lies between
    its last place and its command counts as its last place: a servo bus that repeated an old
    position comes back there. A joint without a `velocity` is not judged. After a gap a value is
    refused that lies outside the position limits, or is exactly zero, as a failed read looks like.

    A way that no joint goes from one message to the next was not seen (`unseen`), whether it was
    refused first or not. It is forgotten where the joint is back, or is where it is commanded.

    Args:
        model: the executor's columns. A robot may be found outside its limits by `tolerance`.
        gap_ns: time without a message that is a gap.
        outage_ns: time without a message in which the robot may have been moved anywhere.
        simulated: stamps are of `/clock`, in a world that may begin anew.

    Attributes:
        doubted_until_ns: nothing measured is to be trusted before this stamp.
        refused: count of refused messages.
        returned: (columns,) bool, found elsewhere after a gap, by the same publisher: a hold comes
            to them once they have rested there for `rests_s`.
        taken_over: (columns,) bool, given up for values that had been refused and stayed, or that
            are of another publisher. No hold follows them there.
        rests_s: (columns,) see `returned`.
        after_gap: (columns,) bool, columns that were not seen near to their command since a gap.
        counts: (columns,) bool, continuous columns whose driver counts turns.
        reported_since_ns: (columns,) stamp since which one publisher has reported each without a
            gap.
        reports: (columns,) int, its messages since then.
    """

    def __init__(
        self,
        model: ColumnModel,
        gap_ns: int,
        outage_ns: int,
        *,
        simulated: bool,
    ) -> None:
        columns, limits, tolerance = model.columns, model.limits, model.tolerance
        self._columns = columns
        self._speed = _MARGIN * limits.velocity
        # Quaternions change their signs at will.
        self._judged = np.isfinite(limits.velocity) & ~columns.in_rotation
        self._floor = _NOISE * columns.scale
        self._swiftest = 0.5 * _SWIFTEST * columns.scale
        self._follows = model.follows
        self._lower = np.where(columns.is_continuous, -np.inf, limits.lower - tolerance)
        self._upper = np.where(columns.is_continuous, np.inf, limits.upper + tolerance)
        self._gap_ns, self._outage_ns = gap_ns, outage_ns
        self._simulated = simulated
        self._jitter_s = _SIMULATED_JITTER_S if simulated else _STAMP_JITTER_S
        self._last = np.full(columns.count, np.nan)
        # Stamps of the last message that was taken, and of the last that came.
        self._stamps = np.zeros(columns.count, dtype=np.int64)
        self._heard = np.zeros(columns.count, dtype=np.int64)
        # Time between the last two messages that came.
        self._interval = np.zeros(columns.count, dtype=np.int64)
        # Publisher of the last message that was taken.
        self._sources = [''] * columns.count
        # The clock jumped: no stamp of before says anything.
        self._unstamped = np.ones(columns.count, dtype=bool)
        self._since_gap = np.full(columns.count, _PROBATION)
        # The last way from message to message, and the sum of those that were not seen.
        self._step = np.zeros(columns.count)
        self._hole = np.zeros(columns.count)
        self._candidate: _Candidate | None = None
        self._worst = 0
        self._value = self._before = 0.0
        self._source = ''
        self.doubted_until_ns = 0
        self.refused = 0
        self.returned = np.zeros(columns.count, dtype=bool)
        self.taken_over = np.zeros(columns.count, dtype=bool)
        self.rests_s = np.full(columns.count, _RESTS_S)
        self.after_gap = np.zeros(columns.count, dtype=bool)
        self.counts = np.zeros(columns.count, dtype=bool)
        self.reported_since_ns = np.zeros(columns.count, dtype=np.int64)
        self.reports = np.zeros(columns.count, dtype=np.int64)

    @property
    def unseen(self) -> np.ndarray:
        """Columns that are said to be where nobody saw them go, (columns,) bool."""
        return self.taken_over | self.returned | (np.abs(self._hole) > self._follows)

    def clear(self) -> None:
        """Compare no stamp with those before a clock jump."""
        self._unstamped[:] = True
        if self._simulated:
            self._last[:] = np.nan
            self.trust(np.ones(len(self._last), dtype=bool))
        self._candidate = None
        self.doubted_until_ns = 0

    def trust(self, columns: np.ndarray) -> None:
        """Believe that these columns, a mask or places, are where they are said to be."""
        self._hole[columns] = 0.0
        self.taken_over[columns] = self.returned[columns] = False

    def begin_anew(self, columns: np.ndarray) -> None:
        """Accept the next values of these places as the first ones."""
        self._last[columns] = np.nan
        self.trust(columns)

    def give_up(self, columns: np.ndarray) -> None:
        """Let no hold come to these columns (columns,) bool: their readings are wrong."""
        self.taken_over |= columns
        self.returned[columns] = False

    def accepts(
        self,
        target: np.ndarray,
        values: np.ndarray,
        stamp_ns: int,
        source: str,
        commanded: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Judge a message; return None to refuse it, else which values are the first after a gap.

        Args:
            target: (n,) columns that it brings.
            values: (n,) float64; what is not a number is left to the watchdog.
            source: publisher that it came from; '' where that is unknown.
            commanded: (columns,) commanded positions, not-a-number where there is none; None before
                the first command.
        """
        last, interval_ns = self._last[target], self._interval[target]
        elapsed_ns = np.abs(stamp_ns - self._stamps[target])
        silent_ns = np.abs(stamp_ns - self._heard[target])
        unstamped = self._unstamped[target]
        if unstamped.any():
            # How much time went by is unknown: a little more than a gap.
            silent_ns[unstamped] = elapsed_ns[unstamped] = self._gap_ns + 1
            self._unstamped[target] = False
        np.minimum(elapsed_ns, silent_ns + _DOUBT_REACH_NS, out=elapsed_ns)
        self._heard[target] = stamp_ns
        self._interval[target] = silent_ns
        slack_ns = np.minimum(interval_ns, _DOUBT_REACH_NS)
        wraps = self._wraps(target, values, last)
        way = _way(values, last, wraps)
        off, near = np.abs(way), np.zeros(len(target), dtype=bool)
        if commanded is not None:
            off, near = self._off(target, way, _way(commanded[target], last, wraps))
        reach = self._reach(target, elapsed_ns + slack_ns)
        wrong = off > reach
        first = np.isnan(last)
        begins = (silent_ns > self._gap_ns) | first
        lost = first | (silent_ns > np.maximum(self._gap_ns, _LOST * interval_ns))
        if self._candidate is not None and not begins.any():
            goes_on = self._goes_on(self._candidate, target, values, np.abs(way))
            wrong |= goes_on & (off > self._follows[target])
        if begins.any():
            outside = (values < self._lower[target]) | (values > self._upper[target])
            failed = (values == 0.0) & (last != 0.0)
            wrong |= begins & (off > self._follows[target]) & (outside | failed)
        stays = np.zeros(len(target), dtype=bool)
        away = begins & ~first & (off > self._follows[target])
        if wrong.any():
            worst = int(np.argmax(np.where(wrong, off / reach, -1.0)))
            self._note(int(target[worst]), values[worst], last[worst], source)
            if (self._since_gap[target[wrong]] < _PROBATION).all():
                # The first sample after the gap was wrong, or this one is: this one is newer.
                away |= wrong
            elif self._persists(target, wrong, values, stamp_ns, source):
                stays = wrong
                self.doubted_until_ns = 0
            else:
                self.refused += 1
                self.doubted_until_ns = stamp_ns + DOUBT_NS
                return None
        elif self._candidate is not None and np.isin(target, self._candidate.target).any():
            self._candidate = None
        if begins.any():
            outage_ns = np.maximum(self._outage_ns, _SELDOM * interval_ns)
            rests_s = np.where(silent_ns > outage_ns, _RESTS_S, _RESTS_AFTER_GAP_S)
            self.rests_s[target[begins]] = rests_s[begins]
            self.after_gap[target[begins & ~first]] = True
            self._since_gap[target[begins & ~first]] = 0
        jumps = stays | away | self._jumps(target, off, silent_ns)
        self._hole[target[jumps]] += way[jumps]
        back = near | (np.abs(self._hole[target]) <= self._follows[target])
        self.trust(target[back])
        self.after_gap[target[near]] = False
        self.taken_over[target[stays & ~back]] = True
        self._note_return(target[away & ~back], source)
        fresh = jumps & ~stays & ~back
        if np.count_nonzero(fresh):
            worst = int(np.argmax(np.where(fresh, np.abs(way), -1.0)))
            self._note(int(target[worst]), values[worst], last[worst], source)
            self.doubted_until_ns = max(self.doubted_until_ns, stamp_ns + DOUBT_NS)
        self._take(target, values, stamp_ns, source, begins=lost)
        self._step[target] = np.nan_to_num(np.abs(way))
        return lost | (wrong & ~stays)

    def _jumps(self, target: np.ndarray, off: np.ndarray, silent_ns: np.ndarray) -> np.ndarray:
        """Return the values (n,) that no joint comes to from one message to the next."""
        seconds = silent_ns * 1e-9
        swift = self._swiftest[target] * seconds * seconds + 2.0 * self._step[target]
        return self._judged[target] & (off > self._follows[target] + swift)

    def _note_return(self, columns: np.ndarray, source: str) -> None:
        """Note which columns (n,) were found elsewhere after a gap, and whether the same say so."""
        for column in columns.tolist():
            before = self._sources[column]
            self.taken_over[column] |= '#' in source and before not in ('', source)
            self.returned[column] = not self.taken_over[column]

    def _wraps(self, target: np.ndarray, values: np.ndarray, last: np.ndarray) -> np.ndarray | None:
        """Return which of two values (n,) a driver that wraps may have a turn apart, if any."""
        if not self._columns.any_continuous:
            return None
        wraps = self._columns.is_continuous[target] & ~self.counts[target]
        return wraps & (np.maximum(np.abs(values), np.abs(last)) <= ONE_TURN)

    def _off(
        self, target: np.ndarray, way: np.ndarray, lead: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how far beside the way to their command (n,) values are, and which are at it."""
        known = ~np.isnan(lead)
        lead = np.where(known, lead, 0.0)
        beside = np.maximum(np.minimum(lead, 0.0) - way, way - np.maximum(lead, 0.0))
        near = known & (np.abs(way - lead) <= self._follows[target])
        return np.maximum(beside, 0.0), near

    def _reach(self, target: np.ndarray, elapsed_ns: np.ndarray) -> np.ndarray:
        return self._speed[target] * (elapsed_ns * 1e-9 + self._jitter_s) + self._floor[target]

    @staticmethod
    def _goes_on(
        candidate: _Candidate, target: np.ndarray, values: np.ndarray, jump: np.ndarray
    ) -> np.ndarray:
        """Return which values are nearer to those that were refused than to the last good ones."""
        if not np.array_equal(candidate.target, target):
            return np.zeros(len(target), dtype=bool)
        return candidate.wrong & (np.abs(values - candidate.values) < jump)

    def _persists(
        self,
        target: np.ndarray,
        wrong: np.ndarray,
        values: np.ndarray,
        stamp_ns: int,
        source: str,
    ) -> bool:
        """Note a refused message; return whether such values have come for long enough."""
        candidate = self._candidate
        if (
            candidate is None
            or candidate.source != source
            or not np.array_equal(candidate.target, target)
        ):
            self._candidate = _Candidate(source, target, wrong, values, stamp_ns)
            return False
        elapsed_ns = np.full(len(target), abs(stamp_ns - candidate.last_ns))
        wraps = self._wraps(target, values, candidate.values)
        jump = np.abs(_way(values, candidate.values, wraps))
        if (jump > self._reach(target, elapsed_ns)).any() or elapsed_ns[0] > self._gap_ns:
            self._candidate = _Candidate(source, target, wrong, values, stamp_ns)
            return False
        candidate.wrong = wrong
        candidate.values, candidate.last_ns = values, stamp_ns
        candidate.samples += 1
        if candidate.samples < _PERSIST_SAMPLES or stamp_ns - candidate.first_ns < _PERSIST_NS:
            return False
        self._candidate = None
        return True

    def _note(self, column: int, value: float, before: float, source: str) -> None:
        self._worst, self._value, self._before = column, value, before
        self._source = source

    def _take(
        self,
        target: np.ndarray,
        values: np.ndarray,
        stamp_ns: int,
        source: str,
        *,
        begins: np.ndarray,
    ) -> None:
        known = ~np.isnan(values)
        if known.all():
            self._last[target] = values
        else:
            self._last[target[known]] = values[known]
        self._stamps[target] = stamp_ns
        self._since_gap[target] += 1
        # All columns of a message share its publisher.
        if self._sources[int(target[0])] != source:
            begins = np.ones(len(target), dtype=bool)
            for column in target.tolist():
                self._sources[column] = source
        self.reports[target] += 1
        if begins.any():
            self.reported_since_ns[target[begins]] = stamp_ns
            self.reports[target[begins]] = 1

    def describe(self) -> str:
        """Name the joint, the value and the topic of the newest refused message."""
        name, source = self._columns.measured_as[self._worst], self._source.split('#')[0]
        where = f' on {source}' if source else ''
        return (
            f"'{name}' was at {self._before:.4g} and is said to be at {self._value:.4g}{where}, "
            'and nobody saw it go there: the reading is wrong, the joint was moved while nothing '
            'was read, the bus repeated an old position for long, or a second node publishes it'
        )

    def describe_unseen(self, columns: np.ndarray) -> str:
        """Name the joint of these columns (bool) that went furthest unseen, and what to look at."""
        ways = np.where(columns, np.abs(self._hole), -1.0) / self._columns.scale
        worst = int(np.argmax(ways))
        others = int(np.count_nonzero(columns)) - 1
        beside = f' ({others} more joints alike)' if others else ''
        topic = self._sources[worst].split('#')[0]
        where = f' on {topic}' if topic else ''
        return (
            f"'{self._columns.measured_as[worst]}' is said to be at {self._last[worst]:.4g}{where}"
            f'{beside}, {abs(self._hole[worst]):.3g} from where it was, and nobody saw it go '
            'there: look at the robot. Where it is not there, mend the driver or the encoder'
        )
