"""Columns of a command beside the actions of a policy: what commands have a quaternion for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_runtime.bundle.schema import PoseSpec
from vla_runtime.execution.columns import Column
from vla_runtime.processing.poses import (
    DEGENERATE,
    from_quaternions,
    to_quaternions,
    write_near,
)


class WrittenColumns:
    """Actions as a policy writes them, and the columns of commands that they become.

    Every rotation of a commanded pose is a quaternion in the command, whatever its form; the other
    actions are columns as they are. This is the executor's `ChunkForm`.

    Args:
        actions: a column for each action, under the robot's name, in the policy's order.
        poses: the policy's poses. Those of kind `velocity` have no rotation, only its rate.

    Attributes:
        names: names of the actions.
        kinds: kinds of the actions.
        columns: columns of a command; a rotation stands where its first action does.
        pose_of: the pose that a column belongs to, by the column's name.
    """

    def __init__(self, actions: Sequence[Column], poses: Sequence[PoseSpec]) -> None:
        self.names = tuple(action.name for action in actions)
        self.kinds: tuple[str, ...] = tuple(action.kind for action in actions)
        self.pose_of = {name: pose for pose in poses for name in pose.actions}
        rotation_of = {
            name: pose for pose in poses if pose.kind != 'velocity' for name in pose.rotation
        }
        columns: list[Column] = []
        # Places in a chunk, and in a command, of what is the same in both.
        same: list[tuple[int, int]] = []
        self._rotations: list[tuple[PoseSpec, list[int], list[int]]] = []
        for index, action in enumerate(actions):
            pose = rotation_of.get(action.name)
            if pose is None:
                same.append((index, len(columns)))
                columns.append(action)
            elif pose not in [other for other, _, _ in self._rotations]:
                places = [self.names.index(name) for name in pose.rotation]
                self._rotations.append((pose, places, list(range(len(columns), len(columns) + 4))))
                columns += quaternion_columns(pose.name)
                self.pose_of.update(dict.fromkeys(quaternion_names(pose.name), pose))
        self.columns = tuple(columns)
        self._in_chunk = [place for place, _ in same]
        self._in_command = [place for _, place in same]

    def to_columns(self, rows: np.ndarray) -> np.ndarray:
        """Convert rows of a chunk, (steps, actions), to (steps, columns) float64.

        Raises:
            ValueError: numbers that are no rotation; names the pose and the row.
        """
        result = np.empty((len(rows), len(self.columns)))
        result[:, self._in_command] = rows[:, self._in_chunk]
        for pose, places, group in self._rotations:
            try:
                result[:, group] = to_quaternions(
                    rows[:, places], pose.form, pose.euler_axes or 'sxyz'
                )
            except ValueError as error:
                raise ValueError(f"pose '{pose.name}' {list(pose.rotation)}: {error}") from error
        return result

    def to_chunk(self, rows: np.ndarray, like: np.ndarray | None) -> np.ndarray:
        """Convert (steps, columns) to rows as the policy writes them.

        Args:
            rows: (steps, columns).
            like: (steps, actions) rows whose writing to follow where a rotation has several; None:
                the canonical one.

        Returns:
            (steps, actions) float64.
        """
        result = np.empty((len(rows), len(self.names)))
        result[:, self._in_chunk] = rows[:, self._in_command]
        for pose, places, group in self._rotations:
            quaternions, axes = _with_direction(rows[:, group]), pose.euler_axes or 'sxyz'
            written = from_quaternions(quaternions, pose.form, axes)
            if like is not None:
                written = write_near(written, like[:, places], pose.form, axes)
            result[:, places] = written
        return result


def quaternion_names(pose: str) -> tuple[str, ...]:
    """Return the names of the columns of a pose's rotation: w, x, y, z."""
    return tuple(f'{pose}.q{part}' for part in 'wxyz')


def quaternion_columns(pose: str) -> list[Column]:
    """Return the columns of a pose's rotation: w, x, y, z."""
    return [Column(name, feedback=False, quaternion=pose) for name in quaternion_names(pose)]


def _with_direction(quaternions: np.ndarray) -> np.ndarray:
    """Return quaternions, (steps, 4), where those between opposite rotations repeat the last."""
    result = quaternions.copy()
    before = np.array([1.0, 0.0, 0.0, 0.0])
    for index in np.flatnonzero(np.linalg.norm(quaternions, axis=1) < DEGENERATE):
        result[index] = result[index - 1] if index else before
    return result
