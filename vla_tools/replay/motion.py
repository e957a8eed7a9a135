"""Measured motion of a bag, and how far predicted chunks are from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_runtime.robot.schema import Robot
from vla_runtime.types import ActionChunk
from vla_tools.replay.recorded import ReplayError

# Longest time without a measurement that is interpolated over, at least.
_GAP_NS = 200_000_000


@dataclass
class RecordedMotion:
    """Measured positions of the joints over time, in the robot file's units."""

    times_ns: dict[str, list[int]] = field(default_factory=dict)
    positions: dict[str, list[float]] = field(default_factory=dict)

    def add(self, joint: str, stamp_ns: int, position: float) -> None:
        times = self.times_ns.setdefault(joint, [])
        if not times or stamp_ns > times[-1]:
            times.append(stamp_ns)
            self.positions.setdefault(joint, []).append(position)

    def at(
        self, joint: str, stamps_ns: np.ndarray, longest_gap_ns: int, *, continuous: bool = False
    ) -> np.ndarray:
        """Return positions at these times, interpolated; NaN before, behind and within long gaps.

        Those of a continuous joint go on where its driver wraps them around.
        """
        times = np.array(self.times_ns.get(joint, ()), dtype=np.int64)
        if len(times) < 2:
            return np.full(len(stamps_ns), np.nan)
        relative = (stamps_ns - times[0]).astype(np.float64)
        known = (times - times[0]).astype(np.float64)
        positions = np.array(self.positions[joint])
        if continuous:
            positions = np.unwrap(positions)
        found = np.interp(relative, known, positions, left=np.nan, right=np.nan)
        after = np.clip(np.searchsorted(times, stamps_ns), 1, len(times) - 1)
        found[times[after] - times[after - 1] > longest_gap_ns] = np.nan
        return found


@dataclass
class OpenLoopError:
    """Error of predictions by step ahead, beside that of standing still.

    Attributes:
        joints: measured position columns.
        mean: (steps, joints) mean absolute difference of prediction and measurement.
        largest: (steps, joints) largest one.
        still: (steps, joints) mean absolute difference from the position at the observation.
    """

    joints: tuple[str, ...]
    units: tuple[str, ...]
    step_time_s: float
    mean: np.ndarray
    largest: np.ndarray
    still: np.ndarray
    predictions: int


def open_loop_error(
    predictions: Sequence[tuple[int, ActionChunk]], motion: RecordedMotion, robot: Robot
) -> OpenLoopError:
    """Compare predicted chunks (stamp of the observation; robot units) with measured positions.

    Row i is compared with the position i steps after its observation. Times without measurement
    and velocity columns are left out; whole turns of a continuous joint do not count. Raises
    ReplayError: there is nothing to compare.
    """
    if not predictions:
        raise ReplayError('no prediction could be made')
    first = predictions[0][1]
    known = {joint.name: joint for joint in robot.joints}
    columns = [
        (index, name)
        for index, (name, kind) in enumerate(zip(first.names, first.kinds, strict=True))
        if kind == 'position' and name in motion.times_ns
    ]
    if not columns:
        raise ReplayError('no column of the policy is a measured position')
    steps = np.arange(first.horizon) * round(first.step_time_s * 1e9)
    # Twice a step is too long a time without a measurement.
    gap_ns = max(2 * round(first.step_time_s * 1e9), _GAP_NS)
    continuous = np.array([known[name].continuous for _, name in columns])
    predicted = np.stack([chunk.actions[:, [i for i, _ in columns]] for _, chunk in predictions])
    measured = np.stack(
        [
            np.stack(
                [
                    motion.at(name, stamp_ns + steps, gap_ns, continuous=turns)
                    for (_, name), turns in zip(columns, continuous, strict=True)
                ],
                axis=1,
            )
            for stamp_ns, _ in predictions
        ]
    )
    error = _distance(predicted, measured, continuous)
    still = _distance(measured, measured[:, :1], continuous)
    return OpenLoopError(
        joints=tuple(name for _, name in columns),
        units=tuple(known[name].unit for _, name in columns),
        step_time_s=first.step_time_s,
        mean=_over_predictions(error, np.mean),
        largest=_over_predictions(error, np.max),
        still=_over_predictions(still, np.mean),
        predictions=len(predictions),
    )


def _distance(first: np.ndarray, second: np.ndarray, continuous: np.ndarray) -> np.ndarray:
    """Return absolute differences of positions (predictions, steps, joints)."""
    difference = first - second
    turns = np.round(difference[..., continuous] / (2.0 * np.pi))
    difference[..., continuous] -= 2.0 * np.pi * turns
    return np.abs(difference)


def _over_predictions(values: np.ndarray, reduce: Any) -> np.ndarray:
    """Reduce (predictions, steps, joints) over the predictions, without those that are NaN."""
    steps, joints = values.shape[1:]
    result = np.full((steps, joints), np.nan)
    for step in range(steps):
        for joint in range(joints):
            known = values[:, step, joint]
            known = known[np.isfinite(known)]
            if len(known):
                result[step, joint] = reduce(known)
    return result
