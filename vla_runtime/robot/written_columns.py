"""Columns of a command beside the actions of a policy: quaternions, and joints that hold a pose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_runtime.bundle.schema import PoseSpec
from vla_runtime.execution.columns import Column, OutOfReach
from vla_runtime.execution.limits import Limits
from vla_runtime.processing.poses import (
    DEGENERATE,
    from_matrix,
    from_quaternions,
    to_matrix,
    to_quaternions,
    write_near,
)
from vla_runtime.robot.kinematics import ArmKinematics


@dataclass
class JointChain:
    """Joints that hold one pose of a policy.

    Attributes:
        columns: columns of the joints in the chain's order.
        unit: (joints,) rad or m of the joints' own units.
        lower, upper: (3,) corners of the workspace box, m.
        clamps: a position outside the box is moved into it; else the chunk is refused.
        limits: (joints,) lower and upper, and the longest way from row to row, in the joints' own
            units; known once the limits of all columns are.
    """

    columns: tuple[Column, ...]
    kinematics: ArmKinematics
    unit: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    clamps: bool
    limits: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


class WrittenColumns:
    """Actions as a policy writes them, and the columns of commands that they become.

    Every rotation of a commanded pose is a quaternion in the command, whatever its form. A pose
    that is commanded through joints becomes these. The other actions are columns as they are. This
    is the executor's `ChunkForm`.

    Args:
        actions: a column for each action, under the robot's name, in the policy's order.
        poses: the policy's. Those of kind `velocity` have no rotation, only its rate.
        chains: the joints of poses that are commanded through joints, by name of the pose.

    Attributes:
        names, kinds: those of the actions.
        columns: columns of a command; a rotation stands where its first action does.
        pose_of: the pose that a column belongs to, by the column's name.
    """

    def __init__(
        self,
        actions: Sequence[Column],
        poses: Sequence[PoseSpec],
        chains: Mapping[str, JointChain] | None = None,
    ) -> None:
        self.names = tuple(action.name for action in actions)
        self.kinds: tuple[str, ...] = tuple(action.kind for action in actions)
        self.chains = chains or {}
        chained = {
            name: pose for pose in poses if pose.name in self.chains for name in pose.actions
        }
        poses = [pose for pose in poses if pose.name not in self.chains]
        self.pose_of = {name: pose for pose in poses for name in pose.actions}
        rotation_of = {
            name: pose for pose in poses if pose.kind != 'velocity' for name in pose.rotation
        }
        columns: list[Column] = []
        # Indices in a chunk, and in a command, of what is the same in both.
        same: list[tuple[int, int]] = []
        self._rotations: list[tuple[PoseSpec, list[int], list[int]]] = []
        self._chained: list[tuple[PoseSpec, list[int], list[int]]] = []
        for index, action in enumerate(actions):
            pose = chained.get(action.name)
            if pose is not None:
                if pose not in [other for other, _, _ in self._chained]:
                    places = [self.names.index(name) for name in pose.actions]
                    joints = self.chains[pose.name].columns
                    group = list(range(len(columns), len(columns) + len(joints)))
                    self._chained.append((pose, places, group))
                    columns += joints
                continue
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

    def take_limits(self, limits: Limits, step_time_s: float) -> None:
        """Bound the joints of chains: from row to row at most twice the velocity.

        More is a jump.
        """
        for pose, _, group in self._chained:
            longest = 2.0 * limits.velocity[group] * step_time_s
            self.chains[pose.name].limits = (limits.lower[group], limits.upper[group], longest)

    def to_columns(self, rows: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Convert rows of a chunk, (steps, actions), to (steps, columns) float64.

        Joints that hold a pose are found from `near`, (columns,), where the robot is.

        Raises:
            OutOfReach: a pose that the joints do not reach; names the pose and the row.
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
        for pose, places, group in self._chained:
            try:
                result[:, group] = self._joints(pose, rows[:, places], near[group])
            except ValueError as error:
                kind = OutOfReach if isinstance(error, OutOfReach) else ValueError
                raise kind(f"pose '{pose.name}': {error}") from error
        return result

    def _joints(self, pose: PoseSpec, rows: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Joints that hold the rows of a pose, (steps, 3 + rotation), in their own units."""
        chain = self.chains[pose.name]
        assert chain.limits is not None
        positions = rows[:, :3]
        inside = np.clip(positions, chain.lower, chain.upper)
        if not chain.clamps and (row := np.flatnonzero((inside != positions).any(axis=1))).size:
            raise OutOfReach(f'row {row[0]} is outside the workspace: {positions[row[0]].tolist()}')
        matrices = to_matrix(rows[:, 3:], pose.form, pose.euler_axes or 'sxyz')
        lower, upper, longest = chain.limits
        middle = np.where(np.isfinite(lower + upper), 0.5 * (lower + upper), 0.0)
        start = np.where(np.isfinite(near), near, middle)
        found = chain.kinematics.inverse(
            inside,
            matrices,
            *(bound * chain.unit for bound in (start, lower, upper, longest)),
        )
        return found / chain.unit

    def to_chunk(self, rows: np.ndarray, like: np.ndarray | None) -> np.ndarray:
        """Convert (steps, columns) to (steps, actions) float64, as the policy writes them.

        `like` are (steps, actions) rows whose writing to follow where a rotation has several; None:
        the canonical one.
        """
        result = np.empty((len(rows), len(self.names)))
        result[:, self._in_chunk] = rows[:, self._in_command]
        for pose, places, group in self._rotations:
            quaternions, axes = _with_direction(rows[:, group]), pose.euler_axes or 'sxyz'
            written = from_quaternions(quaternions, pose.form, axes)
            if like is not None:
                written = write_near(written, like[:, places], pose.form, axes)
            result[:, places] = written
        for pose, places, group in self._chained:
            chain, axes = self.chains[pose.name], pose.euler_axes or 'sxyz'
            positions, matrices = chain.kinematics.forward(rows[:, group] * chain.unit)
            written = from_matrix(matrices, pose.form, axes)
            if like is not None:
                written = write_near(written, like[:, places[3:]], pose.form, axes)
            result[:, places] = np.hstack([positions, written])
        return result


def quaternion_names(pose: str) -> tuple[str, ...]:
    return tuple(f'{pose}.q{part}' for part in 'wxyz')


def quaternion_columns(pose: str) -> list[Column]:
    return [Column(name, feedback=False, quaternion=pose) for name in quaternion_names(pose)]


def _with_direction(quaternions: np.ndarray) -> np.ndarray:
    """Return quaternions, (steps, 4), where those between opposite rotations repeat the last."""
    result = quaternions.copy()
    before = np.array([1.0, 0.0, 0.0, 0.0])
    for index in np.flatnonzero(np.linalg.norm(quaternions, axis=1) < DEGENERATE):
        result[index] = result[index - 1] if index else before
    return result
