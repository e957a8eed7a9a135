"""Trajectories for `joint_trajectory_controller`: a straight line on arrival, or the delayed way.

The line goes from the last command to this one, in a control period, and begins when the message
arrives. Every subscriber understands it. But a period of 10 ms does not fit a controller's cycles
at 250 Hz, and every late message is a standstill: the speed ripples.

The delayed way needs the rules of `joint_trajectory_controller`. It holds the last commands and
this one, each due one delay after its tick. The controller follows them by its own clock, whenever
the message arrives. A last line goes on for one period at the same velocity, so that a message may
be late by that much, and a velocity interface reads the right velocity.

Where the controller interpolates with splines, points have velocities too, and after the last line
comes a tail that brakes to a stop as fast as the acceleration limits allow: the end of an executor
that stalls or is killed.

Where the controller has another clock, or scales the time of its trajectories, the same way begins
on arrival, from where the controller should be by then, its points as close as the scaling says.

Invariants of the delayed way:
- every setpoint that the controller reads lies between two commands, or on the last line or the
  tail, which keep to the position limits; the line keeps the velocity of the last command;
- the first point lies in the past when the message arrives: to one that lies ahead the controller
  would go from the measured position;
- what the controller has begun stays as it was sent. Where it has begun the last line or the tail,
  because this command is late, the way goes on from there, ahead of the commands. They catch up
  while they move, and the way never turns round for it;
- the last point has no velocity: the controller would refuse it.
"""

from __future__ import annotations

import array
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration, Time
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

_SECOND_NS = 1_000_000_000
# A command may come so late, from the tick to the controller, before the last line is begun.
_LATE_NS = 5_000_000
# From a tick to the cycle of the controller that takes its message, as a rule.
_ARRIVAL_NS = 1_000_000
_LEAST_NS = 100_000
# Times of points must ascend, also where the time of the trajectory stands still.
_SLOWEST = 0.02
# A tail takes at least this long; the controller's time has nanoseconds.
_SHORTEST_TAIL_NS = 1_000_000
# Shares of a command's own motion by which the way slows down for commands behind it, and speeds up
# for commands that come towards it.
_WAITS, _HURRIES = 0.5, 0.1
# The lead shrinks over this time, and by this share of the motion at least.
_CATCHES_UP_NS, _AT_LEAST = 100_000_000, 0.01


def float_view(message: Any, field: str, count: int) -> np.ndarray:
    """Size a `float64[]` field and look at its memory: (count,) float64, writable.

    Taken from the message after the assignment, because assigning may copy.
    """
    setattr(message, field, array.array('d', bytes(8 * count)))
    return np.frombuffer(getattr(message, field), dtype=np.float64)


@dataclass(frozen=True)
class TrajectoryController:
    """A subscriber that is known to be a `joint_trajectory_controller`.

    Attributes:
        update_period_s: seconds between two of its cycles. It reads its trajectory one ahead.
        splines: it is known to go through the velocities of the points, too.
    """

    update_period_s: float
    same_clock: bool
    splines: bool = False


@dataclass(frozen=True)
class WayLimits:
    """Limits of an output's joints, in the units of its messages.

    Attributes:
        lowest, highest: (joints,) positions, infinite where there are none.
        acceleration: (joints,) largest of a tail, infinite where there is none.
    """

    lowest: np.ndarray
    highest: np.ndarray
    acceleration: np.ndarray

    @classmethod
    def none(cls, count: int) -> WayLimits:
        return cls(np.full(count, -np.inf), np.full(count, np.inf), np.full(count, np.inf))


class LineOnArrival:
    """The two points of every message; see the module's docstring."""

    def __init__(self, count: int, period_s: float) -> None:
        self.points = [JointTrajectoryPoint(), JointTrajectoryPoint()]
        self._begin, self._end = (float_view(p, 'positions', count) for p in self.points)
        _set(self.points[1].time_from_start, round(period_s * _SECOND_NS))

    def fill(self, message: JointTrajectory, before: np.ndarray, now: np.ndarray) -> None:
        """Write the way from the last command to this one, each (joints,)."""
        np.copyto(self._begin, before)
        np.copyto(self._end, now)
        message.header.stamp = Time()


