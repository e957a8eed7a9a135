"""The home pose, where a person sends the robot between two episodes, and what is far from it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vla_runtime.execution.column_model import ColumnModel

# A way that a person need not look at first, rad or m, and at most this share of a joint's range.
_NEAR, _NEAR_SHARE = 1.2, 0.4


class HomePose:
    """Positions of some columns; the others stay where they are.

    Args:
        positions: position by column; rad or m.

    Raises:
        ValueError: a column that is not there, is no joint's position, or is outside its limits.
    """

    def __init__(self, model: ColumnModel, positions: Mapping[str, float]) -> None:
        columns = model.columns
        self._names = columns.names
        self._goal = np.full(columns.count, np.nan)
        for name, position in positions.items():
            if name not in columns.names:
                raise ValueError(f"home: '{name}' is not commanded: {list(columns.names)} are")
            at = columns.names.index(name)
            if columns.is_velocity[at] or columns.in_rotation[at]:
                raise ValueError(f"home: '{name}' is not commanded as a position")
            low, high = model.lowest[at], model.highest[at]
            if not low <= position <= high:
                raise ValueError(
                    f"home: '{name}' is {position:g}, outside its limits {low:g} to {high:g}"
                )
            self._goal[at] = position
        span = model.limits.upper - model.limits.lower
        near = np.minimum(_NEAR * columns.scale, _NEAR_SHARE * span)
        # What a gripper holds, or lets go, does not depend on how far it opens.
        self._near = np.where(model.grips, np.inf, near)

    def goal_from(self, setpoints: np.ndarray) -> np.ndarray:
        """Return the pose (columns,); columns without a place in it stay at the setpoints."""
        return np.where(np.isnan(self._goal), setpoints, self._goal)

    def why_not(self, places: np.ndarray, *, far: bool) -> str:
        """Describe why the robot must not go home from these places (columns,); '' where it may.

        `far`: a person has looked at the way.
        """
        if np.isnan(self._goal).all():
            return (
                'no home is known for what this policy commands: give the robot file '
                "'home: {JOINT: position, …}'"
            )
        away = np.nan_to_num(np.abs(places - self._goal))
        worst = int(np.argmax(away / self._near))
        if far or away[worst] <= self._near[worst]:
            return ''
        return (
            f"'{self._names[worst]}' is at {places[worst]:.3g}, {away[worst]:.3g} from home, where "
            f'up to {self._near[worst]:.3g} is near: look whether the straight way there is free, '
            "then call ~/home with 'data: true'"
        )
