"""Start from start_state: check the distance to the first command, and approach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.limits import Limits
from vla_runtime.execution.rotations import (
    Quaternion,
    Vector,
    derivative_of,
    turn_between,
    turned,
    unit,
)
from vla_runtime.files.field_error import FieldError

# Fraction of the start's tolerance that is too small to see.
NEGLIGIBLE = 0.01
# Shares of a column's range: the largest tolerance, and the largest distance in a second.
_TOLERANCE_SHARE, _SPEED_SHARE = 0.25, 0.5

OnStartTooFar = Literal['refuse', 'approach']


@dataclass(frozen=True)
class StartParameters:
    """Settings of a start from start_state.

    Attributes:
        tolerance: largest distance from the commanded (at the first start: measured) position to
            the first row of a chunk, rad or m; see `start_limits`.
        on_too_far: `refuse` the chunk, or `approach` its first row at a set speed and ask again
            from there.
        approach_speed: largest speed of a column while approaching, rad/s or m/s; see
            `start_limits`.
        approach_timeout_s: an approach that has not arrived so many seconds after it should have
            ends in a hold, until `start`: something is in the way.
        cold_after_s: a hold of this length makes the next chunk a new start, seconds on the steady
            clock. After a fault, a stop or a reset it always is.
    """

    tolerance: float = 0.2
    on_too_far: OnStartTooFar = 'approach'
    approach_speed: float = 0.3
    approach_timeout_s: float = 5.0
    cold_after_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ('tolerance', 'approach_speed', 'approach_timeout_s', 'cold_after_s'):
            if not (value := getattr(self, name)) > 0.0:
                raise FieldError(f'start.{name}', f'{value:g} where more than 0 is expected')
        words = get_args(OnStartTooFar)
        if self.on_too_far not in words:
            raise FieldError(
                'start.on_too_far',
                f"'{self.on_too_far}' where one of {', '.join(words)} is expected",
            )


def start_limits(
    columns: CommandColumns, limits: Limits, start: StartParameters
) -> tuple[np.ndarray, np.ndarray]:
    """Tolerance of a start and speed of an approach, per column.

    One number of radians does not suit a gripper of a few centimetres. Without numbers of its own
    a column's tolerance is at most a quarter of its range, and its speed at most half of its range
    in a second. No approach is faster than the limit of the velocity.

    Args:
        columns: columns of the executor's commands.
        limits: `start_tolerance` and `approach_speed` of a column have precedence.
        start: tolerance and speed of columns without numbers of their own.

    Returns:
        tolerance: (columns,) float64, rad or m; of a rotation rad.
        speed: (columns,) float64, rad/s or m/s; of a rotation rad/s.
    """
    span = limits.upper - limits.lower
    tolerance = np.minimum(start.tolerance * columns.scale, _TOLERANCE_SHARE * span)
    speed = np.minimum(start.approach_speed * columns.scale, _SPEED_SHARE * span)
    tolerance = np.where(np.isnan(limits.start_tolerance), tolerance, limits.start_tolerance)
    speed = np.where(np.isnan(limits.approach_speed), speed, limits.approach_speed)
    return tolerance, np.minimum(speed, limits.velocity)


class Approach:
    """A straight line in joint space at a set speed; all columns arrive together.

    A rotation goes the short way, about one axis.

    Args:
        columns: the executor's.
        tolerance: (columns,) of the start, see `start_limits`.
        speed: (columns,) largest speeds.
        timeout_s: time after which an approach that should have arrived is overdue.
    """

    def __init__(
        self, columns: CommandColumns, tolerance: np.ndarray, speed: np.ndarray, timeout_s: float
    ) -> None:
        self._columns = columns
        self._negligible = NEGLIGIBLE * tolerance
        self._timeout_s = timeout_s
        self._start = np.zeros(columns.count)
        self._goal = np.zeros(columns.count)
        self._distance = np.zeros(columns.count)
        # Columns of each rotation, where it sets out, and the turn to its goal.
        self._turns: list[tuple[np.ndarray, Quaternion, Vector]] = []
        self._duration_s = 1.0
        self.elapsed_s = 0.0
        self.active = False
        self.target = np.zeros(columns.count)
        self.speed = speed

    def begin(self, start: np.ndarray, goal: np.ndarray) -> None:
        """Set out from `start` for `goal`, each (columns,); velocity columns stay at zero."""
        np.copyto(self._start, start)
        self._start[self._columns.is_velocity] = 0.0
        np.copyto(self._goal, goal)
        self._goal[self._columns.is_velocity] = 0.0
        np.subtract(self._goal, self._start, out=self._distance)
        way = self._columns.distance(self._start, self._goal)
        self._duration_s = max(float((way / self.speed).max()), 1e-3)
        self._begin_turns()
        self.elapsed_s = 0.0
        self.active = True

    def _begin_turns(self) -> None:
        """Find the turn of every rotation, and write its goal as the nearer of q and -q."""
        self._turns.clear()
        for group in self._columns.quaternions:
            start, goal = unit(self._start[group].tolist()), unit(self._goal[group].tolist())
            if start is not None and goal is not None:
                turn = turn_between(start, goal)
                self._goal[group] = turned(start, turn)
                self._turns.append((group, start, turn))

    def stop(self) -> None:
        """Drop the approach."""
        self.active = False

    def advance(self, dt_s: float, velocity: np.ndarray) -> np.ndarray:
        """Return the setpoints `dt_s` later; `velocity` is overwritten with their velocity."""
        self.elapsed_s += dt_s
        progress = self.elapsed_s / self._duration_s
        if progress >= 1.0:
            velocity[:] = 0.0
            np.copyto(self.target, self._goal)
            return self.target
        np.divide(self._distance, self._duration_s, out=velocity)
        np.multiply(self._distance, progress, out=self.target)
        self.target += self._start
        for group, start, turn in self._turns:
            x, y, z = turn
            rotation = turned(start, (progress * x, progress * y, progress * z))
            share = 1.0 / self._duration_s
            self.target[group] = rotation
            velocity[group] = derivative_of(rotation, (share * x, share * y, share * z))
        return self.target

    def arrived(self, commanded: np.ndarray) -> bool:
        """Return whether the approach is at its goal and the command has kept up."""
        if self.elapsed_s < self._duration_s:
            return False
        return bool((self._columns.distance(self.target, commanded) <= self._negligible).all())

    @property
    def overdue(self) -> bool:
        """Return whether the approach has exceeded its timeout."""
        return self.elapsed_s > self._duration_s + self._timeout_s

    def progress(self, commanded: np.ndarray) -> str:
        """Name the column furthest from its goal, and its distance; empty without an approach."""
        if not self.active:
            return ''
        distance = self._columns.distance(self._goal, commanded)
        distance[self._columns.is_velocity] = 0.0
        left_s = distance / self.speed
        worst = int(np.argmax(left_s))
        # One number of a quaternion says nothing about where it goes.
        goal = '' if self._columns.in_rotation[worst] else f', to {self._goal[worst]:.3g}'
        return (
            f"'{self._columns.labels[worst]}' has {distance[worst]:.3g} to go{goal}, "
            f'for {left_s[worst]:.1f} s'
        )

    def describe(self, commanded: np.ndarray) -> str:
        """Describe how far the approach came."""
        distance = self._columns.distance(self.target, commanded)
        worst = int(np.argmax(distance / self._negligible))
        where = f'has come to {commanded[worst]:.4g} and should have been at '
        where += f'{self.target[worst]:.4g}'
        if self._columns.in_rotation[worst]:
            where = f'is {distance[worst]:.3g} rad from where it should have been'
        return (
            f"'{self._columns.labels[worst]}' {where} after {self._duration_s:.2g} s; given up "
            f'after {self.elapsed_s:.2g} s (approach_timeout_s): something may be in its way'
        )