class DelayedWay:
    """The way of the commands, a part of it in every message; see the module's docstring.

    Args:
        splines: points have velocities, and a tail.
    """

    def __init__(
        self,
        count: int,
        period_s: float,
        update_period_s: float,
        limits: WayLimits,
        *,
        splines: bool = False,
    ) -> None:
        self._period_ns = round(period_s * _SECOND_NS)
        self._update_ns = round(update_period_s * _SECOND_NS)
        self._delay_ns = self._period_ns + self._update_ns + max(self._period_ns // 2, _LATE_NS)
        self._limits, self._splines = limits, splines
        knots = math.ceil(self._delay_ns / self._period_ns) + 2
        self._knots = np.zeros((knots, count))
        self._due_ns = [0] * knots
        self._command = np.zeros(count)
        # A nanosecond, as the other velocities here.
        self._rate = np.zeros(count)
        # How far the way is ahead of the commands.
        self._ahead = np.zeros(count)
        self._at_ns = 0
        self._line_end, self._stop = np.zeros(count), np.zeros(count)
        self._end_rate = np.zeros(count)
        self._tail_ns = _SHORTEST_TAIL_NS
        self._slopes = np.zeros((knots, count))
        # The tail has a point more.
        self.points = [JointTrajectoryPoint() for _ in range(knots + 1 + splines)]
        self._views = [float_view(point, 'positions', count) for point in self.points]
        self._speeds: list[np.ndarray] = []
        if splines:
            self._speeds = [float_view(point, 'velocities', count) for point in self.points]

    def begin(self, position: np.ndarray, at_ns: int) -> None:
        """Stand at a position (joints,) up to now: the way begins here."""
        self._knots[:] = position
        for index in range(len(self._due_ns)):
            back = len(self._due_ns) - 1 - index
            self._due_ns[index] = at_ns + self._delay_ns - (back + 1) * self._period_ns
        np.copyto(self._command, position)
        self._rate[:] = 0.0
        self._ahead[:] = 0.0
        self._slopes[:] = 0.0
        self._at_ns = at_ns - self._period_ns
        self._find_end()

    def fill(
        self,
        message: JointTrajectory,
        now: np.ndarray,
        at_ns: int,
        *,
        same_clock: bool,
        scaling: float,
    ) -> None:
        """Write the way up to this command.

        Args:
            message: its points are `points`.
            now: (joints,) the command, computed for `at_ns` on the ROS clock.
            scaling: trajectory time per time in the controller.
        """
        if at_ns < self._at_ns - self._delay_ns:
            # The clock was set back: what was sent is due in a time that is far away.
            self.begin(now, at_ns)
        read_ns = max(at_ns, self._at_ns) + self._update_ns + _ARRIVAL_NS
        # While the clock stands still a command is sent again and again.
        if at_ns > self._at_ns or not np.array_equal(now, self._command):
            at_ns = max(at_ns, self._at_ns + _LEAST_NS)
            self._go_on_from_end(read_ns)
            begun = read_ns > self._due_ns[-2]
            self._append(now, at_ns)
            self._find_end()
            if self._splines:
                self._find_slopes(begun=begun)
        if same_clock and scaling == 1.0:
            self._write_stamped(message)
        else:
            self._write_on_arrival(message, read_ns, max(scaling, _SLOWEST))

    def _append(self, now: np.ndarray, at_ns: int) -> None:
        moved = now - self._command
        if self._ahead.any():
            share = min((at_ns - self._at_ns) / _CATCHES_UP_NS, 1.0)
            most = np.where(moved * self._ahead > 0.0, _WAITS, _HURRIES) * np.abs(moved)
            waits = share * np.abs(self._ahead) + _AT_LEAST * np.abs(moved)
            np.minimum(waits, most, out=waits)
            self._ahead -= np.clip(self._ahead, -waits, waits)
        self._knots[:-1] = self._knots[1:]
        np.add(now, self._ahead, out=self._knots[-1])
        self._due_ns.append(at_ns + self._delay_ns)
        del self._due_ns[0]
        np.divide(moved, max(at_ns - self._at_ns, self._period_ns // 2), out=self._rate)
        np.copyto(self._command, now)
        self._at_ns = at_ns

    def _find_end(self) -> None:
        last, end, rate = self._knots[-1], self._line_end, self._end_rate
        # A robot that is found outside its limits is not drawn inside by a line.
        lowest = np.minimum(self._limits.lowest, last)
        highest = np.maximum(self._limits.highest, last)
        np.multiply(self._rate, self._period_ns, out=end)
        end += last
        np.clip(end, lowest, highest, out=end)
        if not self._splines:
            return
        np.copyto(rate, self._rate)
        room = np.where(rate > 0.0, highest - end, end - lowest)
        rate[room <= 0.0] = 0.0
        moves = rate != 0.0
        tail_ns = 0.0
        if moves.any():
            speed = np.abs(rate[moves])
            wanted = speed * (_SECOND_NS**2) / self._limits.acceleration[moves]
            # The way of a tail is half of its time at the velocity that it begins with.
            tail_ns = min(wanted.max(), (2.0 * room[moves] / speed).min())
        self._tail_ns = max(round(tail_ns), _SHORTEST_TAIL_NS)
        np.multiply(rate, 0.5 * self._tail_ns, out=self._stop)
        self._stop += end
        np.clip(self._stop, lowest, highest, out=self._stop)

    def _go_on_from_end(self, read_ns: int) -> None:
        """Replace the last knot, where the controller is past it, by where the controller is."""
        past_ns = read_ns - self._due_ns[-1]
        if past_ns <= 0:
            return
        on_line_ns = min(past_ns, self._period_ns)
        self._knots[-1] += on_line_ns / self._period_ns * (self._line_end - self._knots[-1])
        if self._splines:
            on_tail_ns = min(past_ns - on_line_ns, self._tail_ns)
            share = on_tail_ns / self._tail_ns
            self._knots[-1] += self._end_rate * on_tail_ns * (1.0 - 0.5 * share)
            np.multiply(self._end_rate, 1.0 - share, out=self._slopes[-1])
            np.subtract(self._knots[-1], self._command, out=self._ahead)
        self._due_ns[-1] = read_ns

    def _find_slopes(self, *, begun: bool) -> None:
        """Find the velocities of the last two knots; with `begun` only of the last one.

        Of parabolas through the knots beside them, limited so that splines stay between the knots
        (Fritsch and Carlson, Monotone Piecewise Cubic Interpolation, 1980).
        """
        slopes, spans = self._slopes, np.diff(self._due_ns[-3:])
        before, last = np.diff(self._knots[-3:], axis=0) / spans[:, None]
        line = (self._line_end - self._knots[-1]) / self._period_ns
        slopes[:-1] = slopes[1:]
        if begun:
            lowest, highest = np.minimum(3.0 * last, 0.0), np.maximum(3.0 * last, 0.0)
            np.clip(slopes[-2], lowest, highest, out=slopes[-2])
        else:
            slopes[-2] = _slope(before, spans[0], last, spans[1])
        slopes[-1] = _slope(last, spans[1], line, self._period_ns)

    def _write_end(self, ends_ns: int, scaling: float) -> None:
        """Write the last line and the tail; the line ends so long after the first point."""
        line = len(self._knots)
        np.copyto(self._views[line], self._line_end)
        _set(self.points[line].time_from_start, ends_ns)
        if self._splines:
            np.multiply(self._end_rate, _SECOND_NS / scaling, out=self._speeds[line])
            np.copyto(self._views[line + 1], self._stop)
            stops_ns = ends_ns + round(scaling * self._tail_ns)
            _set(self.points[line + 1].time_from_start, stops_ns)

    def _write_stamped(self, message: JointTrajectory) -> None:
        # In the past, also after commands that were sent one upon another.
        first_ns = min(self._due_ns[0], self._at_ns - self._period_ns)
        seconds, nanoseconds = divmod(first_ns, _SECOND_NS)
        message.header.stamp = Time(sec=seconds, nanosec=nanoseconds)
        for view, knot in zip(self._views, self._knots, strict=False):
            np.copyto(view, knot)
        for point, due_ns in zip(self.points[1:], self._due_ns[1:], strict=False):
            _set(point.time_from_start, due_ns - first_ns)
        if self._splines:
            for speed, slope in zip(self._speeds, self._slopes, strict=False):
                np.multiply(slope, _SECOND_NS, out=speed)
        self._write_end(self._due_ns[-1] + self._period_ns - first_ns, 1.0)

    def _write_on_arrival(self, message: JointTrajectory, read_ns: int, scaling: float) -> None:
        """Write the way from where the controller is at `read_ns`, to begin on arrival."""
        message.header.stamp = Time()
        here, slope, passed = self._where(read_ns)
        for index in range(passed):
            np.copyto(self._views[index], here)
            _set(self.points[index].time_from_start, self._update_ns * index // (passed - 1))
        for index in range(passed, len(self._due_ns)):
            np.copyto(self._views[index], self._knots[index])
            ahead_ns = round(scaling * (self._due_ns[index] - read_ns))
            _set(self.points[index].time_from_start, self._update_ns + ahead_ns)
        if self._splines:
            per_s = _SECOND_NS / scaling
            for speed in self._speeds[: passed - 1]:
                speed[:] = 0.0
            np.multiply(slope, per_s, out=self._speeds[passed - 1])
            for index in range(passed, len(self._due_ns)):
                np.multiply(self._slopes[index], per_s, out=self._speeds[index])
        ahead_ns = round(scaling * (self._due_ns[-1] + self._period_ns - read_ns))
        self._write_end(self._update_ns + ahead_ns, scaling)

    def _where(self, read_ns: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return (joints,) position and velocity at a time, and the knots before it, at least 2."""
        dues = self._due_ns
        passed = max(sum(due_ns <= read_ns for due_ns in dues), 2)
        begin_ns, end_ns = dues[passed - 1 : passed + 1]
        span_ns = end_ns - begin_ns
        share = min(max((read_ns - begin_ns) / span_ns, 0.0), 1.0)
        begin = self._knots[passed - 1]
        way = self._knots[passed] - begin
        here, slope = begin + share * way, way / span_ns
        if self._splines:
            # The cubic's distance from the line, and its velocity (Hermite).
            first, last = (self._slopes[passed - 1 : passed + 1] - slope) * span_ns
            rest = 1.0 - share
            here += share * rest * (rest * first - share * last)
            slope += (
                rest * (1.0 - 3.0 * share) * first + share * (3.0 * share - 2.0) * last
            ) / span_ns
        return here, slope, passed


def _slope(before: np.ndarray, before_ns: int, after: np.ndarray, after_ns: int) -> np.ndarray:
    """(joints,) velocity between two lines: at most twice the slower, none where they turn."""
    slope = (before * after_ns + after * before_ns) / (before_ns + after_ns)
    most = 2.0 * np.minimum(np.abs(before), np.abs(after))
    most[before * after <= 0.0] = 0.0
    clipped: np.ndarray = np.clip(slope, -most, most)
    return clipped


def _set(duration: Duration, span_ns: int) -> None:
    duration.sec, duration.nanosec = divmod(span_ns, _SECOND_NS)
