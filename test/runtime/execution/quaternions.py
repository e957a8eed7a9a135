"""Turns of quaternions w, x, y, z, in plain numpy, for comparison with the executor's."""

from __future__ import annotations

import numpy as np

Z = np.array([0.0, 0.0, 1.0])


def turned_by(turn: float, axis: np.ndarray = Z, start: np.ndarray | None = None) -> np.ndarray:
    """(4,) quaternion of a turn about an axis, after another rotation."""
    quaternion = np.array([np.cos(0.5 * turn), *(np.sin(0.5 * turn) * axis)])
    return quaternion if start is None else product(quaternion, start)


def product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(4,) the second rotation, then the first one."""
    w, vector = first[0], first[1:]
    scalar = w * second[0] - vector @ second[1:]
    return np.array([scalar, *(w * second[1:] + second[0] * vector + np.cross(vector, second[1:]))])


def rate(start: np.ndarray, end: np.ndarray, dt_s: float) -> np.ndarray:
    """(3,) angular velocity of the shortest turn between two unit quaternions, rad/s."""
    turn = product(end, start * np.array([1.0, -1.0, -1.0, -1.0]))
    if turn[0] < 0.0:
        turn = -turn
    sine = np.linalg.norm(turn[1:])
    if sine == 0.0:
        return np.zeros(3)
    return 2.0 * np.arctan2(sine, turn[0]) / sine * turn[1:] / dt_s


def angle(start: np.ndarray, end: np.ndarray) -> float:
    """Angle of the shortest turn between two quaternions of any length, rad."""
    return float(
        np.linalg.norm(rate(start / np.linalg.norm(start), end / np.linalg.norm(end), 1.0))
    )
