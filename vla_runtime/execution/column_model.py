"""What is known of an executor's columns before it runs: limits, distances, which are measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.columns import CommandColumns
from vla_runtime.execution.limits import Limits, make_limits
from vla_runtime.files.field_error import FieldError

# Distance between command and robot, rad or m, that stops a robot without another number.
MAX_TRACKING_ERROR = 0.5
# Shares of a column's range: the largest tolerance, and the largest distance in a second.
_TOLERANCE_SHARE, _SPEED_SHARE = 0.25, 0.5
# A joint further from its command than this share of its range is blocked, or not driven at all.
# Grippers have none (`grips: true`).
_TRACKING_SHARE = 0.75
# How far a hold gives way where nothing else is said: rad, and at most this share of the range.
_FOLLOWS, _FOLLOWS_SHARE = 0.05, 0.05
# Noise of an encoder, rad, and at most this share of the joint's range.
_NOISE, _NOISE_SHARE = 0.01, 0.01

OnStartTooFar = Literal['refuse', 'approach']


@dataclass(frozen=True)
class StartParameters:
    """Settings of a start from rest.

    Attributes:
        tolerance: largest distance to the first row of a chunk, rad or m, from the command (at the
            first start from the measured position); see `ColumnModel`.
        on_too_far: `refuse` the chunk, or `approach` its first row and ask again from there.
        approach_speed: largest speed of a column, rad/s or m/s; see `ColumnModel`.
        approach_timeout_s: an approach that is this late, seconds, ends in a hold until `start`.
        cold_after_s: a hold of this length, seconds on the steady clock, makes the next chunk a new
            start. After a fault, a stop or a reset it always is.
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


@dataclass(frozen=True, eq=False)
class ColumnModel:
    """Columns with their limits, and what follows from the two; every array is read-only.

    One number of radians does not suit a gripper of a few centimetres. So a distance is the
    column's own number where its limits name one, and otherwise the common number, but at most a
    share of the column's range. No approach is faster than the limit of the velocity.

    Args:
        limits: None: there are none.
        start: tolerance and speed of columns without numbers of their own.
        max_tracking_error: distance for columns without one of their own, rad or m; at most three
            quarters of their range.

    Attributes:
        guarded: (columns,) bool, positions that are measured.
        unguarded: (columns,) bool, positions that are not.
        tracking_error: (columns,) distance between commanded and measured position that stops the
            robot, rad or m; infinite for a gripper, and where no position is measured or commanded.
        grips: (columns,) bool, grippers: an object may keep them from their command.
        movable: (columns,) bool, positions whose command may be set to the measured one; no
            grippers.
        follows: (columns,) distance that a hold gives way in all (`hold_follows`), rad or m.
        noise: (columns,) distance below which a joint or a command counts as still.
        tolerance: (columns,) distance that a start may jump over, rad or m; of a rotation rad.
        approach_speed: (columns,) rad/s or m/s; of a rotation rad/s.
        lowest, highest: (columns,) position limits and workspace in one.
    """

    columns: CommandColumns
    limits: Limits
    guarded: np.ndarray = field(init=False)
    unguarded: np.ndarray = field(init=False)
    tracking_error: np.ndarray = field(init=False)
    grips: np.ndarray = field(init=False)
    movable: np.ndarray = field(init=False)
    follows: np.ndarray = field(init=False)
    noise: np.ndarray = field(init=False)
    tolerance: np.ndarray = field(init=False)
    approach_speed: np.ndarray = field(init=False)
    lowest: np.ndarray = field(init=False)
    highest: np.ndarray = field(init=False)

    def __init__(
        self,
        columns: CommandColumns,
        limits: Limits | None = None,
        start: StartParameters | None = None,
        max_tracking_error: float = MAX_TRACKING_ERROR,
    ) -> None:
        limits = limits or make_limits(columns.names)
        start = start or StartParameters()
        span, scale = limits.upper - limits.lower, columns.scale

        def own_or(own: np.ndarray, common: float, share: float) -> np.ndarray:
            return np.where(np.isnan(own), np.minimum(common * scale, share * span), own)

        guarded = columns.has_feedback & columns.is_position
        allowed = own_or(limits.tracking_error, max_tracking_error, _TRACKING_SHARE)
        tracking_error = np.where(guarded, allowed, np.inf)
        grips = guarded & np.isinf(tracking_error)
        speed = own_or(limits.approach_speed, start.approach_speed, _SPEED_SHARE)
        arrays = {
            'guarded': guarded,
            'unguarded': ~columns.has_feedback & columns.is_position,
            'tracking_error': tracking_error,
            'grips': grips,
            'movable': guarded & ~grips & ~columns.in_rotation,
            'follows': own_or(limits.hold_follows, _FOLLOWS, _FOLLOWS_SHARE),
            'noise': np.minimum(_NOISE * scale, _NOISE_SHARE * span),
            'tolerance': own_or(limits.start_tolerance, start.tolerance, _TOLERANCE_SHARE),
            'approach_speed': np.minimum(speed, limits.velocity),
            'lowest': limits.hard_lower,
            'highest': limits.hard_upper,
        }
        for array in arrays.values():
            array.flags.writeable = False
        for name, value in {'columns': columns, 'limits': limits, **arrays}.items():
            object.__setattr__(self, name, value)
