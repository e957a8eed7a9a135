"""What the robot may be commanded: limits, the check of a whole chunk, and the motion limiter.

A chunk is checked in full before any of it is used. The motion limiter stands last in the tick,
whatever the check let through: seams, resumes and approaches go through it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.columns import Columns

OnViolation = Literal['clamp', 'reject']
_Describe = Callable[[int, int], str]

# Stands for 'no limit' inside the limiter, where an infinity would turn into NaN.
_FAR = 1e9
# Limits are compared with this much relative slack: a chunk clamped to a limit must pass it.
_SLACK = 1e-9


@dataclass(frozen=True)
class ColumnLimits:
    """Limits of one column; infinite where there is none.

    Attributes:
        lower: smallest position, rad or m. For a velocity column, of the measured position.
        upper: largest position, rad or m.
        velocity: largest speed, rad/s or m/s.
        acceleration: largest change of speed, rad/s² or m/s².
        step_from_measured: largest distance of a commanded from the measured position, rad or m.
    """

    lower: float = -np.inf
    upper: float = np.inf
    velocity: float = np.inf
    acceleration: float = np.inf
    step_from_measured: float = np.inf


@dataclass(frozen=True)
class LimitActions:
    """What to do with a chunk that violates a limit, per kind of limit.

    `step_from_measured` is decided at every tick: `clamp` keeps the command within the distance,
    `reject` holds.
    """

    position: OnViolation = 'clamp'
    velocity: OnViolation = 'clamp'
    acceleration: OnViolation = 'clamp'
    step_from_measured: OnViolation = 'clamp'
    workspace: OnViolation = 'reject'

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value not in get_args(OnViolation):
                raise ValueError(
                    f"limits: on_violation.{name} is '{value}', expected one of "
                    f'{list(get_args(OnViolation))}'
                )


@dataclass(frozen=True)
class Limits:
    """Limits of all columns, each (columns,) float64, and what happens when one is violated.

    `workspace_lower` and `workspace_upper` are a box for Cartesian columns, infinite elsewhere.
    """

    names: tuple[str, ...]
    lower: np.ndarray
    upper: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray
    step_from_measured: np.ndarray
    workspace_lower: np.ndarray
    workspace_upper: np.ndarray
    actions: LimitActions = field(default_factory=LimitActions)

    def __post_init__(self) -> None:
        for name in ('velocity', 'acceleration', 'step_from_measured'):
            self._require(~(getattr(self, name) > 0.0), name, 'must be larger than 0')
        for name in ('lower', 'upper', 'workspace_lower', 'workspace_upper'):
            self._require(np.isnan(getattr(self, name)), name, 'is not a number')
        self._require(~(self.lower < self.upper), 'lower', 'must be smaller than upper')
        self._require(
            ~(self.hard_lower < self.hard_upper), 'workspace', 'leaves no room inside the limits'
        )

    def _require(self, wrong: np.ndarray, name: str, what: str) -> None:
        if wrong.any():
            column = int(np.argmax(wrong))
            value = self.lower[column] if name == 'workspace' else getattr(self, name)[column]
            raise ValueError(
                f"limits: '{self.names[column]}' {name} {what} (it is {value:g}, limits "
                f'{self.lower[column]:g} to {self.upper[column]:g})'
            )

    @property
    def hard_lower(self) -> np.ndarray:
        """(columns,) the larger of the lower limit and the workspace."""
        return np.maximum(self.lower, self.workspace_lower)

    @property
    def hard_upper(self) -> np.ndarray:
        """(columns,) the smaller of the upper limit and the workspace."""
        return np.minimum(self.upper, self.workspace_upper)


def make_limits(
    names: Sequence[str],
    columns: Mapping[str, ColumnLimits] | None = None,
    workspace: Mapping[str, tuple[float, float]] | None = None,
    actions: LimitActions | None = None,
) -> Limits:
    """Limits from what a robot file says; a column left out has none.

    Raises:
        ValueError: a limit for a column that does not exist, or one that makes no sense.
    """
    columns, workspace = dict(columns or {}), dict(workspace or {})
    for where, given in (('limits', columns), ('workspace', workspace)):
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f'{where}: {unknown} are not commanded; columns are {list(names)}')
    each = [columns.get(name, ColumnLimits()) for name in names]
    boxes = [workspace.get(name, (-np.inf, np.inf)) for name in names]
    return Limits(
        names=tuple(names),
        lower=np.array([limit.lower for limit in each], dtype=np.float64),
        upper=np.array([limit.upper for limit in each], dtype=np.float64),
        velocity=np.array([limit.velocity for limit in each], dtype=np.float64),
        acceleration=np.array([limit.acceleration for limit in each], dtype=np.float64),
        step_from_measured=np.array([limit.step_from_measured for limit in each], dtype=np.float64),
        workspace_lower=np.array([box[0] for box in boxes], dtype=np.float64),
        workspace_upper=np.array([box[1] for box in boxes], dtype=np.float64),
        actions=actions or LimitActions(),
    )


@dataclass(frozen=True)
class ChunkCheck:
    """What the limits say about a chunk.

    Attributes:
        rejected: why it may not be used at all; empty when it may.
        clamped: what was outside and is clamped; empty when nothing was.
        rows: (steps, columns) positions clamped into the limits. Speed and acceleration are
            left to the motion limiter, which knows what is being commanded.
    """

    rejected: str
    clamped: str
    rows: np.ndarray


def check_rows(
    rows: np.ndarray, step_time_s: float, limits: Limits, columns: Columns
) -> ChunkCheck:
    """Check every row of a chunk against every limit.

    Args:
        rows: (steps, columns) finite, in the executor's order and kinds.
        step_time_s: seconds from row to row.
        limits: the limits.
        columns: which columns are positions and which are velocities.
    """
    actions = limits.actions
    excesses = [
        ('position', actions.position, _outside(rows, limits.lower, limits.upper, columns)),
        (
            'workspace',
            actions.workspace,
            _outside(rows, limits.workspace_lower, limits.workspace_upper, columns),
        ),
        ('velocity', actions.velocity, _too_fast(rows, step_time_s, limits, columns)),
        ('acceleration', actions.acceleration, _too_sudden(rows, step_time_s, limits, columns)),
    ]
    rejected: list[str] = []
    clamped: list[str] = []
    for kind, action, (excess, describe) in excesses:
        if not excess.size or not (excess > 0.0).any():
            continue
        row, column = divmod(int(np.argmax(excess)), excess.shape[1])
        text = f"{kind} of '{limits.names[column]}' in row {row}: {describe(row, column)}"
        (rejected if action == 'reject' else clamped).append(text)
    inside = rows
    if clamped and not rejected:
        inside = rows.copy()
        where = columns.is_position
        inside[:, where] = np.clip(
            rows[:, where], limits.hard_lower[where], limits.hard_upper[where]
        )
    return ChunkCheck('; '.join(rejected), '; '.join(clamped), inside)


def _outside(
    rows: np.ndarray, lower: np.ndarray, upper: np.ndarray, columns: Columns
) -> tuple[np.ndarray, _Describe]:
    """By how much positions lie outside: (steps, columns), and how to say it."""
    slack = _SLACK * (1.0 + np.abs(rows))
    excess = np.maximum(lower - rows, rows - upper) - slack
    excess[:, columns.is_velocity] = -np.inf

    def describe(row: int, column: int) -> str:
        return f'{rows[row, column]:.4g}, allowed {lower[column]:.4g} to {upper[column]:.4g}'

    return excess, describe


def _too_fast(
    rows: np.ndarray, step_time_s: float, limits: Limits, columns: Columns
) -> tuple[np.ndarray, _Describe]:
    """By how much speeds exceed the limit, as a share of it: (steps, columns)."""
    speed = np.zeros_like(rows)
    speed[1:] = np.abs(np.diff(rows, axis=0)) / step_time_s
    speed[:, columns.is_velocity] = np.abs(rows[:, columns.is_velocity])
    excess = speed / limits.velocity - 1.0 - 1e-6

    def describe(row: int, column: int) -> str:
        return f'{speed[row, column]:.4g} a second, allowed {limits.velocity[column]:.4g}'

    return excess, describe


def _too_sudden(
    rows: np.ndarray, step_time_s: float, limits: Limits, columns: Columns
) -> tuple[np.ndarray, _Describe]:
    """By how much accelerations exceed the limit, as a share of it: (steps, columns)."""
    change = np.zeros_like(rows)
    change[2:] = np.abs(np.diff(rows, n=2, axis=0)) / step_time_s**2
    where = columns.is_velocity
    change[:, where] = 0.0
    change[1:, where] = np.abs(np.diff(rows[:, where], axis=0)) / step_time_s
    excess = change / limits.acceleration - 1.0 - 1e-6

    def describe(row: int, column: int) -> str:
        return f'{change[row, column]:.4g} a second², allowed {limits.acceleration[column]:.4g}'

    return excess, describe


class MotionLimiter:
    """Keeps one tick's command inside every limit; owns its scratch arrays.

    Invariants, in this order of importance:
    1. A position never leaves its limits, and never moves further away from the measured one than
       allowed.
    2. Speed never exceeds its limit.
    3. Acceleration never exceeds its limit, and the approach to a position limit is slowed down
       in time for this to stay so. Holding is exempt: to hold is to stop at once.

    A target that is within the limits comes out unchanged, bit by bit. When the command has fallen
    behind its target, it closes the gap as fast as acceleration allows without overshooting
    (the distance covered by braking in ticks is `v²/(2a) + v·dt/2`).
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
        np.copyto(self._base, command)
        if columns.any_velocity:
            np.copyto(self._base, measured, where=columns.is_velocity)
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
        np.multiply(gap, self._inverse, out=bound)
        bound += 0.25 * dt_s * dt_s
        np.sqrt(bound, out=bound)
        bound += 0.5 * dt_s
        np.divide(gap, bound, out=bound)
        bound *= 2.0
        if self._columns.any_velocity:
            bound[self._columns.is_velocity] = _FAR
        self._clip_next(rates, bound)

    def _brake_before_limits(self, dt_s: float) -> None:
        """Bound the speed towards a position limit by what can be braked before it."""
        for limit, sign in ((self._upper, 1.0), (self._lower, -1.0)):
            room, bound = self._a, self._b
            np.subtract(limit, self._base, out=room)
            room *= sign
            np.maximum(room, 0.0, out=room)
            np.multiply(room, self._inverse, out=bound)
            bound += 0.25 * dt_s * dt_s
            np.sqrt(bound, out=bound)
            bound += 0.5 * dt_s
            np.divide(room, bound, out=bound)
            bound *= 2.0
            room /= dt_s
            np.minimum(bound, room, out=bound)
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
        np.subtract(result, command, out=self.velocities)
        self.velocities /= dt_s
        if columns.any_velocity:
            np.copyto(self.velocities, result, where=columns.is_velocity)
        np.not_equal(result, target, out=self._changed)
        np.copyto(rates, self.velocities, where=self._changed)
        np.copyto(command, result)
        return bool(self._changed.any())
