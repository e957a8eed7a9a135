"""Measured positions that no motion of the robot can explain.

A servo bus glitch, a reading that is one turn off, or a second node that publishes zeros brings
numbers that the robot cannot have. Nothing may move because of them.
"""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.limits import Limits

# A joint may be pushed or fall faster than it is commanded.
_MARGIN = 1.5
# Drivers stamp what they read by so many seconds unevenly; in a simulated world by the time from
# one clock message to the next.
_STAMP_JITTER_S, _SIMULATED_JITTER_S = 0.01, 0.1
# Noise of an encoder, rad, and at most this share of the joint's range.
_NOISE, _NOISE_SHARE = 0.01, 0.01
# New values that agree with one another for so long are the robot's place after all.
_PERSIST_NS = 500_000_000
_PERSIST_SAMPLES = 5
# After a value that was refused nothing measured is trusted for so long.
DOUBT_NS = 500_000_000
# While values are refused the robot comes to rest: the time since the last good one counts for no
# more than this, or any value would be near enough after a while.
_DOUBT_REACH_NS = 100_000_000
# Samples after a gap of which each may still show that the first one was wrong.
_PROBATION = 5
# A driver that sends seldom has an outage after so many of its intervals.
_SELDOM = 4
_FULL_TURN = 2.0 * math.pi


