"""Action spaces: what a policy's numbers mean to the robot, and back.

A chunk may hold absolute targets, deltas and velocities, each column for itself. Deltas are
relative to the state at the start of the chunk, for every row (LeRobot's relative actions, openpi's
`DeltaActions`). End-effector poses are groups of columns, because a rotation cannot be composed
number by number; their deltas may also go from row to row (LIBERO's controller).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vla_runtime.processing import poses
from vla_runtime.processing.words import check_word
from vla_runtime.types import ActionKind, PoseDelta, PoseFrame, RotationForm


@dataclass(frozen=True, kw_only=True)
class PoseColumns:
    """The columns that together are one end-effector pose.

    Attributes:
        name: for error messages, such as `left_hand`.
        position: action columns of x, y, z in metres.
        rotation: action columns of the rotation, as many as `form` needs.
        form: representation of the rotation, in actions and state alike (see `poses.py`).
        euler_axes: transforms3d's axis code, for `euler` only.
        kind: `delta` composes with the pose at the start of the chunk; `absolute` and `velocity`
            pass as they are.
        frame: frame that a delta is written in. `base`: p = p0 + dp, R = dR R0. `tool`: p = p0 + R0
            dp, R = R0 dR.
        state_position, state_rotation: state columns of both; needed for `delta` only.
        delta_from: `chunk`: each row is relative to the state; `step`: each row to the row before,
            the first one to the state.
    """

    name: str
    position: tuple[int, int, int]
    rotation: tuple[int, ...]
    form: RotationForm
    euler_axes: str = 'sxyz'
    kind: ActionKind
    frame: PoseFrame
    state_position: tuple[int, ...] = ()
    state_rotation: tuple[int, ...] = ()
    delta_from: PoseDelta = 'chunk'

    def __post_init__(self) -> None:
        check_word(f'pose {self.name!r}: kind', self.kind, ActionKind)
        check_word(f'pose {self.name!r}: frame', self.frame, PoseFrame)
        check_word(f'pose {self.name!r}: delta_from', self.delta_from, PoseDelta)
        try:
            width = poses.rotation_width(self.form)
            if self.form == 'euler':
                poses.check_euler_axes(self.euler_axes)
        except ValueError as error:
            raise ValueError(f'pose {self.name!r}: {error}') from error
        self._check_columns('position', self.position, 3)
        self._check_columns('rotation', self.rotation, width)
        if self.kind == 'delta' or self.state_position:
            self._check_columns('state_position', self.state_position, 3)
        if self.kind == 'delta' or self.state_rotation:
            self._check_columns('state_rotation', self.state_rotation, width)

    def _check_columns(self, field: str, columns: tuple[int, ...], count: int) -> None:
        if len(columns) != count or min(columns) < 0 or len(set(columns)) != count:
            raise ValueError(
                f'pose {self.name!r}: {field} must be {count} different columns (numbers from 0), '
                f'got {tuple(columns)}'
            )

    @property
    def columns(self) -> tuple[int, ...]:
        return (*self.position, *self.rotation)


@dataclass(frozen=True)
class ActionSpace:
    """Meaning of each column of an action chunk.

    Attributes:
        kinds: per column `absolute`, `delta` or `velocity`; the columns of a pose carry the kind of
            the pose.
        state_columns: per column the same quantity's in the state. A delta column needs it, unless
            it belongs to a pose; None elsewhere is fine.
    """

    names: tuple[str, ...]
    kinds: tuple[ActionKind, ...]
    state_columns: tuple[int | None, ...]
    poses: tuple[PoseColumns, ...] = ()

    def __post_init__(self) -> None:
        self._check_lengths()
        in_pose = self._check_poses()
        for name, column, kind, state_column in zip(
            self.names, range(len(self.names)), self.kinds, self.state_columns, strict=True
        ):
            check_word(f'action {name!r}: kind', kind, ActionKind)
            if state_column is not None and state_column < 0:
                raise ValueError(
                    f'action {name!r}: state column must be 0 or more, got {state_column}'
                )
            if kind == 'delta' and state_column is None and column not in in_pose:
                raise ValueError(
                    f'action {name!r} is a delta but has no state column to be relative to: name '
                    "the state it belongs to, or declare it 'absolute'"
                )

    @property
    def command_kinds(self) -> tuple[str, ...]:
        """Per column what the robot is commanded: `position` or `velocity`."""
        return tuple('velocity' if kind == 'velocity' else 'position' for kind in self.kinds)

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Convert policy actions to robot targets.

        Rotations of delta poses come out in the writing closest to the row before (the first row:
        to the state), so that a plan has no jumps where the orientation has none.

        Args:
            actions: (H, n) floats in robot units, as the policy means them.
            state: (S,) the state that the chunk was inferred from, in robot units.

        Returns:
            (H, n) float64: delta columns as absolute targets, the others as they were.

        Raises:
            ValueError: wrong shapes, a state too short or not finite where it is used, a degenerate
                rotation.
        """
        actions, state = self._check(actions, state)
        result = actions.copy()
        for column, state_column in self._delta_columns():
            result[:, column] += state[state_column]
        for pose in self._delta_poses():
            position, rotation = _start(pose, state)
            step = actions[:, pose.position]
            turn = _matrices(pose, actions[:, pose.rotation], 'action')
            if pose.delta_from == 'step':
                result[:, pose.position], turned = _accumulated(
                    pose, position, rotation, step, turn
                )
            elif pose.frame == 'base':
                result[:, pose.position] = position + step
                turned = turn @ rotation
            else:
                result[:, pose.position] = position + step @ rotation.T
                turned = rotation @ turn
            rows = poses.from_matrix(turned, pose.form, pose.euler_axes)
            start = state[list(pose.state_rotation)]
            result[:, pose.rotation] = poses.continue_from(start, rows, pose.form, pose.euler_axes)
        return result

    def from_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Convert robot targets to policy actions relative to a (newer) state; inverts `to_robot`.

        Args:
            actions: (H, n) floats, robot targets.
            state: (S,).

        Returns:
            (H, n) float64; rotations of delta poses in canonical writing (see `poses.py`).

        Raises:
            ValueError: as `to_robot`.
        """
        actions, state = self._check(actions, state)
        result = actions.copy()
        for column, state_column in self._delta_columns():
            result[:, column] -= state[state_column]
        for pose in self._delta_poses():
            position, rotation = _start(pose, state)
            turned = _matrices(pose, actions[:, pose.rotation], 'action')
            # Poses that the rows are relative to: one for all, or one for each.
            places, starts = position[None], rotation[None]
            if pose.delta_from == 'step':
                places = np.vstack([places, actions[:-1, pose.position]])
                starts = np.concatenate([starts, turned[:-1]])
            step = actions[:, pose.position] - places
            back = starts.transpose(0, 2, 1)
            if pose.frame == 'base':
                turn = turned @ back
            else:
                step = (back @ step[..., None])[..., 0]
                turn = back @ turned
            result[:, pose.position] = step
            result[:, pose.rotation] = poses.from_matrix(turn, pose.form, pose.euler_axes)
        return result

    def _delta_poses(self) -> Iterator[PoseColumns]:
        return (pose for pose in self.poses if pose.kind == 'delta')

    def _delta_columns(self) -> Iterator[tuple[int, int]]:
        in_pose = {column for pose in self.poses for column in pose.columns}
        for column, (kind, state_column) in enumerate(
            zip(self.kinds, self.state_columns, strict=True)
        ):
            if kind == 'delta' and state_column is not None and column not in in_pose:
                yield column, state_column

    def _check(self, actions: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = np.asarray(actions, dtype=np.float64)
        state = np.asarray(state, dtype=np.float64)
        if actions.ndim != 2 or actions.shape[1] != len(self.names):
            raise ValueError(
                f'actions must have shape (steps, {len(self.names)}) for '
                f'{", ".join(self.names)}; got {actions.shape}'
            )
        if state.ndim != 1:
            raise ValueError(f'state must be one row of numbers, got shape {state.shape}')
        used = [state_column for _, state_column in self._delta_columns()]
        for pose in self._delta_poses():
            used += [*pose.state_position, *pose.state_rotation]
        if used and max(used) >= state.size:
            raise ValueError(
                f'deltas are relative to state column {max(used)}, but the state has only '
                f'{state.size} numbers'
            )
        for column in used:
            if not np.isfinite(state[column]):
                raise ValueError(
                    f'deltas are relative to state column {column}, which is {state[column]}'
                )
        return actions, state

    def _check_lengths(self) -> None:
        count = len(self.names)
        for field in ('kinds', 'state_columns'):
            if len(getattr(self, field)) != count:
                raise ValueError(
                    f'action space: {field} has {len(getattr(self, field))} entries for {count} '
                    f'action names ({", ".join(self.names)})'
                )
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if not count or twice:
            raise ValueError(
                f'action space: names used twice: {", ".join(twice)}'
                if twice
                else 'action space: there are no actions'
            )

    def _check_poses(self) -> set[int]:
        """Check poses against columns; return the columns that belong to one."""
        owner: dict[int, str] = {}
        for pose in self.poses:
            for column in pose.columns:
                if column >= len(self.names):
                    raise ValueError(
                        f'pose {pose.name!r}: column {column} does not exist, there are '
                        f'{len(self.names)} actions'
                    )
                if column in owner:
                    raise ValueError(
                        f'action {self.names[column]!r} (column {column}) is used twice, by pose '
                        f'{owner[column]!r} and pose {pose.name!r}'
                    )
                if self.kinds[column] != pose.kind:
                    raise ValueError(
                        f'action {self.names[column]!r} is {self.kinds[column]!r}, but its pose '
                        f'{pose.name!r} is {pose.kind!r}: they must be equal'
                    )
                owner[column] = pose.name
        return set(owner)


def _accumulated(
    pose: PoseColumns,
    position: np.ndarray,
    rotation: np.ndarray,
    steps: np.ndarray,
    turns: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Compose deltas row upon row: positions (H, 3) and matrices (H, 3, 3)."""
    positions, rotations = np.empty_like(steps), np.empty_like(turns)
    for index, (step, turn) in enumerate(zip(steps, turns, strict=True)):
        position = position + (step if pose.frame == 'base' else rotation @ step)
        rotation = turn @ rotation if pose.frame == 'base' else rotation @ turn
        positions[index], rotations[index] = position, rotation
    return positions, rotations


def _start(pose: PoseColumns, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pose at the start of the chunk: position (3,) and rotation matrix (3, 3)."""
    rotation = _matrices(pose, state[list(pose.state_rotation)], 'state')
    return state[list(pose.state_position)], rotation


def _matrices(pose: PoseColumns, values: np.ndarray, source: str) -> np.ndarray:
    try:
        return poses.to_matrix(values, pose.form, pose.euler_axes)
    except ValueError as error:
        raise ValueError(f'pose {pose.name!r}, {source}: {error}') from error
