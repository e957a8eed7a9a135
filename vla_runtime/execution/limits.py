"""Limits of commands, and the check of a whole chunk before any of it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.rotations import turns_between

OnViolation = Literal['clamp', 'reject']
_Describe = Callable[[int, int], str]

# Limits are compared with this much relative slack: a chunk clamped to a limit must pass it.
_SLACK = 1e-9
# So little beyond a limit, as a share of the joint's range, is scatter of a policy around a rest:
# clamped without a word, not counted for the latch.
_SCATTER = 0.02
# Limits that follow from the column's range where nothing else is said.
_DERIVED = ('tracking_error', 'start_tolerance', 'approach_speed', 'hold_follows')


@dataclass(frozen=True)
class ColumnLimits:
    """Limits of one column; infinite where there is none.

    In the columns of a rotation, `velocity`, `acceleration`, `start_tolerance` and `approach_speed`
    are the rotation's: rad/s, rad/s² and rad. A limit that is None follows from the column's range
    (`ColumnModel`).

    Attributes:
        lower: smallest position, rad or m. For a velocity column, of the measured position.
        upper: largest position, rad or m.
        velocity: largest speed, rad/s or m/s.
        acceleration: largest change of speed, rad/s² or m/s².
        step_from_measured: largest distance of a commanded from the measured position, rad or m.
        tracking_error: distance of the measured from the commanded position that stops the robot,
            rad or m; infinity is for a gripper, which an object keeps from its command.
        start_tolerance: distance that a start may jump over, rad or m.
        approach_speed: rad/s or m/s.
        hold_follows: distance that a hold gives way to the robot in all, rad or m.
    """

    lower: float = -np.inf
    upper: float = np.inf
    velocity: float = np.inf
    acceleration: float = np.inf
    step_from_measured: float = np.inf
    tracking_error: float | None = None
    start_tolerance: float | None = None
    approach_speed: float | None = None
    hold_follows: float | None = None


@dataclass(frozen=True)
class LimitActions:
    """Action on a chunk that violates a limit, per kind of limit.

    To clamp an acceleration is to leave it to the motion limiter: the chunk does not count as
    clamped, for a noisy chunk is not a dangerous one. `step_from_measured` is decided at every
    tick: `clamp` keeps the command within the distance, `reject` holds.
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
    """Limits of all columns, each (columns,) float64 and read-only, and what a violation comes to.

    `workspace_lower` and `workspace_upper` are a box for Cartesian columns, infinite elsewhere.
    `tracking_error`, `start_tolerance`, `approach_speed` and `hold_follows` are NaN where the range
    gives them.
    """

    names: tuple[str, ...]
    lower: np.ndarray
    upper: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray
    step_from_measured: np.ndarray
    tracking_error: np.ndarray
    start_tolerance: np.ndarray
    approach_speed: np.ndarray
    hold_follows: np.ndarray
    workspace_lower: np.ndarray
    workspace_upper: np.ndarray
    actions: LimitActions = field(default_factory=LimitActions)

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        for name in ('velocity', 'acceleration', 'step_from_measured'):
            self._require(~(getattr(self, name) > 0.0), name, 'must be larger than 0')
        for name in _DERIVED:
            self._require(getattr(self, name) <= 0.0, name, 'must be larger than 0')
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
    def braking_s(self) -> float:
        """Seconds in which every column comes to rest from its full speed; 0 without limits."""
        limited = np.isfinite(self.velocity) & np.isfinite(self.acceleration)
        times = self.velocity[limited] / self.acceleration[limited]
        return float(times.max(initial=0.0))

    @property
    def hard_lower(self) -> np.ndarray:
        return np.maximum(self.lower, self.workspace_lower)

    @property
    def hard_upper(self) -> np.ndarray:
        return np.minimum(self.upper, self.workspace_upper)


def make_limits(
    names: Sequence[str],
    columns: Mapping[str, ColumnLimits] | None = None,
    workspace: Mapping[str, tuple[float, float]] | None = None,
    actions: LimitActions | None = None,
) -> Limits:
    """Limits from a robot file; ValueError for an unknown column or one that makes no sense."""
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
        **{
            name: np.array([getattr(limit, name) for limit in each], dtype=np.float64)
            for name in _DERIVED
        },
        workspace_lower=np.array([box[0] for box in boxes], dtype=np.float64),
        workspace_upper=np.array([box[1] for box in boxes], dtype=np.float64),
        actions=actions or LimitActions(),
    )


@dataclass(frozen=True)
class ChunkCheck:
    """Result of the check of a chunk.

    Attributes:
        rejected: reason why it may not be used at all; empty when it may.
        clamped: values that were clamped, in words; empty when there were none but a policy's
            scatter around a rest at the limit (2% of the joint's range), or a gripper closing
            beyond its own.
        rows: (steps, columns) positions clamped into the limits. Speed and acceleration are
            left to the motion limiter, which knows what is being commanded.
    """

    rejected: str
    clamped: str
    rows: np.ndarray


