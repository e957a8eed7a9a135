"""A hold that comes to joints which are said to be where nobody saw them go.

Where the reading is wrong and the motors are on, the arm follows the command. So the
command comes slowly, and a reading that changes meanwhile ends it.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.column_model import ColumnModel

# For so long the command comes no further than this share of `hold_follows`.
_CREEPS_S, _CREEP_SHARE = 0.5, 0.8


class Joining:
    """Where the command is on its way to; every array is (columns,)."""

    def __init__(self, model: ColumnModel) -> None:
        columns = model.columns
        self._names, self._scale = columns.names, columns.scale
        self._same = 2.0 * model.noise
        self._speed = model.approach_speed
        self._creep = np.minimum(self._speed, _CREEP_SHARE * model.follows / _CREEPS_S)
        self.columns = np.zeros(columns.count, dtype=bool)
        self._found = np.zeros(columns.count)
        self._goal = np.zeros(columns.count)
        self._since_s = 0.0
        self.active = False

    def begin(self, columns: np.ndarray, found: np.ndarray, goal: np.ndarray) -> None:
        """Set out for these columns (bool): where they were found, and the goal near to it."""
        np.copyto(self.columns, columns)
        np.copyto(self._found, found)
        np.copyto(self._goal, goal)
        self._since_s = 0.0
        self.active = bool(np.count_nonzero(columns))

    def end(self) -> None:
        self.active = False

    def changed(self, measured: np.ndarray) -> np.ndarray:
        """Return the columns that are no longer where they were found, bool."""
        return self.columns & ~self.same(measured, self._found)

    def same(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return which positions (columns,) are equal but for noise, bool."""
        return np.abs(some - others) <= self._same

    def aim(self, setpoints: np.ndarray, target: np.ndarray, dt_s: float) -> np.ndarray:
        """Write into `target` where to move in this tick; return the speed."""
        np.copyto(target, setpoints)
        np.copyto(target, self._goal, where=self.columns)
        self._since_s += dt_s
        return self._creep if self._since_s < _CREEPS_S else self._speed

    def arrived(self, setpoints: np.ndarray) -> bool:
        return bool((np.abs(setpoints - self._goal)[self.columns] <= 1e-9).all())

    def progress(self, setpoints: np.ndarray) -> str:
        """Name the column furthest from its goal, and its distance; empty without any."""
        if not self.active:
            return ''
        left = np.where(self.columns, np.abs(setpoints - self._goal), 0.0)
        left_s = left / self._speed
        worst = int(np.argmax(left_s))
        return (
            f"'{self._names[worst]}' has {left[worst]:.3g} to go, to {self._goal[worst]:.3g}, for "
            f'{left_s[worst]:.1f} s'
        )

    def describe_change(self, measured: np.ndarray) -> str:
        by = np.where(self.columns, np.abs(measured - self._found), 0.0) / self._scale
        worst = int(np.argmax(by))
        return (
            f"'{self._names[worst]}' was said to be at {self._found[worst]:.4g}, and at "
            f'{measured[worst]:.4g} when the command came there: the reading is wrong, or the '
            'joint was moved; look at the robot, then call ~/start, which asks once more'
        )
