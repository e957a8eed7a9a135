"""The columns of a command, one number each, in the robot's order, and mapping others onto it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from vla_runtime.execution.rotations import angles_between

ColumnKind = Literal['position', 'velocity']

# Below this length the direction is noise: no policy means such a rotation.
_SHORTEST = 1e-3


@dataclass(frozen=True)
class Column:
    """One commanded number.

    Attributes:
        kind: `position` holds at its last value, `velocity` holds at zero.
        feedback: a measured position arrives under this name. Without it nothing guards the
            distance between command and robot.
        continuous: an angle without end stops: values that differ by whole turns are the same.
        scale: factor on tolerances and approach speed, which are given in radians (a gripper that
            goes from 0 to 100: 30 or so).
        quaternion: a label that the four columns w, x, y, z of one rotation share, in this order.
            Chunks may write q or -q. Limits and tolerances are those of the rotation, in radians.
        measured_as: joint or topic that the position is measured by, where it is not the name.
    """

    name: str
    kind: ColumnKind = 'position'
    feedback: bool = True
    continuous: bool = False
    scale: float = 1.0
    quaternion: str = ''
    measured_as: str = ''


class OutOfReach(ValueError):  # noqa: N818 - it is about a pose
    """Rows that no joints of the robot can follow."""


class ChunkForm(Protocol):
    """Form of the columns in chunks and plans, where it is not that of the commands.

    Commands have quaternions: no other form of a rotation can be interpolated without a jump.
    `names` and `kinds` are those of the numbers in a row of a chunk.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def to_columns(self, rows: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Convert rows of a chunk, (steps, names), to (steps, columns).

        `near` (columns,) is where the robot is, for rows that several columns stand for.

        Raises:
            OutOfReach: rows that no columns stand for; names the row.
            ValueError: numbers that are no rotation; names the row.
        """

    def to_chunk(self, rows: np.ndarray, like: np.ndarray | None) -> np.ndarray:
        """Convert (steps, columns) to rows of a chunk, (steps, names).

        Rotations are written as in the rows `like` (steps, names); None: the canonical form.
        """


class CommandColumns:
    """All columns of one executor, as read-only arrays of flags beside their names.

    Args:
        form: how chunks and plans write them; None: as they are.

    Attributes:
        measured_as: names for messages of what measures each column.
        labels: names for messages; the columns of a rotation share one.
        quaternions: columns of each rotation, each (4,) int.
        in_rotation: (columns,) bool.
    """

    def __init__(self, columns: Sequence[Column], form: ChunkForm | None = None) -> None:
        if not columns:
            raise ValueError('columns: none given; the executor needs at least one joint')
        self.names = tuple(column.name for column in columns)
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated:
            raise ValueError(f'columns: {repeated} named more than once; names must be unique')
        for column in columns:
            if column.kind not in get_args(ColumnKind):
                raise ValueError(
                    f"columns: '{column.name}' has kind '{column.kind}', expected one of "
                    f'{list(get_args(ColumnKind))}'
                )
            if not 0.0 < column.scale < np.inf:
                raise ValueError(
                    f"columns: '{column.name}' has scale {column.scale}, expected more than 0"
                )
        self.kinds: tuple[str, ...] = tuple(column.kind for column in columns)
        self.count = len(columns)
        self.measured_as = tuple(column.measured_as or column.name for column in columns)
        self.is_velocity = np.array([column.kind == 'velocity' for column in columns])
        self.is_position = ~self.is_velocity
        self.has_feedback = np.array([column.feedback for column in columns])
        self.is_continuous = np.array([column.continuous for column in columns])
        self.quaternions = _quaternions(columns)
        self.in_rotation = np.array([bool(column.quaternion) for column in columns])
        self.labels = tuple(
            f'{column.quaternion}.rotation' if column.quaternion else column.name
            for column in columns
        )
        self.form = form
        self.chunk_names = form.names if form else self.names
        self.chunk_kinds = form.kinds if form else self.kinds
        self.scale = np.array([column.scale for column in columns])
        self.any_velocity = bool(self.is_velocity.any())
        self.any_continuous = bool(self.is_continuous.any())
        for value in (*vars(self).values(), *self.quaternions):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def measured_by(self, columns: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(self.measured_as[column] for column in columns))

    def order_of(self, names: Sequence[str]) -> np.ndarray:
        """Return each chunk number's place in `names`, (chunk names,) int (ValueError: others)."""
        expected = self.chunk_names
        if tuple(names) == expected:
            return np.arange(len(expected))
        missing = [name for name in expected if name not in names]
        unknown = [name for name in names if name not in expected]
        repeated = sorted({name for name in names if list(names).count(name) > 1})
        problems = [
            f'{word} {found}'
            for word, found in (('missing', missing), ('unknown', unknown), ('repeated', repeated))
            if found
        ]
        if problems:
            raise ValueError(
                f'the chunk names {list(names)}, the executor commands {list(expected)}: '
                f"{', '.join(problems)}; make the bundle's action names and the robot file's "
                'joints agree'
            )
        return np.array([list(names).index(name) for name in expected])

    def distance(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the distance between two commands, (..., columns); of a rotation its angle."""
        result = np.abs(end - start)
        for group in self.quaternions:
            result[..., group] = angles_between(start[..., group], end[..., group])[..., None]
        return result


def _quaternions(columns: Sequence[Column]) -> tuple[np.ndarray, ...]:
    """Return the columns of each quaternion, each (4,) int."""
    labels = dict.fromkeys(column.quaternion for column in columns if column.quaternion)
    groups = []
    for label in labels:
        group = [at for at, column in enumerate(columns) if column.quaternion == label]
        if len(group) != 4:
            names = [columns[at].name for at in group]
            raise ValueError(f"columns: quaternion '{label}' has {names}, expected four columns")
        groups.append(np.array(group))
    return tuple(groups)


def describe_no_rotation(rows: np.ndarray, columns: CommandColumns) -> str:
    """Name a quaternion without a direction in rows (steps, columns); empty without one."""
    for group in columns.quaternions:
        lengths = np.linalg.norm(rows[:, group], axis=1)
        row = int(np.argmin(lengths))
        if lengths[row] < _SHORTEST:
            return (
                f'the quaternion {[columns.names[at] for at in group]} in row {row} has a length '
                f'of {lengths[row]:.2g}, expected about 1'
            )
    return ''


def write_alike(
    rows: np.ndarray, columns: CommandColumns, reference: np.ndarray, at_row: int
) -> np.ndarray:
    """Return a copy of the rows unwrapped: continuous from row to row, and nearest to a reference.

    Angles that differ by whole turns are one angle, and q and -q are one rotation; interpolation
    needs the nearest.

    Args:
        rows: (steps, columns).
        reference: (columns,) values that row `at_row`, which is executed first, is to be near to.
    """
    result = rows.copy()
    if columns.any_continuous:
        angles = np.unwrap(rows[:, columns.is_continuous], axis=0)
        turns = np.round((reference[columns.is_continuous] - angles[at_row]) / (2.0 * np.pi))
        result[:, columns.is_continuous] = angles + turns * (2.0 * np.pi)
    for group in columns.quaternions:
        quaternions = rows[:, group]
        flips = np.where((quaternions[1:] * quaternions[:-1]).sum(axis=1) < 0.0, -1.0, 1.0)
        signs = np.concatenate([[1.0], np.cumprod(flips)])
        if np.dot(quaternions[at_row] * signs[at_row], reference[group]) < 0.0:
            signs = -signs
        result[:, group] = quaternions * signs[:, None]
    return result
