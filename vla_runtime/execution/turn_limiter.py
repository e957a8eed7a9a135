"""Limits one tick's turn of every rotation: angular velocity and angular acceleration.

The turn from one command to the next is a rotation vector; over time it is the angular velocity.
"""

from __future__ import annotations

import math

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.limits import Limits
from vla_runtime.execution.rotations import Quaternion, Vector, rate_of, turn_between, turned, unit

_STILL: Vector = (0.0, 0.0, 0.0)
# Share of a tick's change of speed with which a rotation may arrive at its target: the next tick
# takes it away again, even one that is half as long.
_SETTLING = 0.5


class TurnLimiter:
    """Limits of one rotation.

    `rate` is the last command's angular velocity, rad/s, `left` its distance from the target, rad.

    Args:
        velocity: largest angular velocity, rad/s.
        acceleration: largest change of the angular velocity, rad/s².
        longest_s: motion that one command may contain at full speed, seconds.
    """

    def __init__(self, velocity: float, acceleration: float, longest_s: float) -> None:
        self._velocity = velocity
        self._acceleration = acceleration
        self._longest_s = longest_s
        self.rate = _STILL
        self.left = 0.0

    def slowing(self, span_s: float) -> float:
        """Share of the present angular velocity that may be lost in a tick; see `_span`."""
        speed = _length(self.rate)
        if speed == 0.0:
            return 1.0
        return min(1.0, self._acceleration * span_s / speed)

    def brake(self, command: Quaternion, dt_s: float, span_s: float) -> Quaternion:
        """Return the next command of a rotation that comes to rest as fast as it may."""
        slower = _scaled(self.rate, 1.0 - self.slowing(span_s))
        self.rate = self._not_late(slower, self._velocity, dt_s)
        return turned(command, _scaled(self.rate, dt_s))

    def apply(
        self,
        command: Quaternion,
        target: Quaternion,
        target_rate: Vector,
        dt_s: float,
        span_s: float,
        speed: float = math.inf,
        at_most: float | None = None,
    ) -> Quaternion:
        """Turn the command towards its target for one tick.

        Args:
            target_rate: angular velocity of the target, rad/s.
            span_s: seconds for which the angular velocity may change at full acceleration.
            speed: a lower angular velocity that is wanted, rad/s.
            at_most: share of the present angular velocity that is not to be exceeded.

        Returns:
            The next command.
        """
        wanted = _scaled(turn_between(command, target), 1.0 / dt_s)
        limit = min(self._velocity, speed)
        rate, change = wanted, self._acceleration * span_s
        if math.isfinite(change):
            rate = self._closing(wanted, target_rate, dt_s, change)
        rate = _clipped(rate, limit)
        if at_most is not None:
            rate = _clipped(rate, at_most * _length(self.rate))
        if math.isfinite(change):
            # Between two rates within the limit, so within the limit as well.
            rate = _clipped(rate, change, self.rate)
        self.rate = rate = self._not_late(_clipped(rate, self._velocity), limit, dt_s)
        self.left = dt_s * _length(_difference(wanted, rate))
        if self.left == 0.0:
            return _written_like(command, target)
        return turned(command, _scaled(rate, dt_s))

    def _not_late(self, rate: Vector, limit: float, dt_s: float) -> Vector:
        """Keep a command after a pause to the turn of `longest_s` at the limit."""
        if dt_s <= self._longest_s:
            return rate
        return _clipped(rate, limit * self._longest_s / dt_s)

    def _closing(self, wanted: Vector, target_rate: Vector, dt_s: float, change: float) -> Vector:
        """Return the rate at which the rotation can still come to rest on its moving target."""
        beyond = _length(_difference(wanted, target_rate))
        if beyond <= _SETTLING * change:
            return wanted
        distance = beyond * dt_s
        root = math.sqrt(dt_s * dt_s + 4.0 * distance / self._acceleration)
        return _clipped(wanted, 2.0 * distance / (dt_s + root), target_rate)


class RotationLimiters:
    """All rotations of a command, on the arrays of the motion limiter."""

    def __init__(self, limits: Limits, columns: CommandColumns, longest_s: float) -> None:
        self._groups = [
            (
                group,
                TurnLimiter(
                    float(limits.velocity[group[0]]),
                    float(limits.acceleration[group[0]]),
                    longest_s,
                ),
            )
            for group in columns.quaternions
        ]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def stop(self) -> None:
        for _, limiter in self._groups:
            limiter.rate = _STILL

    def slowing(self, span_s: float) -> float:
        """Share of their velocities that all rotations together may lose in a tick."""
        return min((limiter.slowing(span_s) for _, limiter in self._groups), default=1.0)

    def apply(
        self,
        result: np.ndarray,
        command: np.ndarray,
        target: np.ndarray,
        velocity: np.ndarray,
        dt_s: float,
        span_s: float,
        speed: np.ndarray | None,
        at_most: float | None,
    ) -> None:
        """Set the rotations of the next command `result` (columns,); see `MotionLimiter.apply`.

        Args:
            target: (columns,) finite; quaternions of any length.
            velocity: (columns,) derivative of the target, 1/s.
            span_s: seconds for which velocities may change at full acceleration.
            speed: (columns,) a lower speed that is wanted, in a rotation's columns rad/s.
        """
        for group, limiter in self._groups:
            limiter.left = 0.0
            here, wanted = unit(command[group].tolist()), target[group].tolist()
            there, rate = unit(wanted), rate_of(wanted, velocity[group].tolist())
            if here is None and there is not None:
                # Nothing was commanded yet.
                result[group] = there
                continue
            if here is None:
                continue
            # Between opposite rotations there is none: the rotation stays for a moment.
            result[group] = limiter.apply(
                here,
                there or here,
                rate,
                dt_s,
                span_s,
                math.inf if speed is None else float(speed[group[0]]),
                at_most,
            )

    def write(self, distances: np.ndarray, speeds: np.ndarray) -> None:
        """Write each rotation's distance from its target, rad, and speed in its first column."""
        for group, limiter in self._groups:
            distances[group] = speeds[group] = 0.0
            distances[group[0]], speeds[group[0]] = limiter.left, _length(limiter.rate)

    def brake(self, result: np.ndarray, command: np.ndarray, dt_s: float, span_s: float) -> None:
        """Set the rotations of the next command to those that brake; arguments as in `apply`."""
        for group, limiter in self._groups:
            here = unit(command[group].tolist())
            if here is not None:
                result[group] = limiter.brake(here, dt_s, span_s)


def _written_like(command: Quaternion, target: Quaternion) -> Quaternion:
    """Return the target as the one of q and -q that is nearer to the command."""
    if sum(a * b for a, b in zip(command, target, strict=True)) >= 0.0:
        return target
    w, x, y, z = target
    return -w, -x, -y, -z


def _length(vector: Vector) -> float:
    x, y, z = vector
    return math.sqrt(x * x + y * y + z * z)


def _scaled(vector: Vector, factor: float) -> Vector:
    return factor * vector[0], factor * vector[1], factor * vector[2]


def _difference(first: Vector, second: Vector) -> Vector:
    return first[0] - second[0], first[1] - second[1], first[2] - second[2]


def _clipped(vector: Vector, radius: float, centre: Vector = _STILL) -> Vector:
    """Return the vector, or what is nearest to it at no more than a radius from the centre."""
    away = _difference(vector, centre)
    length = _length(away)
    if length <= radius:
        return vector
    share = radius / length
    return (
        centre[0] + share * away[0],
        centre[1] + share * away[1],
        centre[2] + share * away[2],
    )
