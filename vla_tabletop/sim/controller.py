"""The controllers of the simulated robot, instead of `ros2_control` on a real one.

A joint follows its newest command: a setpoint at once, a trajectory as
`joint_trajectory_controller` does: from the next update, along straight lines, to a first point
ahead from the measured position. A new trajectory drops the old one. A joint keeps its setpoint
for ever: stopping is up to whoever commands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class CommandError(ValueError):
    """A command that cannot be followed; the message says why."""


class JointFollower:
    """The setpoints of all joints over time.

    Args:
        joint_names: names of the joints, in the order of the setpoints.
        setpoints: (joints,) where they are to begin with.
    """

    def __init__(self, joint_names: Sequence[str], setpoints: np.ndarray) -> None:
        self._names = tuple(joint_names)
        self._setpoints = np.array(setpoints, dtype=np.float64)
        self._trajectories: dict[tuple[str, ...], _Trajectory] = {}

    def restart(self, setpoints: np.ndarray) -> None:
        """Drop all commands and hold these positions."""
        self._trajectories.clear()
        np.copyto(self._setpoints, setpoints)

    def follow(
        self,
        names: Sequence[str],
        times_s: Sequence[float],
        positions: np.ndarray,
        start_s: float | None = None,
    ) -> None:
        """Command a trajectory for some of the joints; one point at time 0 is a setpoint.

        Args:
            times_s: (points,) from the start, ascending.
            positions: (points, joints) radians.
            start_s: time of the start, on the clock of `update`; None: the next update's.

        Raises CommandError: an unknown joint, or numbers that cannot be positions.
        """
        columns = self._columns(names)
        positions = np.asarray(positions, dtype=np.float64)
        times = np.asarray(times_s, dtype=np.float64)
        if positions.shape != (len(times), len(columns)) or not len(times):
            raise CommandError(
                f'{positions.shape} positions for {len(times)} points of {len(columns)} joints'
            )
        if not np.isfinite(positions).all():
            raise CommandError('a position is not a finite number')
        if not (np.diff(times) > 0.0).all() or not times[0] >= 0.0:
            raise CommandError('time_from_start must ascend')
        for key in [key for key in self._trajectories if set(key) & set(names)]:
            del self._trajectories[key]
        self._trajectories[tuple(names)] = _Trajectory(columns, times, positions, start_s)

    def update(self, now_s: float, measured: np.ndarray) -> np.ndarray:
        """Run one update of the controllers at a time that must not go back.

        `measured` is (joints,) rad. Returns (joints,) setpoints; the array is the follower's own.
        """
        for key, trajectory in list(self._trajectories.items()):
            self._setpoints[trajectory.columns] = trajectory.at(now_s, measured)
            if trajectory.is_over(now_s):
                del self._trajectories[key]
        return self._setpoints

    def _columns(self, names: Sequence[str]) -> np.ndarray:
        unknown = [name for name in names if name not in self._names]
        if unknown or len(set(names)) != len(names):
            raise CommandError(
                f'joints {list(names)} are not (each once) among {list(self._names)}'
            )
        return np.array([self._names.index(name) for name in names], dtype=np.int64)


class _Trajectory:
    """Straight lines through the points, from the measured position where the first lies ahead."""

    def __init__(
        self,
        columns: np.ndarray,
        times_s: np.ndarray,
        positions: np.ndarray,
        start_s: float | None,
    ) -> None:
        self.columns = columns
        self._times_s = times_s
        self._positions = positions
        self._start_s = start_s
        self._begun = False

    def at(self, now_s: float, measured: np.ndarray) -> np.ndarray:
        """(joints,) setpoints of its joints now."""
        if not self._begun:
            self._begin(now_s, measured[self.columns])
        after = int(np.searchsorted(self._times_s, now_s, side='right'))
        if after == len(self._times_s):
            return self._positions[-1]
        begin, end = self._times_s[after - 1], self._times_s[after]
        fraction = (now_s - begin) / (end - begin)
        return (1.0 - fraction) * self._positions[after - 1] + fraction * self._positions[after]

    def is_over(self, now_s: float) -> bool:
        """Return whether the last point has been reached."""
        return self._begun and now_s >= self._times_s[-1]

    def _begin(self, now_s: float, measured: np.ndarray) -> None:
        self._begun = True
        self._times_s = self._times_s + (now_s if self._start_s is None else self._start_s)
        if self._times_s[0] > now_s:
            self._times_s = np.concatenate([[now_s], self._times_s])
            self._positions = np.concatenate([measured[None, :], self._positions])
