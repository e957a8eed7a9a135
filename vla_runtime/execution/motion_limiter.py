"""The last thing between a plan and the robot: one tick's motion within every limit.

It works on whatever the check of the chunk let through: seams, resumes and approaches go through it
too.
"""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.execution.columns import Columns
from vla_runtime.execution.limits import Limits

# Stands for 'no limit' where an infinity would turn into not-a-number.
_FAR = 1e9


class MotionLimiter:
    """Keeps one tick's command inside every limit; owns its scratch arrays.

    Invariants, in this order of importance:
    1. A position never leaves its limits, and never moves further away from the measured one than
       allowed.
    2. Speed never exceeds its limit.
    3. Acceleration never exceeds its limit, and the approach to a position limit is slowed down
       in time for this to stay so. Holding is exempt: to hold is to stop at once.

    The third is exact while ticks are equally long; when they are not, what braking lacks shows up
    in the acceleration, never in a position or a speed.

    A target that is within the limits comes out unchanged, bit by bit. When the command has fallen
    behind its target, it closes the gap as fast as acceleration allows without overshooting
    (`_fastest_that_stops`).
    """

    def __init__(self, limits: Limits, columns: Columns) -> None:
        self._columns = columns
        self._lower = np.maximum(limits.hard_lower, -_FAR)
        self._upper = np.minimum(limits.hard_upper, _FAR)
        self._speed = np.minimum(limits.velocity, _FAR)
        self._acceleration = np.minimum(limits.acceleration, _FAR)
        self._inverse = 2.0 / limits.acceleration
        self._accelerates = bool(np.isfinite(limits.acceleration).any())
        self._step = np.where(
            columns.has_feedback & columns.is_position, limits.step_from_measured, np.inf
        )
        self._step_limited = bool(np.isfinite(self._step).any())
        # A velocity column is stopped at a position limit only where its position is known.
        unguarded = columns.is_velocity & ~columns.has_feedback
        self._lower[unguarded] = -_FAR
        self._upper[unguarded] = _FAR
        # A position may be at most here; a velocity column's value is no position.
        self._lowest = np.where(columns.is_velocity, -_FAR, self._lower)
        self._highest = np.where(columns.is_velocity, _FAR, self._upper)
        self.velocities = np.zeros(columns.count)
        self._target = np.zeros(columns.count)
        self._wanted = np.zeros(columns.count)
        self._next = np.zeros(columns.count)
        self._where = np.zeros(columns.count)
        self._base = np.zeros(columns.count)
        self._a = np.zeros(columns.count)
        self._b = np.zeros(columns.count)
        self._changed = np.zeros(columns.count, dtype=bool)

    def stop(self) -> None:
        """Forget the velocity: the next tick starts from standstill."""
        self.velocities[:] = 0.0

    def too_far(self, target: np.ndarray, measured: np.ndarray) -> bool:
        """Whether a target is further from the measured position than allowed."""
        if not self._step_limited:
            return False
        np.subtract(target, measured, out=self._a)
        np.abs(self._a, out=self._a)
        np.greater(self._a, self._step, out=self._changed)
        return bool(self._changed.any())

    def apply(
        self,
        command: np.ndarray,
        target: np.ndarray,
        rates: np.ndarray,
        measured: np.ndarray,
        dt_s: float,
        speed: np.ndarray | None = None,
        stay_near: bool = True,
    ) -> bool:
        """Move `command` towards `target` for one tick, in place.

        Args:
            command: (columns,) what was commanded; overwritten with what is commanded now.
            target: (columns,) what is wanted now, in each column's own kind.
            rates: (columns,) velocity of the target; overwritten with the command's velocity.
            measured: (columns,) measured positions, finite.
            dt_s: seconds since the last command, larger than 0.
            speed: (columns,) another speed limit, where it is tighter.
            stay_near: keep to the largest distance from the measured position.

        Returns:
            Whether any column was limited.

        Raises:
            FloatingPointError: the target is not a number; `command` is what it was.
        """
        columns, wanted = self._columns, self._wanted
        near = stay_near and self._step_limited
        np.copyto(self._target, target)
        if near:
            self._clip_around(self._target, measured, measured)
        np.subtract(self._target, command, out=wanted)
        wanted /= dt_s
        if columns.any_velocity:
            np.copyto(wanted, target, where=columns.is_velocity)
        np.copyto(self._next, wanted)
        if self._accelerates:
            self._limit_closing_speed(rates, command, dt_s)
            np.multiply(self._acceleration, dt_s, out=self._a)
            self._clip_next(self.velocities, self._a)
        np.copyto(self._b, self._speed)
        if speed is not None:
            np.minimum(self._b, speed, out=self._b)
        self._clip_next(0.0, self._b)
        np.copyto(self._where, command)
        if columns.any_velocity:
            np.copyto(self._where, measured, where=columns.is_velocity)
        self._brake_before_limits(dt_s)
        return self._move(command, target, rates, measured if near else None, dt_s)

    def _clip_next(self, centre: np.ndarray | float, width: np.ndarray) -> None:
        """Keep the next velocity within `centre ± width`; overwrites `_base`."""
        np.subtract(centre, width, out=self._base)
        np.maximum(self._next, self._base, out=self._next)
        np.add(centre, width, out=self._base)
        np.minimum(self._next, self._base, out=self._next)

    def _clip_around(self, values: np.ndarray, measured: np.ndarray, also: np.ndarray) -> None:
        """Keep values within the largest distance from measured, or where `also` already is."""
        np.subtract(measured, self._step, out=self._a)
        np.minimum(self._a, also, out=self._a)
        np.maximum(values, self._a, out=values)
        np.add(measured, self._step, out=self._a)
        np.maximum(self._a, also, out=self._a)
        np.minimum(values, self._a, out=values)

    def _limit_closing_speed(self, rates: np.ndarray, command: np.ndarray, dt_s: float) -> None:
        """Close a gap to the moving target no faster than can be braked again."""
        gap, bound = self._a, self._b
        np.multiply(rates, -dt_s, out=gap)
        gap += self._target
        gap -= command
        np.abs(gap, out=gap)
        self._fastest_that_stops(gap, dt_s, bound)
        if self._columns.any_velocity:
            bound[self._columns.is_velocity] = _FAR
        self._clip_next(rates, bound)

    def _fastest_that_stops(self, distance: np.ndarray, dt_s: float, out: np.ndarray) -> None:
        """The largest speed that can be braked to standstill, tick by tick, within a distance.

        A speed v of this tick and n ticks that are slower by a·dt each, until it is used up, cover
        `(n+1)·v·dt - a·dt²·n(n+1)/2`; solved for v with the largest n that fits.
        """
        ticks = self._base
        np.multiply(distance, self._inverse, out=ticks)
        ticks /= dt_s * dt_s
        ticks += 0.25
        np.sqrt(ticks, out=ticks)
        ticks -= 0.5
        np.floor(ticks, out=ticks)
        np.multiply(self._acceleration, 0.5 * dt_s, out=out)
        out *= ticks
        ticks += 1.0
        ticks *= dt_s
        np.divide(distance, ticks, out=ticks)
        out += ticks

    def _brake_before_limits(self, dt_s: float) -> None:
        """Bound the speed towards a position limit by what can be braked before it."""
        for limit, sign in ((self._upper, 1.0), (self._lower, -1.0)):
            room, bound = self._a, self._b
            np.subtract(limit, self._where, out=room)
            room *= sign
            np.maximum(room, 0.0, out=room)
            self._fastest_that_stops(room, dt_s, bound)
            if sign > 0.0:
                np.minimum(self._next, bound, out=self._next)
            else:
                np.negative(bound, out=bound)
                np.maximum(self._next, bound, out=self._next)

    def _move(
        self,
        command: np.ndarray,
        target: np.ndarray,
        rates: np.ndarray,
        measured: np.ndarray | None,
        dt_s: float,
    ) -> bool:
        """Write command and rates from the limited velocity; exactly the target where unlimited."""
        columns, result = self._columns, self._target
        np.not_equal(self._next, self._wanted, out=self._changed)
        if self._changed.any():
            np.multiply(self._next, dt_s, out=self._a)
            self._a += command
            if columns.any_velocity:
                np.copyto(self._a, self._next, where=columns.is_velocity)
            np.copyto(result, self._a, where=self._changed)
        if measured is not None:
            self._clip_around(result, measured, command)
        np.maximum(result, self._lowest, out=result)
        np.minimum(result, self._highest, out=result)
        if not math.isfinite(result.sum()):
            raise FloatingPointError(f'a target is not a number: {target}')
        np.subtract(result, command, out=self.velocities)
        self.velocities /= dt_s
        if columns.any_velocity:
            np.copyto(self.velocities, result, where=columns.is_velocity)
        np.not_equal(result, target, out=self._changed)
        np.copyto(rates, self.velocities, where=self._changed)
        np.copyto(command, result)
        return bool(self._changed.any())
