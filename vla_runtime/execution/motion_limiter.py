"""Limits one tick of motion: position, speed, acceleration and distance from the robot."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.command import LimitKind
from vla_runtime.execution.limits import Limits
from vla_runtime.execution.turn_limiter import RotationLimiters

# Stands for 'no limit' where an infinity would turn into not-a-number.
_FAR = 1e9
# Change of a command that a person would care about, as a share of the distance from the measured
# position that is allowed, or of the way that the limit of speed allows in the tick.
_WORTH_COUNTING = 0.01
# The same where neither is limited, in rad, m or per second of them: no encoder sees less.
_ROUNDING = 1e-6
# A robot follows a velocity late. It is braked before a position limit as if by so many seconds.
_LATE_S = 0.2
# Share of the acceleration that a plan may need and still be followed exactly.
_RESERVED = 0.25


class MotionLimiter:
    """Keeps one tick's command inside every limit; owns its scratch arrays.

    Invariants, in this order of importance:
    1. A position never leaves its limits (one that is found outside only moves back inside), and
       never moves further away from the measured one than allowed.
    2. Speed never exceeds its limit, neither from tick to tick nor in the velocity sent beside a
       position.
    3. Acceleration never exceeds its limit, and the approach to a position limit is slowed down
       in time. Exempt are a hold, which stops at once; the distance from the measured position,
       where the robot is pushed away; and the command after a pause (`longest_s`).

    All three hold however uneven the ticks are. The velocity of a tick is its step over the time
    since the last command. It may change by the acceleration times the shorter of this tick and the
    mean of this tick and the last one, so a second difference of the commands stays within the
    limit.

    A target within the limits comes out unchanged, bit by bit. A command that has fallen behind
    closes the distance within the acceleration and does not overshoot (`_find_fastest`).
    `RotationLimiters` limits the columns of a rotation, which comes out at length 1.

    Args:
        longest_s: motion that one command may contain at top speed, in seconds: the robot's
            controller executes each command in about one period, and rests when the next one is
            late.
    """

    def __init__(
        self, limits: Limits, columns: CommandColumns, longest_s: float = math.inf
    ) -> None:
        self._columns = columns
        self._longest_s = longest_s
        self._lower = np.maximum(limits.hard_lower, -_FAR)
        self._upper = np.minimum(limits.hard_upper, _FAR)
        self._turns = RotationLimiters(limits, columns, longest_s)
        acceleration = np.where(columns.in_rotation, np.inf, limits.acceleration)
        self._speed = np.minimum(np.where(columns.in_rotation, np.inf, limits.velocity), _FAR)
        self._acceleration = np.minimum(acceleration, _FAR)
        self._slowest = -self._speed
        self._inverse = 4.0 / acceleration
        self._countable_speed = _WORTH_COUNTING * limits.velocity
        self._accelerates = bool(np.isfinite(acceleration).any())
        self._step = np.where(
            columns.has_feedback & columns.is_position, limits.step_from_measured, np.inf
        )
        self._step_limited = bool(np.isfinite(self._step).any())
        self._countable_step = _WORTH_COUNTING * self._step
        self._countable_step[np.isinf(self._step) & np.isinf(limits.velocity)] = _ROUNDING
        self._highest_speed = limits.velocity
        # A velocity column is stopped at a position limit only where its position is known.
        unguarded = columns.is_velocity & ~columns.has_feedback
        self._lower[unguarded] = -_FAR
        self._upper[unguarded] = _FAR
        # A position may be at most here; a velocity column's value is no position.
        self._lowest = np.where(columns.is_velocity, -_FAR, self._lower)
        self._highest = np.where(columns.is_velocity, _FAR, self._upper)
        self.velocities = np.zeros(columns.count)
        self._late_s = np.where(columns.is_velocity & columns.has_feedback, _LATE_S, 0.0)
        self._last_dt_s = 0.0
        self._ones = np.ones(columns.count)
        self._zeros = np.zeros(columns.count)
        self._limit = np.zeros(columns.count)
        self._result = np.zeros(columns.count)
        self._wanted = np.zeros(columns.count)
        self._next = np.zeros(columns.count)
        self._nearest = np.zeros(columns.count)
        self._farthest = np.zeros(columns.count)
        self._scratch = np.zeros(columns.count)
        self._changed = np.zeros(columns.count, dtype=bool)
        self._countable = np.zeros(columns.count)
        # What the last tick kept to: which columns count as limited, and by what.
        self._limited = np.zeros(columns.count, dtype=bool)
        self._near = False
        self._speed_kept = self._highest_speed
        self._pace = 1.0
        # Rows: the distance to the target, the room to the upper and to the lower limit.
        self._distance = np.zeros((3, columns.count))
        self._fastest = np.zeros((3, columns.count))
        self._roots = np.zeros((3, columns.count))

    def stop(self, dt_s: float = 0.0) -> None:
        """Forget the velocity: the next tick starts from rest.

        `dt_s` is 0 where the time since the last command is unknown.
        """
        self.velocities[:] = 0.0
        self._turns.stop()
        self._last_dt_s = dt_s

    def slowing(self, dt_s: float) -> float:
        """Share of the present velocity that all columns together may lose in a tick of `dt_s`."""
        np.abs(self.velocities, out=self._scratch)
        np.maximum(self._scratch, 1e-12, out=self._scratch)
        np.divide(self._acceleration, self._scratch, out=self._scratch)
        span_s = self._span(dt_s)
        return min(1.0, float(self._scratch.min()) * span_s, self._turns.slowing(span_s))

    def _span(self, dt_s: float) -> float:
        """Seconds for which the velocity may change at full acceleration in a tick of `dt_s`."""
        return min(dt_s, 0.5 * (dt_s + self._last_dt_s))

    @property
    def moving(self) -> bool:
        return bool(np.count_nonzero(self.velocities))

    def outside(self, command: np.ndarray) -> bool:
        return bool(((command < self._lowest) | (command > self._highest)).any())

    def too_far(self, target: np.ndarray, measured: np.ndarray) -> bool:
        if not self._step_limited:
            return False
        np.subtract(target, measured, out=self._scratch)
        np.abs(self._scratch, out=self._scratch)
        np.greater(self._scratch, self._step, out=self._changed)
        return bool(np.count_nonzero(self._changed))

    def apply(
        self,
        command: np.ndarray,
        target: np.ndarray,
        velocity: np.ndarray,
        measured: np.ndarray | None,
        dt_s: float,
        speed: np.ndarray | None = None,
        stay_near: bool = True,
        *,
        at_most: float | None = None,
    ) -> bool:
        """Move `command` towards `target` for one tick, in place.

        Args:
            command: (columns,) what was commanded; overwritten with what is commanded now.
            target: (columns,) what is wanted now, in each column's own kind.
            velocity: (columns,) velocity of the target; overwritten with the command's velocity.
            measured: (columns,) measured positions, finite; None where they are not to be trusted:
                then a velocity column keeps the limits of speed and acceleration alone.
            dt_s: seconds since the last command, larger than 0.
            speed: (columns,) a lower speed that is wanted; reached within the acceleration. In the
                columns of a rotation rad/s.
            stay_near: keep to the largest distance from the measured position.
            at_most: share of its present velocity that no column may exceed, nor turn round.

        Returns:
            Whether any column was limited by what a person would care about (`causes`).

        Raises:
            FloatingPointError: the target is not a number; `command` is what it was.
        """
        columns, goal, wanted = self._columns, self._result, self._wanted
        near = self._near = self._measure_reach(measured, stay_near)
        self._speed_kept = self._highest_speed
        if speed is not None:
            self._speed_kept = np.minimum(self._highest_speed, speed)
        self._pace = min(1.0, self._longest_s / dt_s)
        np.copyto(goal, target)
        if near:
            np.maximum(goal, self._nearest, out=goal)
            np.minimum(goal, self._farthest, out=goal)
        np.subtract(goal, command, out=wanted)
        wanted /= dt_s
        if columns.any_velocity:
            np.copyto(wanted, target, where=columns.is_velocity)
        self._measure_distances(goal, velocity, command, measured, dt_s, near=near)
        self._find_fastest(dt_s)
        self._limit_velocity(velocity, dt_s, speed, at_most)
        self._find_result(command, near, dt_s)
        if not math.isfinite(np.dot(goal, self._ones)):
            raise FloatingPointError(f'a target is not a number: {target}')
        if self._turns:
            span_s = self._span(dt_s)
            self._turns.apply(goal, command, target, velocity, dt_s, span_s, speed, at_most)
        return self._give(command, target, velocity, dt_s)

    def _give(
        self,
        command: np.ndarray,
        target: np.ndarray,
        velocity: np.ndarray,
        dt_s: float,
    ) -> bool:
        """Make the result the command; return whether it counts as limited."""
        columns, goal = self._columns, self._result
        np.not_equal(goal, target, out=self._changed)
        self._take(command, dt_s)
        np.copyto(velocity, self.velocities, where=self._changed)
        if columns.any_velocity:
            np.copyto(velocity, command, where=columns.is_velocity)
        np.maximum(velocity, self._slowest, out=velocity)
        np.minimum(velocity, self._speed, out=velocity)
        if not np.count_nonzero(self._changed):
            return False
        np.subtract(goal, target, out=self._scratch)
        np.abs(self._scratch, out=self._scratch)
        if self._turns:
            self._turns.write(self._scratch, self._fastest[0])
        np.multiply(self._countable_speed, dt_s, out=self._countable)
        if columns.any_velocity:
            np.copyto(self._countable, self._countable_speed, where=columns.is_velocity)
        np.minimum(self._countable, self._countable_step, out=self._countable)
        np.greater(self._scratch, self._countable, out=self._limited)
        if not np.count_nonzero(self._limited):
            return False
        # `causes` looks at it after the target is gone.
        np.copyto(self._wanted, target)
        return True

    def causes(self) -> Iterator[tuple[str, LimitKind]]:
        """Yield what `apply` limited in the last command, by its label, and the limit."""
        for column in np.flatnonzero(self._limited).tolist():
            yield self._columns.labels[column], self._cause(column)

    def _cause(self, column: int) -> LimitKind:
        """Return the limit that was nearest to letting the column go on."""
        speed, wanted = self._fastest[0, column], self._wanted[column]
        if not self._columns.in_rotation[column]:
            low, high = self._lowest[column], self._highest[column]
            speed, up, down = abs(self._next[column]), *self._fastest[1:, column]
            slack = 1e-9 * (1.0 + speed)
            if self._near and np.isfinite(self._step[column]):
                nearest, farthest = self._nearest[column], self._farthest[column]
                if wanted > farthest < high or wanted < nearest > low:
                    return LimitKind.STEP_FROM_MEASURED
            if not low <= wanted <= high or self._next[column] >= up - slack > 0.0:
                return LimitKind.POSITION
            if self._next[column] <= down + slack < 0.0:
                return LimitKind.POSITION
            # At its limit a velocity column has no speed left, which is no limit of speed.
            at_limit = wanted > 0.0 >= up - slack or wanted < 0.0 <= down + slack
            if self._columns.is_velocity[column] and at_limit:
                return LimitKind.POSITION
        if speed >= self._speed_kept[column] * self._pace * (1.0 - 1e-9):
            return LimitKind.VELOCITY
        return LimitKind.ACCELERATION

    def brake(
        self,
        command: np.ndarray,
        velocity: np.ndarray,
        measured: np.ndarray | None,
        dt_s: float,
        stay_near: bool = True,
    ) -> None:
        """Slow `command` down for one tick as fast as acceleration allows; see `apply`."""
        near = self._measure_reach(measured, stay_near)
        np.copyto(self._result, command)
        self._wanted[:] = 0.0
        self._next[:] = 0.0
        if self._columns.any_velocity:
            self._result[self._columns.is_velocity] = 0.0
        np.multiply(self._acceleration, self._span(dt_s), out=self._fastest[0])
        self._clip_next(self.velocities, self._fastest[0])
        self._clip_late(self._speed, dt_s)
        self._find_result(command, near, dt_s)
        if self._turns:
            self._turns.brake(self._result, command, dt_s, self._span(dt_s))
        self._take(command, dt_s)
        np.copyto(velocity, self.velocities)

    def _measure_reach(self, measured: np.ndarray | None, stay_near: bool) -> bool:
        """Set the bounds around the measured positions that a command keeps; False without any."""
        if measured is None or not (stay_near and self._step_limited):
            return False
        np.subtract(measured, self._step, out=self._nearest)
        np.add(measured, self._step, out=self._farthest)
        return True

    def _take(self, command: np.ndarray, dt_s: float) -> None:
        goal, columns = self._result, self._columns
        np.subtract(goal, command, out=self.velocities)
        self.velocities /= dt_s
        if columns.any_velocity:
            np.copyto(self.velocities, goal, where=columns.is_velocity)
        np.copyto(command, goal)
        self._last_dt_s = dt_s

    def _measure_distances(
        self,
        goal: np.ndarray,
        velocity: np.ndarray,
        command: np.ndarray,
        measured: np.ndarray | None,
        dt_s: float,
        *,
        near: bool,
    ) -> None:
        """Measure the distance to the goal, apart from its own motion, and to the limits."""
        distance, above, below = self._distance
        np.multiply(velocity, -dt_s, out=distance)
        distance += goal
        distance -= command
        np.abs(distance, out=distance)
        np.copyto(self._scratch, command)
        if self._columns.any_velocity and measured is not None:
            np.copyto(self._scratch, measured, where=self._columns.is_velocity)
        np.subtract(self._upper, self._scratch, out=above)
        np.subtract(self._scratch, self._lower, out=below)
        if self._columns.any_velocity and measured is None:
            above[self._columns.is_velocity] = below[self._columns.is_velocity] = _FAR
        if near:
            np.subtract(self._farthest, command, out=self._scratch)
            np.minimum(above, self._scratch, out=above)
            np.subtract(command, self._nearest, out=self._scratch)
            np.minimum(below, self._scratch, out=below)
        np.maximum(self._distance, 0.0, out=self._distance)

    def _find_fastest(self, dt_s: float) -> None:
        """Find the largest speed v from which the robot can stop within each distance d.

        v solves `v·dt + v²/a = d`: after this tick the way left is `v²/a`, enough to brake with
        half the acceleration, which is what uneven ticks leave at worst (`_span`). A velocity
        column's dt is longer by `_LATE_S`.
        """
        roots, fastest = self._roots, self._fastest
        np.multiply(self._distance, self._inverse, out=roots)
        span_s: float | np.ndarray = dt_s
        if self._columns.any_velocity:
            span_s = np.add(self._late_s, dt_s, out=self._scratch)
        roots += span_s * span_s
        np.sqrt(roots, out=roots)
        roots += span_s
        np.divide(self._distance, roots, out=fastest)
        fastest *= 2.0

    def _limit_velocity(
        self, velocity: np.ndarray, dt_s: float, speed: np.ndarray | None, at_most: float | None
    ) -> None:
        closing, up, down = self._fastest
        np.copyto(self._next, self._wanted)
        limit = self._speed
        if speed is not None:
            limit = np.minimum(limit, speed, out=self._limit)
        if self._accelerates:
            if self._columns.any_velocity:
                closing[self._columns.is_velocity] = _FAR
            self._clip_next(velocity, np.maximum(closing, self._reserve(dt_s), out=closing))
        if speed is not None:
            self._clip_next(self._zeros, limit)
        if at_most is not None:
            np.multiply(self.velocities, at_most, out=closing)
            np.minimum(closing, 0.0, out=self._scratch)
            np.maximum(self._next, self._scratch, out=self._next)
            np.maximum(closing, 0.0, out=self._scratch)
            np.minimum(self._next, self._scratch, out=self._next)
        if self._accelerates:
            np.multiply(self._acceleration, self._span(dt_s), out=closing)
            self._clip_next(self.velocities, closing)
        self._clip_next(self._zeros, self._speed)
        self._clip_late(limit, dt_s)
        np.minimum(self._next, up, out=self._next)
        np.negative(down, out=down)
        np.maximum(self._next, down, out=self._next)

    def _reserve(self, dt_s: float) -> np.ndarray:
        """Speed, beyond the target's, that a quarter of the acceleration takes away in a tick."""
        return np.multiply(self._acceleration, _RESERVED * self._span(dt_s), out=self._scratch)

    def _clip_late(self, limit: np.ndarray, dt_s: float) -> None:
        """Keep a command after a pause to the way of `longest_s` at the limit of speed."""
        if dt_s <= self._longest_s:
            return
        width = self._fastest[0]
        np.multiply(limit, self._longest_s / dt_s, out=width)
        if self._columns.any_velocity:
            width[self._columns.is_velocity] = _FAR
        self._clip_next(self._zeros, width)

    def _clip_next(self, centre: np.ndarray, width: np.ndarray) -> None:
        np.subtract(centre, width, out=self._scratch)
        np.maximum(self._next, self._scratch, out=self._next)
        np.add(centre, width, out=self._scratch)
        np.minimum(self._next, self._scratch, out=self._next)

    def _find_result(self, command: np.ndarray, near: bool, dt_s: float) -> None:
        """Integrate the next velocity; exactly the goal where it was not limited."""
        columns, result = self._columns, self._result
        np.not_equal(self._next, self._wanted, out=self._changed)
        if np.count_nonzero(self._changed):
            np.multiply(self._next, dt_s, out=self._scratch)
            self._scratch += command
            if columns.any_velocity:
                np.copyto(self._scratch, self._next, where=columns.is_velocity)
            np.copyto(result, self._scratch, where=self._changed)
            if near:
                # What is too far already must not get farther; braking must not lead there.
                np.minimum(self._nearest, command, out=self._nearest)
                np.maximum(result, self._nearest, out=result)
                np.maximum(self._farthest, command, out=self._farthest)
                np.minimum(result, self._farthest, out=result)
        # What is outside already must not get farther.
        np.minimum(self._lowest, command, out=self._scratch)
        np.maximum(result, self._scratch, out=result)
        np.maximum(self._highest, command, out=self._scratch)
        np.minimum(result, self._scratch, out=result)
