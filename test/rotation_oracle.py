"""Rotations for tests: the forms that a policy may write them in, and Rodrigues' formula."""

from __future__ import annotations

import numpy as np

FORMS = (
    'quaternion_wxyz',
    'quaternion_xyzw',
    'euler',
    'axis_angle',
    'rotation_6d',
    'rotation_6d_rows',
    'rotation_6d_interleaved',
)


def rodrigues(vector: np.ndarray) -> np.ndarray:
    """Matrix (3, 3) of a rotation vector, rad."""
    angle = np.linalg.norm(vector)
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * cross @ cross
