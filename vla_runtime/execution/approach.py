"""Setting out: how far the first command may be from the robot, and how the gap is closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.columns import Columns

OnStartTooFar = Literal['refuse', 'approach']


@dataclass(frozen=True)
class StartParameters:
    """How to set out from standstill.

    Attributes:
        tolerance: largest distance from the commanded (at the first start: measured) position to
            the first row of a chunk, rad or m.
        on_too_far: `refuse` the chunk, or `approach` its first row at a set speed and ask again
            from there.
        approach_speed: speed of the fastest column while approaching, rad/s or m/s.
        cold_after_s: a hold of this length makes the next chunk a new start, seconds on the steady
            clock. After a fault, a stop or a reset it always is.
    """

    tolerance: float = 0.2
    on_too_far: OnStartTooFar = 'approach'
    approach_speed: float = 0.3
    cold_after_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ('tolerance', 'approach_speed', 'cold_after_s'):
            if not getattr(self, name) > 0.0:
                raise ValueError(f'start: {name} is {getattr(self, name)}, expected more than 0')
        if self.on_too_far not in get_args(OnStartTooFar):
            raise ValueError(
                f"start: on_too_far is '{self.on_too_far}', expected one of "
                f'{list(get_args(OnStartTooFar))}'
            )


class Approach:
    """A straight line in joint space at a set speed; all columns arrive together."""

    def __init__(self, columns: Columns, parameters: StartParameters) -> None:
        self._columns = columns
        self._parameters = parameters
        self._start = np.zeros(columns.count)
        self._distance = np.zeros(columns.count)
        self._progress = 0.0
        self._duration_s = 1.0
        self.active = False
        self.target = np.zeros(columns.count)
        self.speed = parameters.approach_speed * columns.scale

    def begin(self, start: np.ndarray, goal: np.ndarray) -> None:
        """Set out from `start` for `goal`, each (columns,); velocity columns stay at zero."""
        np.copyto(self._start, start)
        self._start[self._columns.is_velocity] = 0.0
        np.subtract(goal, start, out=self._distance)
        self._distance[self._columns.is_velocity] = 0.0
        self._duration_s = max(float((np.abs(self._distance) / self.speed).max()), 1e-3)
        self._progress = 0.0
        self.active = True

    def stop(self) -> None:
        """Forget it."""
        self.active = False

    def advance(self, dt_s: float, rates: np.ndarray) -> np.ndarray:
        """Where to be after `dt_s` more seconds; `rates` is overwritten with the velocity."""
        self._progress = min(1.0, self._progress + dt_s / self._duration_s)
        if self._progress < 1.0:
            np.divide(self._distance, self._duration_s, out=rates)
        else:
            rates[:] = 0.0
        np.multiply(self._distance, self._progress, out=self.target)
        self.target += self._start
        return self.target

    def arrived(self, commanded: np.ndarray) -> bool:
        """Whether the line has been walked to its end and the command has kept up."""
        if self._progress < 1.0:
            return False
        gap = np.abs(commanded - self.target) / self._columns.scale
        return bool(gap.max() <= 0.01 * self._parameters.tolerance)
