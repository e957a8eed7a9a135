"""Trajectories for `joint_trajectory_controller`: a straight line on arrival, or the delayed way.

The line goes from the last command to this one, in a control period, and begins when the message
arrives. Every subscriber understands it. But ten milliseconds do not fit the cycles of a controller
at 250 Hz, and every late message is a stand-still: the speed ripples.

The delayed way needs the rules of `joint_trajectory_controller`. It is made of the last commands
and this one, each at the time when it is due: one delay after the tick that it was computed for.
The controller goes from one to the next by its own clock, whenever the message arrives, and so
moves as the commands do. A last line goes on for one period at the same velocity: a message that is
late by less is not felt, and a velocity interface reads the right velocity.

Where the controller has another clock, or lets the time of its trajectories pass more slowly (speed
scaling), the same way begins on arrival, from where the controller should be by then. Its points
lie closer together as the scaling says: commands slow down by themselves.

Invariants of the delayed way:
- every setpoint that the controller reads lies between two commands, or on the last line, which
  keeps to the velocity of the last command and to the position limits;
- the first point lies in the past when the message arrives: to one that lies ahead the controller
  would go from the measured position;
- what the controller has begun stays as it was sent. Where the last line was begun, because this
  command is late, the way goes on from there;
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
        update_period_s: seconds between two of its cycles. A cycle reads its trajectory where the
            next one will be.
        same_clock: its clock is the executor's.
    """

    update_period_s: float
    same_clock: bool


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
        count: number of joints.
        period_s: control period.
        update_period_s: seconds between two cycles of the controller.
        lowest, highest: (joints,) position limits, infinite where there are none.

    Attributes:
        points: points of the message.
    """

    def __init__(
        self,
        count: int,
        period_s: float,
        update_period_s: float,
        lowest: np.ndarray,
        highest: np.ndarray,
    ) -> None:
        self._period_ns = round(period_s * _SECOND_NS)
        self._update_ns = round(update_period_s * _SECOND_NS)
        self._delay_ns = self._period_ns + self._update_ns + max(self._period_ns // 2, _LATE_NS)
        self._bounds = lowest, highest
        knots = math.ceil(self._delay_ns / self._period_ns) + 2
        self._knots = np.zeros((knots, count))
        self._due_ns = [0] * knots
        self._command = np.zeros(count)
        self._rate = np.zeros(count)
        self._at_ns = 0
        self.points = [JointTrajectoryPoint() for _ in range(knots + 1)]
        self._views = [float_view(point, 'positions', count) for point in self.points]

    def begin(self, position: np.ndarray, at_ns: int) -> None:
        """Stand at a position (joints,) up to now: the way begins here."""
        self._knots[:] = position
        for index in range(len(self._due_ns)):
            back = len(self._due_ns) - 1 - index
            self._due_ns[index] = at_ns + self._delay_ns - (back + 1) * self._period_ns
        np.copyto(self._command, position)
        self._rate[:] = 0.0
        self._at_ns = at_ns - self._period_ns

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
            now: (joints,) the command.
            at_ns: time that it was computed for, ROS clock.
            same_clock: the controller's clock is the executor's.
            scaling: trajectory time per time in the controller.
        """
        if at_ns < self._at_ns - self._delay_ns:
            # The clock was set back: what was sent is due in a time that is far away.
            self.begin(now, at_ns)
        read_ns = max(at_ns, self._at_ns) + self._update_ns + _ARRIVAL_NS
        # While the clock stands still a command is sent again and again.
        if at_ns > self._at_ns or not np.array_equal(now, self._command):
            at_ns = max(at_ns, self._at_ns + _LEAST_NS)
            self._go_on_from_last_line(read_ns)
            self._append(now, at_ns)
        if same_clock and scaling == 1.0:
            self._write_stamped(message)
        else:
            self._write_on_arrival(message, read_ns, max(scaling, _SLOWEST))

    def _append(self, now: np.ndarray, at_ns: int) -> None:
        self._knots[:-1] = self._knots[1:]
        self._knots[-1] = now
        self._due_ns.append(at_ns + self._delay_ns)
        del self._due_ns[0]
        np.subtract(now, self._command, out=self._rate)
        self._rate /= max(at_ns - self._at_ns, self._period_ns // 2)
        np.copyto(self._command, now)
        self._at_ns = at_ns

    def _go_on_from_last_line(self, read_ns: int) -> None:
        """Replace the last knot, where the controller is past it, by where the controller is."""
        past_ns = read_ns - self._due_ns[-1]
        if past_ns > 0:
            self._knots[-1] = self._ahead(min(past_ns, self._period_ns))
            self._due_ns[-1] = read_ns

    def _ahead(self, span_ns: int) -> np.ndarray:
        """(joints,) where the last line is so long after the last command is due."""
        lowest, highest = self._bounds
        ahead = self._command + self._rate * span_ns
        # A robot that is found outside its limits is not drawn inside by a line.
        return np.clip(ahead, np.minimum(lowest, self._command), np.maximum(highest, self._command))

    def _write_stamped(self, message: JointTrajectory) -> None:
        # In the past, also after commands that were sent one upon another.
        first_ns = min(self._due_ns[0], self._at_ns - self._period_ns)
        seconds, nanoseconds = divmod(first_ns, _SECOND_NS)
        message.header.stamp = Time(sec=seconds, nanosec=nanoseconds)
        for view, knot in zip(self._views, self._knots, strict=False):
            np.copyto(view, knot)
        np.copyto(self._views[-1], self._ahead(self._period_ns))
        for point, due_ns in zip(self.points[1:-1], self._due_ns[1:], strict=True):
            _set(point.time_from_start, due_ns - first_ns)
        _set(self.points[-1].time_from_start, self._due_ns[-1] + self._period_ns - first_ns)

    def _write_on_arrival(self, message: JointTrajectory, read_ns: int, scaling: float) -> None:
        """Write the way from where the controller is at `read_ns`, to begin on arrival."""
        message.header.stamp = Time()
        here, passed = self._where(read_ns)
        for index in range(passed):
            np.copyto(self._views[index], here)
            _set(self.points[index].time_from_start, self._update_ns * index // (passed - 1))
        for index in range(passed, len(self._due_ns)):
            np.copyto(self._views[index], self._knots[index])
            ahead_ns = round(scaling * (self._due_ns[index] - read_ns))
            _set(self.points[index].time_from_start, self._update_ns + ahead_ns)
        np.copyto(self._views[-1], self._ahead(self._period_ns))
        ahead_ns = round(scaling * (self._due_ns[-1] + self._period_ns - read_ns))
        _set(self.points[-1].time_from_start, self._update_ns + ahead_ns)

    def _where(self, read_ns: int) -> tuple[np.ndarray, int]:
        """(joints,) where the way is at a time, and the number of knots up to there, at least 2."""
        dues = self._due_ns
        passed = max(sum(due_ns <= read_ns for due_ns in dues), 2)
        begin_ns, end_ns = dues[passed - 1 : passed + 1]
        share = min(max((read_ns - begin_ns) / (end_ns - begin_ns), 0.0), 1.0)
        here = self._knots[passed - 1] + share * (self._knots[passed] - self._knots[passed - 1])
        return here, passed


def _set(duration: Duration, span_ns: int) -> None:
    duration.sec, duration.nanosec = divmod(span_ns, _SECOND_NS)