def check_rows(
    rows: np.ndarray, step_time_s: float, limits: Limits, columns: CommandColumns
) -> ChunkCheck:
    """Check every row of a chunk, (steps, columns) finite, against every limit."""
    actions = limits.actions
    excesses = [
        ('position', actions.position, _outside(rows, limits.lower, limits.upper, columns)),
        (
            'workspace',
            actions.workspace,
            _outside(rows, limits.workspace_lower, limits.workspace_upper, columns),
        ),
        ('velocity', actions.velocity, _too_fast(rows, step_time_s, limits, columns)),
    ]
    if actions.acceleration == 'reject':
        excesses.append(('acceleration', 'reject', _too_sudden(rows, step_time_s, limits, columns)))
    rejected: list[str] = []
    clamped: list[str] = []
    beyond = False
    for kind, action, (excess, describe) in excesses:
        if not (excess > 0.0).any():
            continue
        beyond = True
        if action == 'clamp':
            excess[:, _grips(limits)] = -np.inf
            least = _scatter(limits) if kind == 'position' else 0.0
            if not (excess > least).any():
                continue
        row, column = divmod(int(np.argmax(excess)), excess.shape[1])
        text = f"{kind} of '{columns.labels[column]}' in row {row}: {describe(row, column)}"
        (rejected if action == 'reject' else clamped).append(text)
    inside = rows
    if beyond and not rejected:
        inside = rows.copy()
        where = columns.is_position
        inside[:, where] = np.clip(
            rows[:, where], limits.hard_lower[where], limits.hard_upper[where]
        )
    return ChunkCheck('; '.join(rejected), '; '.join(clamped), inside)


def _grips(limits: Limits) -> np.ndarray:
    return np.isinf(limits.tracking_error)


def _scatter(limits: Limits) -> np.ndarray:
    """Excess that is no violation, (columns,); zero for a column without two limits."""
    extent = limits.upper - limits.lower
    return np.where(np.isfinite(extent), _SCATTER * extent, 0.0)


def check_handed_over(
    before: np.ndarray,
    rows: np.ndarray,
    step_time_s: float,
    limits: Limits,
    columns: CommandColumns,
) -> str:
    """Describe what is too fast across a hand-over or in the rows after it; empty when nothing is.

    `before` (columns,) is where the plan is then, `rows` (steps, columns) what follows.
    """
    excess, describe = _too_fast(np.vstack([before, rows]), step_time_s, limits, columns)
    # A velocity column's own value was checked with the chunk; `before` is not of the chunk.
    excess[0] = -np.inf
    if limits.actions.velocity == 'clamp':
        excess[:, _grips(limits)] = -np.inf
    row, column = divmod(int(np.argmax(excess)), excess.shape[1])
    if not excess[row, column] > 0.0:
        return ''
    return f"velocity of '{columns.labels[column]}' at the seam: {describe(row, column)}"


def _outside(
    rows: np.ndarray, lower: np.ndarray, upper: np.ndarray, columns: CommandColumns
) -> tuple[np.ndarray, _Describe]:
    """Return how far positions lie outside, (steps, columns), and the words for it."""
    slack = _SLACK * (1.0 + np.abs(rows))
    excess = np.maximum(lower - rows, rows - upper) - slack
    excess[:, columns.is_velocity] = -np.inf

    def describe(row: int, column: int) -> str:
        value, low, high = rows[row, column], lower[column], upper[column]
        return (
            f'{value:.4g}, allowed {low:.4g} to {high:.4g} '
            f'({"lower" if value < low else "upper"} of the robot file)'
        )

    return excess, describe


def _too_fast(
    rows: np.ndarray, step_time_s: float, limits: Limits, columns: CommandColumns
) -> tuple[np.ndarray, _Describe]:
    """Return the excess of speeds as a fraction of the limit: (steps, columns)."""
    speed = np.zeros_like(rows)
    speed[1:] = columns.distance(rows[:-1], rows[1:]) / step_time_s
    speed[:, columns.is_velocity] = np.abs(rows[:, columns.is_velocity])
    excess = speed / limits.velocity - 1.0 - 1e-6

    def describe(row: int, column: int) -> str:
        field = 'angular_velocity' if columns.in_rotation[column] else 'velocity'
        return (
            f'{speed[row, column]:.4g} a second, allowed {limits.velocity[column]:.4g} '
            f'({field} of the robot file)'
        )

    return excess, describe


def _too_sudden(
    rows: np.ndarray, step_time_s: float, limits: Limits, columns: CommandColumns
) -> tuple[np.ndarray, _Describe]:
    """Return the excess of accelerations as a fraction of the limit: (steps, columns)."""
    change = np.zeros_like(rows)
    change[2:] = np.abs(np.diff(rows, n=2, axis=0)) / step_time_s**2
    for group in columns.quaternions:
        turns = turns_between(rows[:-1, group], rows[1:, group])
        change[2:, group] = np.linalg.norm(np.diff(turns, axis=0), axis=1)[:, None] / step_time_s**2
    where = columns.is_velocity
    change[:, where] = 0.0
    change[1:, where] = np.abs(np.diff(rows[:, where], axis=0)) / step_time_s
    excess = change / limits.acceleration - 1.0 - 1e-6

    def describe(row: int, column: int) -> str:
        return f'{change[row, column]:.4g} a second², allowed {limits.acceleration[column]:.4g}'

    return excess, describe