def noise_of(columns: CommandColumns, limits: Limits) -> np.ndarray:
    """Return the distance below which a joint counts as still, (columns,)."""
    span = limits.upper - limits.lower
    return np.minimum(_NOISE * columns.scale, _NOISE_SHARE * span)


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
    """Judges the values of a message by the last ones that were taken.

    A joint may be as far from its last place as 1.5 times its `velocity` allows in the time
    between the two stamps, and in that between the two before: drivers send unevenly. A joint
    without a `velocity` (the robot file has none without) is not judged. After a gap, where any
    distance may be allowed, a value is refused that lies outside the position limits, or is exactly
    zero, which is what a failed read looks like. Another publisher than before a gap is not
    believed where it puts the robot elsewhere.

    Args:
        columns: the executor's.
        limits: velocities and positions.
        tolerance: (columns,) distance outside its limits at which a robot may be found.
        gap_ns: time without a message that is a gap.
        outage_ns: time without a message in which the robot may have been moved anywhere.
        simulated: stamps are of `/clock`, in a world that may begin anew.

    Attributes:
        doubted_until_ns: nothing measured is to be trusted before this stamp.
        refused: count of refused messages.
        returned: (columns,) bool, columns that came back after an outage, until `forget_returns`.
        taken_over: (columns,) bool, columns whose place was given up for values that had been
            refused and stayed, or that are of another publisher, until `trust_again`. No hold
            follows them there.
    """

    def __init__(
        self,
        columns: CommandColumns,
        limits: Limits,
        tolerance: np.ndarray,
        gap_ns: int,
        outage_ns: int,
        *,
        simulated: bool,
    ) -> None:
        self._columns = columns
        self._speed = _MARGIN * limits.velocity
        self._floor = _NOISE * columns.scale
        self._follows = limits.hold_distance(columns)
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
        self._after_outage = np.zeros(columns.count, dtype=bool)
        self._candidate: _Candidate | None = None
        self._worst = 0
        self._value = self._before = 0.0
        self._source = ''
        self.doubted_until_ns = 0
        self.refused = 0
        self.returned = np.zeros(columns.count, dtype=bool)
        self.taken_over = np.zeros(columns.count, dtype=bool)

    def clear(self) -> None:
        """Compare no stamp with those of before: the clock jumped.

        The robot is where it was, but in a simulated world.
        """
        self._unstamped[:] = True
        if self._simulated:
            self._last[:] = np.nan
        self._candidate = None
        self.doubted_until_ns = 0

    def trust_again(self) -> None:
        """Believe the columns that were taken over: the operator has started the robot."""
        self.taken_over[:] = False

    def forget_returns(self) -> None:
        """Note that the columns that came back after an outage have been seen to."""
        self.returned[:] = False

    def accepts(
        self, target: np.ndarray, values: np.ndarray, stamp_ns: int, source: str
    ) -> np.ndarray | None:
        """Judge a message; return None to refuse it, else which values are the first after a gap.

        Args:
            target: (n,) columns that it brings.
            values: (n,) float64; what is not a number is left to the watchdog.
            stamp_ns: its stamp.
            source: publisher that it came from; '' where that is unknown.
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
        jump, reach = self._jump(target, values, last, elapsed_ns + slack_ns)
        wrong = jump > reach
        first = np.isnan(last)
        begins = returns = (silent_ns > self._gap_ns) | first
        if self._candidate is not None and not returns.any():
            wrong |= self._goes_on(self._candidate, target, values, jump)
        if returns.any():
            outside = (values < self._lower[target]) | (values > self._upper[target])
            failed = (values == 0.0) & (last != 0.0)
            wrong |= returns & (jump > self._follows[target]) & (outside | failed)
        if wrong.any():
            worst = int(np.argmax(np.where(wrong, jump / reach, -1.0)))
            if (self._since_gap[target[wrong]] < _PROBATION).all():
                # The first sample after the gap was wrong, or this one is: this one is newer.
                returns = wrong
            elif self._persists(target, wrong, values, stamp_ns, source):
                self.taken_over[target[wrong]] = True
                self.doubted_until_ns = 0
            else:
                self._refuse(int(target[worst]), values[worst], last[worst], source, stamp_ns)
                return None
        elif self._candidate is not None and np.isin(target, self._candidate.target).any():
            self._candidate = None
        if begins.any():
            away = begins & ~first & (jump > self._follows[target])
            self._note_return(target, values, away, source)
            outage_ns = np.maximum(self._outage_ns, _SELDOM * interval_ns)
            self._after_outage[target[begins]] = (silent_ns > outage_ns)[begins]
            self._since_gap[target[begins & ~first]] = 0
        self.returned[target] |= returns & self._after_outage[target]
        self._take(target, values, stamp_ns, source)
        return returns

    def _note_return(
        self, target: np.ndarray, values: np.ndarray, away: np.ndarray, source: str
    ) -> None:
        """Do not believe another publisher that puts joints elsewhere than they were."""
        for at in np.flatnonzero(away):
            column = int(target[at])
            before = self._sources[column]
            if '#' in source and before and before != source:
                self.taken_over[column] = True
                self._worst, self._value, self._source = column, float(values[at]), source
                self._before = float(self._last[column])

    def _jump(
        self, target: np.ndarray, values: np.ndarray, last: np.ndarray, elapsed_ns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the distances from the last values, and those that the time allows."""
        jump = values - last
        if self._columns.any_continuous:
            angles = self._columns.is_continuous[target]
            jump[angles] -= _FULL_TURN * np.round(jump[angles] / _FULL_TURN)
        reach = self._speed[target] * (elapsed_ns * 1e-9 + self._jitter_s) + self._floor[target]
        return np.abs(jump), reach

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
        jump, reach = self._jump(target, values, candidate.values, elapsed_ns)
        if (jump > reach).any() or elapsed_ns[0] > self._gap_ns:
            self._candidate = _Candidate(source, target, wrong, values, stamp_ns)
            return False
        candidate.wrong = wrong
        candidate.values, candidate.last_ns = values, stamp_ns
        candidate.samples += 1
        if candidate.samples < _PERSIST_SAMPLES or stamp_ns - candidate.first_ns < _PERSIST_NS:
            return False
        self._candidate = None
        return True

    def _refuse(self, column: int, value: float, before: float, source: str, stamp_ns: int) -> None:
        self.refused += 1
        self.doubted_until_ns = stamp_ns + DOUBT_NS
        self._worst, self._value, self._before = column, value, before
        self._source = source

    def _take(self, target: np.ndarray, values: np.ndarray, stamp_ns: int, source: str) -> None:
        known = ~np.isnan(values)
        if known.all():
            self._last[target] = values
        else:
            self._last[target[known]] = values[known]
        self._stamps[target] = stamp_ns
        self._since_gap[target] += 1
        # All columns of a message share its publisher.
        if self._sources[int(target[0])] != source:
            for column in target.tolist():
                self._sources[column] = source

    def describe(self) -> str:
        """Name the joint, the value and the topic of the newest refused message."""
        name, source = self._columns.names[self._worst], self._source.split('#')[0]
        where = f' on {source}' if source else ''
        return (
            f"'{name}' was at {self._before:.4g} and is said to be at {self._value:.4g}{where}, "
            'which is further than it can have moved: the reading is wrong, or a second node '
            'publishes this joint'
        )
