"""A hold that gives way to the robot: which of its columns do, where to, and how far they have.

Where a joint rests further from the command than a command may lead it, or is blocked, the command
moves towards it, by `hold_follows` in all. A gripper keeps its grip; it follows fingers that are
opened by hand no nearer than `max_step` demands.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.blocked_joints import BlockedJoints
from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.moved_joints import RESTS_AFTER_S
from vla_runtime.execution.state import MeasuredState

# A hold that gives way comes this near to the robot, as a share of its reach.
_NEAR_SHARE = 0.05


class CompliantHold:
    """Columns of one hold that give way; every array is (columns,)."""

    def __init__(self, model: ColumnModel, blocked_joints: BlockedJoints) -> None:
        count, grips = model.columns.count, model.grips
        self._columns, self._grips, self._follows = model.columns, grips, model.follows
        self._blocked_joints = blocked_joints
        # How far a hold may be from the robot, and how near one that gave way comes.
        self._reach = np.where(
            model.guarded,
            np.minimum(model.limits.step_from_measured, model.tracking_error),
            np.inf,
        )
        # A gripper stays at its reach, where rounding must not put it beyond.
        self._reach[grips] *= 1.0 + 1e-9
        self._near = np.where(grips, self._reach, _NEAR_SHARE * self._reach)
        self._lead = np.zeros(count)
        self._far = np.zeros(count, dtype=bool)
        self._active = np.zeros(count, dtype=bool)
        # Where this hold began, and how far it has given way so far, to and fro; a gripper that
        # follows its noise is not worth a word.
        self._anchor, self._anchored = np.zeros(count), False
        self._given = np.zeros(count)
        self._counts = ~grips
        self._before, self._reached = np.zeros(count), np.zeros(count)

    def begins_or_goes_on(self, setpoints: np.ndarray, state: MeasuredState) -> bool:
        """Return whether a hold must give way: from out of reach, or blocked, until near again."""
        np.subtract(setpoints, state.positions, out=self._lead)
        np.abs(self._lead, out=self._lead)
        np.greater(self._lead, self._reach, out=self._far)
        np.logical_or(self._active, self._far, out=self._active)
        np.logical_or(self._active, self._blocked_joints.blocked, out=self._active)
        if not np.count_nonzero(self._active):
            return False
        np.greater(self._lead, self._near, out=self._far)
        np.logical_and(self._active, self._far, out=self._active)
        # What still moves, or went where it is unseen, is not followed.
        self._active &= state.still_for(RESTS_AFTER_S)
        self._active &= ~state.plausibility.unseen
        return bool(np.count_nonzero(self._active))

    def aim(self, setpoints: np.ndarray, positions: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Write into `target` where to move; return the positions to stay within reach of."""
        if not self._anchored:
            self._anchored = True
            np.copyto(self._anchor, setpoints)
        np.subtract(positions, self._anchor, out=target)
        np.maximum(target, -self._follows, out=target)
        np.minimum(target, self._follows, out=target)
        target += self._anchor
        np.copyto(target, setpoints, where=~self._active | self._grips)
        if self._columns.any_velocity:
            target[self._columns.is_velocity] = 0.0
        # The limiter keeps grippers within reach; all others give way by no more than that.
        np.copyto(self._reached, setpoints)
        np.copyto(self._reached, positions, where=self._grips | self._columns.is_velocity)
        np.copyto(self._before, setpoints)
        return self._reached

    def count(self, setpoints: np.ndarray) -> None:
        np.subtract(self._before, setpoints, out=self._before)
        np.abs(self._before, out=self._before)
        np.add(self._given, self._before, out=self._given, where=self._counts)

    def describe(self) -> str:
        """Name the column in which this hold gave way most, and how far; empty if it did not."""
        worst = int(np.argmax(self._given / self._columns.scale))
        if not self._given[worst]:
            return ''
        return f"'{self._columns.names[worst]}' by {self._given[worst]:.3g}"

    def set_to_measured(self, columns: np.ndarray, place: np.ndarray) -> None:
        """Note that the command of these columns was set to where they are."""
        self._active[columns] = False
        self._given[columns] = 0.0
        np.copyto(self._anchor, place, where=columns)

    def leave(self) -> None:
        self._active[:] = False
        self._given[:] = 0.0
        self._anchored = False
