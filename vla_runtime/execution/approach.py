"""The approach of a start: from where the robot rests to the first row of a chunk."""

from __future__ import annotations

import numpy as np

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.rotations import (
    Quaternion,
    Vector,
    derivative_of,
    turn_between,
    turned,
    unit,
)

# Fraction of the start's tolerance that is too small to see.
NEGLIGIBLE = 0.01


class Approach:
    """A straight line in joint space at a set speed; all columns arrive together.

    A rotation goes the short way, about one axis. After `timeout_s` beyond its due arrival an
    approach is overdue.
    """

    def __init__(self, model: ColumnModel, timeout_s: float) -> None:
        columns = model.columns
        self._columns, self._speed = columns, model.approach_speed
        self._negligible = NEGLIGIBLE * model.tolerance
        self._timeout_s = timeout_s
        self._start = np.zeros(columns.count)
        self._goal = np.zeros(columns.count)
        self._distance = np.zeros(columns.count)
        # Columns of each rotation, where it sets out, and the turn to its goal.
        self._turns: list[tuple[np.ndarray, Quaternion, Vector]] = []
        self._duration_s = 1.0
        self.elapsed_s = 0.0
        self.active = False
        self.target = np.zeros(columns.count)

    def begin(self, start: np.ndarray, goal: np.ndarray) -> None:
        """Set out from `start` for `goal`, each (columns,); velocity columns stay at zero."""
        np.copyto(self._start, start)
        self._start[self._columns.is_velocity] = 0.0
        np.copyto(self._goal, goal)
        self._goal[self._columns.is_velocity] = 0.0
        np.subtract(self._goal, self._start, out=self._distance)
        way = self._columns.distance(self._start, self._goal)
        self._duration_s = max(float((way / self._speed).max()), 1e-3)
        self._begin_turns()
        self.elapsed_s = 0.0
        self.active = True

    def _begin_turns(self) -> None:
        self._turns.clear()
        for group in self._columns.quaternions:
            start, goal = unit(self._start[group].tolist()), unit(self._goal[group].tolist())
            if start is not None and goal is not None:
                turn = turn_between(start, goal)
                self._goal[group] = turned(start, turn)
                self._turns.append((group, start, turn))

    def stop(self) -> None:
        self.active = False

    def advance(self, dt_s: float, velocity: np.ndarray) -> np.ndarray:
        """Return the setpoints `dt_s` later; `velocity` is overwritten with their velocity."""
        self.elapsed_s += dt_s
        progress = self.elapsed_s / self._duration_s
        if progress >= 1.0:
            velocity[:] = 0.0
            np.copyto(self.target, self._goal)
            return self.target
        np.divide(self._distance, self._duration_s, out=velocity)
        np.multiply(self._distance, progress, out=self.target)
        self.target += self._start
        for group, start, turn in self._turns:
            x, y, z = turn
            rotation = turned(start, (progress * x, progress * y, progress * z))
            share = 1.0 / self._duration_s
            self.target[group] = rotation
            velocity[group] = derivative_of(rotation, (share * x, share * y, share * z))
        return self.target

    def arrived(self, commanded: np.ndarray) -> bool:
        """Return whether the approach is at its goal and the command has kept up."""
        if self.elapsed_s < self._duration_s:
            return False
        return bool((self._columns.distance(self.target, commanded) <= self._negligible).all())

    @property
    def overdue(self) -> bool:
        return self.elapsed_s > self._duration_s + self._timeout_s

    def progress(self, commanded: np.ndarray) -> str:
        """Name the column furthest from its goal, and its distance; empty without an approach."""
        if not self.active:
            return ''
        distance = self._columns.distance(self._goal, commanded)
        distance[self._columns.is_velocity] = 0.0
        left_s = distance / self._speed
        worst = int(np.argmax(left_s))
        # One number of a quaternion says nothing about where it goes.
        goal = '' if self._columns.in_rotation[worst] else f', to {self._goal[worst]:.3g}'
        return (
            f"'{self._columns.labels[worst]}' has {distance[worst]:.3g} to go{goal}, "
            f'for {left_s[worst]:.1f} s'
        )

    def describe(self, commanded: np.ndarray) -> str:
        distance = self._columns.distance(self.target, commanded)
        worst = int(np.argmax(distance / self._negligible))
        where = f'has come to {commanded[worst]:.4g} and should have been at '
        where += f'{self.target[worst]:.4g}'
        if self._columns.in_rotation[worst]:
            where = f'is {distance[worst]:.3g} rad from where it should have been'
        return (
            f"'{self._columns.labels[worst]}' {where} after {self._duration_s:.2g} s; given up "
            f'after {self.elapsed_s:.2g} s (approach_timeout_s): something may be in its way'
        )
