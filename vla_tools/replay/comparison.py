"""Two chunks of the same inference, compared step by step and joint by joint."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vla_runtime.types import ActionChunk, same_step_time


@dataclass(frozen=True)
class ChunkError:
    """Difference of a chunk from the recorded one.

    Attributes:
        joints: names of the columns.
        absolute: (steps, joints) float64 absolute difference, in robot units.
        identical: every number is the same, bit for bit.
    """

    joints: tuple[str, ...]
    absolute: np.ndarray
    identical: bool


def compare_chunks(recorded: ActionChunk, replayed: ActionChunk) -> ChunkError:
    """Compare two chunks over the joints and the steps that both have.

    Raises:
        ValueError: they have no joint in common, or another step time.
    """
    if not same_step_time(recorded.step_time_s, replayed.step_time_s):
        raise ValueError(
            f'steps of {recorded.step_time_s:g} s and of {replayed.step_time_s:g} s cannot be '
            'compared'
        )
    joints = tuple(name for name in recorded.names if name in replayed.names)
    if not joints:
        raise ValueError('the chunks have no joint in common')
    steps = min(recorded.horizon, replayed.horizon)
    mine = recorded.actions[:steps, [recorded.names.index(name) for name in joints]]
    others = replayed.actions[:steps, [replayed.names.index(name) for name in joints]]
    same_shape = recorded.actions.shape == replayed.actions.shape
    identical = same_shape and recorded.names == replayed.names and bool(np.all(mine == others))
    return ChunkError(joints, np.abs(mine - others), identical)


@dataclass
class ErrorTotal:
    """Largest and mean error of many chunks, per joint and per step.

    Attributes:
        joints: names of the columns.
        chunks: number of chunks compared.
        identical: number of them that are the same bit for bit.
    """

    joints: tuple[str, ...] = ()
    chunks: int = 0
    identical: int = 0
    _largest: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    _sum: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    _count: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def add(self, error: ChunkError) -> None:
        """Take one chunk's error; all must be of the same joints."""
        if not self.chunks:
            self.joints = error.joints
            self._largest = np.zeros_like(error.absolute)
            self._sum, self._count = self._largest.copy(), self._largest.copy()
        self.chunks += 1
        self.identical += error.identical
        steps = min(len(self._sum), len(error.absolute))
        absolute = error.absolute[:steps]
        self._largest[:steps] = np.maximum(self._largest[:steps], absolute)
        self._sum[:steps] += absolute
        self._count[:steps] += 1

    @property
    def largest(self) -> np.ndarray:
        """(steps, joints) largest absolute error, in robot units."""
        return self._largest

    @property
    def mean(self) -> np.ndarray:
        """(steps, joints) mean absolute error, in robot units."""
        return np.divide(
            self._sum, self._count, out=np.zeros_like(self._sum), where=self._count > 0
        )
