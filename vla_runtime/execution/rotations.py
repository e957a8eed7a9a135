"""Rotations as unit quaternions w, x, y, z: the turn from one to another, and its angle.

A turn is a rotation vector: axis times angle, rad, in the frame of the rotations. The scalar
functions are plain arithmetic: arrays of four numbers cost more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Vector = tuple[float, float, float]
Quaternion = tuple[float, float, float, float]

# Below this length a quaternion has no direction that means anything.
SHORTEST = 1e-6
_ROUNDING = 1e-14


def unit(quaternion: Sequence[float]) -> Quaternion | None:
    """Return a quaternion at length 1; None for one without a direction."""
    w, x, y, z = quaternion
    square = w * w + x * x + y * y + z * z
    # What has this length already stays as it is: rounding must not look like motion.
    if abs(square - 1.0) < _ROUNDING:
        return w, x, y, z
    length = math.sqrt(square)
    if not length > SHORTEST:
        return None
    return w / length, x / length, y / length, z / length


def turn_between(start: Quaternion, end: Quaternion) -> Vector:
    """Return the shortest turn that leads from one unit quaternion to another."""
    aw, ax, ay, az = start
    bw, bx, by, bz = end
    w, x, y, z = _times_inverse(bw, bx, by, bz, aw, ax, ay, az)
    sine = math.sqrt(x * x + y * y + z * z)
    # A turn by more than half a turn is one by less the other way round.
    scale = 2.0 if sine == 0.0 else 2.0 * math.atan2(sine, abs(w)) / sine
    if w < 0.0:
        scale = -scale
    return scale * x, scale * y, scale * z


def turned(start: Quaternion, turn: Vector) -> Quaternion:
    """Return a unit quaternion after a turn, written as the nearer of q and -q."""
    x, y, z = turn
    angle = math.sqrt(x * x + y * y + z * z)
    if angle == 0.0:
        return start
    scale, w = math.sin(0.5 * angle) / angle, math.cos(0.5 * angle)
    x, y, z = scale * x, scale * y, scale * z
    aw, ax, ay, az = start
    result = unit(
        (
            w * aw - x * ax - y * ay - z * az,
            w * ax + x * aw + y * az - z * ay,
            w * ay + y * aw + z * ax - x * az,
            w * az + z * aw + x * ay - y * ax,
        )
    )
    return start if result is None else result


def rate_of(quaternion: Sequence[float], derivative: Sequence[float]) -> Vector:
    """Return the angular velocity, rad/s, of a quaternion of any length and its derivative, 1/s."""
    aw, ax, ay, az = quaternion
    bw, bx, by, bz = derivative
    square = aw * aw + ax * ax + ay * ay + az * az
    if not square > SHORTEST * SHORTEST:
        return 0.0, 0.0, 0.0
    _, x, y, z = _times_inverse(bw, bx, by, bz, aw, ax, ay, az)
    return 2.0 * x / square, 2.0 * y / square, 2.0 * z / square


def derivative_of(quaternion: Quaternion, rate: Vector) -> Quaternion:
    """Return the derivative, 1/s, of a unit quaternion that turns at a rate, rad/s."""
    aw, ax, ay, az = quaternion
    x, y, z = 0.5 * rate[0], 0.5 * rate[1], 0.5 * rate[2]
    return (
        -x * ax - y * ay - z * az,
        x * aw + y * az - z * ay,
        y * aw + z * ax - x * az,
        z * aw + x * ay - y * ax,
    )


def angles_between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the angles of the shortest turns, rad: (..., 4) and (..., 4) to (...).

    Quaternions may have any length; one without a direction is half a turn from all others.
    """
    start = start / np.maximum(np.linalg.norm(start, axis=-1, keepdims=True), SHORTEST)
    end = end / np.maximum(np.linalg.norm(end, axis=-1, keepdims=True), SHORTEST)
    # As exact for the smallest angles as for half a turn, which an arc cosine is not.
    apart = np.linalg.norm(end - start, axis=-1)
    together = np.linalg.norm(end + start, axis=-1)
    return 4.0 * np.arctan2(np.minimum(apart, together), np.maximum(apart, together))


def turns_between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the shortest turns, (n, 3), between quaternions, (n, 4); none without a direction."""
    turns = np.zeros((len(start), 3))
    for index, (first, second) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        before, after = unit(first), unit(second)
        if before is not None and after is not None:
            turns[index] = turn_between(before, after)
    return turns


def _times_inverse(
    bw: float, bx: float, by: float, bz: float, aw: float, ax: float, ay: float, az: float
) -> Quaternion:
    """Return the product of a quaternion b and the conjugate of another one, a."""
    return (
        bw * aw + bx * ax + by * ay + bz * az,
        aw * bx - bw * ax + ay * bz - az * by,
        aw * by - bw * ay + az * bx - ax * bz,
        aw * bz - bw * az + ax * by - ay * bx,
    )
