"""Rotations in the seven forms that policies speak, to matrices and back (through transforms3d).

Forms, all in radians where there are angles:
- `quaternion_wxyz`, `quaternion_xyzw`: 4 numbers, any length but zero on the way in; unit length
  and canonical sign (the first of w, x, y, z that is not zero is positive) on the way out.
- `euler`: 3 angles about the axes that transforms3d's code names (`sxyz`: static x, then y, then
  z; `rzyx`: rotating z, then y, then x).
- `axis_angle`: the rotation vector, axis times angle; its length is in [0, pi] on the way out.
- `rotation_6d`: the first column of the matrix, then the second; Gram-Schmidt on the way in
  (Zhou et al., arXiv 1812.07035, section B).
- `rotation_6d_rows`: the same of the matrix's first two rows.
- `rotation_6d_interleaved`: the first two columns, row by row: r00, r01, r10, r11, r20, r21.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from transforms3d import euler as t3d_euler
from transforms3d import quaternions as t3d_quaternions

from vla_runtime.processing.words import check_word
from vla_runtime.types import ROTATION_LENGTH, RotationForm

# Angles of a state as their sines and cosines, group by group.


def with_angles(
    normalised: np.ndarray, state: np.ndarray, groups: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Put the sines of each group, then its cosines, where its normalised numbers stand.

    Args:
        normalised: (S,) float32.
        state: (S,) float32, not normalised.
        groups: first dimension and number of each, ascending.

    Returns:
        (S + numbers of all groups,) float32.
    """
    parts, end = [], 0
    for first, count in groups:
        angles = state[first : first + count]
        parts += [normalised[end:first], np.sin(angles), np.cos(angles)]
        end = first + count
    return np.concatenate([*parts, normalised[end:]]).astype(np.float32, copy=False)


_FORMS_6D = [form for form, width in ROTATION_LENGTH.items() if width == 6]
# Below this length, or sine of an angle, the direction of a quaternion or 6D vector is noise.
DEGENERATE = 1e-3
# Below this angle, rad, a rotation vector has no axis.
_NO_AXIS = 1e-6
# Rotations that are closer than this, rad, are one: far above rounding errors.
_SAME = 1e-12


def rotation_width(form: RotationForm) -> int:
    """Return how many numbers a rotation takes in this form; ValueError for an unknown form."""
    check_word('rotation form', form, RotationForm)
    return ROTATION_LENGTH[form]


def check_euler_axes(axes: str) -> None:
    """ValueError for an axis code that transforms3d does not know."""
    try:
        t3d_euler.euler2mat(0.0, 0.0, 0.0, axes)
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"euler axes must be 's' or 'r' and three axes, for example 'sxyz' or 'rzyx'; got "
            f'{axes!r}'
        ) from error


def to_matrix(values: np.ndarray, form: RotationForm, euler_axes: str = 'sxyz') -> np.ndarray:
    """Convert rotations to matrices.

    Args:
        values: (..., k) with k = `rotation_width(form)`.
        euler_axes: transforms3d's axis code, for `euler` only.

    Returns:
        (..., 3, 3) float64, proper rotations.

    Raises:
        ValueError: a wrong width, a value that is not finite, a quaternion of no length, or 6D
            vectors that are zero or parallel; names the row.
    """
    values = np.asarray(values, dtype=np.float64)
    rows = _rows(values, form)
    if form in _FORMS_6D:
        matrices = _from_6d(rows, form)
    elif form == 'euler':
        matrices = _from_euler(rows, euler_axes)
    elif form == 'axis_angle':
        matrices = _stack(t3d_quaternions.quat2mat(row) for row in _vectors_to_quaternions(rows))
    else:
        quaternions = unit_quaternions(_reorder(rows, form, to_wxyz=True))
        matrices = _stack(t3d_quaternions.quat2mat(row) for row in quaternions)
    return matrices.reshape(*values.shape[:-1], 3, 3)


def from_matrix(matrices: np.ndarray, form: RotationForm, euler_axes: str = 'sxyz') -> np.ndarray:
    """Convert proper rotations (..., 3, 3) to (..., k) float64 in the module's canonical writing.

    `euler_axes` is transforms3d's axis code, for `euler` only.
    """
    width = rotation_width(form)
    matrices = np.asarray(matrices, dtype=np.float64)
    flat = matrices.reshape(-1, 3, 3)
    if form == 'rotation_6d':
        rows = flat[:, :, :2].transpose(0, 2, 1).reshape(-1, 6)
    elif form == 'rotation_6d_rows':
        rows = flat[:, :2].reshape(-1, 6)
    elif form == 'rotation_6d_interleaved':
        rows = flat[:, :, :2].reshape(-1, 6)
    elif form == 'euler':
        rows = _to_euler(flat, euler_axes)
    else:
        quaternions = _stack((t3d_quaternions.mat2quat(matrix) for matrix in flat), (4,))
        quaternions = unit_quaternions(quaternions)
        if form == 'axis_angle':
            rows = _quaternions_to_vectors(quaternions)
        else:
            rows = _reorder(quaternions, form, to_wxyz=False)
    return rows.reshape(*matrices.shape[:-2], width)


def unit_quaternions(quaternions: np.ndarray) -> np.ndarray:
    """Return quaternions (n, 4), as w, x, y, z, of unit length and canonical sign, float64.

    Raises:
        ValueError: a quaternion shorter than 1e-3 has no direction; names the row.
    """
    quaternions = np.asarray(quaternions, dtype=np.float64)
    lengths = np.linalg.norm(quaternions, axis=-1, keepdims=True)
    _refuse_rows(
        lengths[:, 0] < DEGENERATE, quaternions, 'quaternion (w, x, y, z)', 'has no length'
    )
    unit = quaternions / lengths
    first = np.argmax(unit != 0.0, axis=-1)
    leading = np.take_along_axis(unit, first[:, None], axis=-1)
    return np.where(leading < 0.0, -unit, unit)


def to_quaternions(values: np.ndarray, form: RotationForm, euler_axes: str = 'sxyz') -> np.ndarray:
    """Convert rotations (n, k) to unit quaternions (n, 4) float64, w, x, y, z, of canonical sign.

    `euler_axes` is transforms3d's axis code, for `euler` only. Raises ValueError as `to_matrix`.
    """
    if form in ('quaternion_wxyz', 'quaternion_xyzw'):
        return unit_quaternions(_reorder(_rows(values, form), form, to_wxyz=True))
    if form == 'axis_angle':
        return unit_quaternions(_vectors_to_quaternions(_rows(values, form)))
    return from_matrix(to_matrix(values, form, euler_axes), 'quaternion_wxyz')


def from_quaternions(
    quaternions: np.ndarray, form: RotationForm, euler_axes: str = 'sxyz'
) -> np.ndarray:
    """Convert quaternions (n, 4), as w, x, y, z, to rotations (n, k) in their canonical writing.

    Args:
        quaternions: of any length but zero, and of either sign.
        euler_axes: transforms3d's axis code, for `euler` only.

    Raises:
        ValueError: a quaternion that has no length; names the row.
    """
    if form == 'axis_angle':
        return _quaternions_to_vectors(unit_quaternions(quaternions))
    if form in ('quaternion_wxyz', 'quaternion_xyzw'):
        return _reorder(unit_quaternions(quaternions), form, to_wxyz=False)
    return from_matrix(to_matrix(quaternions, 'quaternion_wxyz'), form, euler_axes)


def continue_from(
    start: np.ndarray, rows: np.ndarray, form: RotationForm, euler_axes: str = 'sxyz'
) -> np.ndarray:
    """Write each rotation so that it lies closest to the one before it.

    For readers of a chunk: a plot, or a controller that interpolates number by number, sees no
    jump where the rotation has none. The executor goes by quaternions and needs none of it.

    Args:
        start: (k,) the rotation that comes before the first row, such as the robot's state.
        rows: (n, k) rotations in the same form.
        euler_axes: transforms3d's axis code, for `euler` only.

    Returns:
        (n, k) float64, the same orientations; angles may leave [-pi, pi].

    Raises:
        ValueError: as `to_matrix`.
    """
    result = np.array(rows, dtype=np.float64)
    before = np.asarray(start, dtype=np.float64)
    same = np.zeros(len(result), dtype=bool)
    if form == 'euler':
        # In gimbal lock. In other forms the state's numbers may be of any length, and the rows not.
        same = _same(result, np.vstack([before, result])[:-1], form, euler_axes)
    for index in range(len(result)):
        if not same[index]:
            before = _nearest(result[index], before, form, euler_axes)
        result[index] = before
    return result


def write_near(
    rows: np.ndarray, near: np.ndarray, form: RotationForm, euler_axes: str = 'sxyz'
) -> np.ndarray:
    """Write each rotation so that its numbers lie closest to given ones.

    One orientation has several writings: two quaternions, angles 2 pi apart, two triples of Euler
    angles. Where the given numbers are the same rotation they are its writing: in gimbal lock, or
    in 6D, a rotation has any number of them.

    `rows` and `near` are (..., k) rotations in the same form, and so is the float64 result; its
    angles may leave [-pi, pi]. Raises ValueError as `to_matrix`.
    """
    rows, near = np.asarray(rows, dtype=np.float64), np.asarray(near, dtype=np.float64)
    same = _same(rows, near, form, euler_axes)[..., None]
    return np.where(same, near, _nearest(rows, near, form, euler_axes))


def _same(rows: np.ndarray, near: np.ndarray, form: RotationForm, euler_axes: str) -> np.ndarray:
    """Return where two rotations are one: (..., k) and (..., k) to (...) bool."""
    if form == 'euler' or form in _FORMS_6D:
        apart = to_matrix(rows, form, euler_axes) - to_matrix(near, form, euler_axes)
        # This norm is sqrt(8) sin(angle / 2).
        return np.linalg.norm(apart, axis=(-2, -1)) < math.sqrt(2.0) * _SAME
    first, second = to_quaternions(rows, form), to_quaternions(near, form)
    # A canonical sign may differ between neighbours: w is 0 at half a turn.
    apart = np.minimum(
        np.linalg.norm(first - second, axis=-1), np.linalg.norm(first + second, axis=-1)
    )
    return (2.0 * apart < _SAME).reshape(rows.shape[:-1])


def _nearest(rows: np.ndarray, near: np.ndarray, form: RotationForm, euler_axes: str) -> np.ndarray:
    if form in ('quaternion_wxyz', 'quaternion_xyzw'):
        return np.where((rows * near).sum(axis=-1, keepdims=True) < 0.0, -rows, rows)
    if form == 'euler':
        first, middle, last = np.moveaxis(rows, -1, 0)
        # With two turns about one axis the middle angle is mirrored at 0, else at a quarter turn.
        mirrored = -middle if euler_axes[1] == euler_axes[3] else math.pi - middle
        twins = np.stack([first + math.pi, mirrored, last + math.pi], axis=-1)
        rows, twins = (one + whole_turns(near - one) for one in (rows, twins))
        nearer = np.linalg.norm(twins - near, axis=-1) < np.linalg.norm(rows - near, axis=-1)
        return np.where(nearer[..., None], twins, rows)
    if form == 'axis_angle':
        angle = np.linalg.norm(rows, axis=-1, keepdims=True)
        # Without an angle there is no axis of its own, and whole turns about any are the same.
        turning = np.where(angle > _NO_AXIS, rows, near)
        length = np.linalg.norm(turning, axis=-1, keepdims=True)
        axis = np.divide(turning, length, out=np.zeros_like(turning), where=length > _NO_AXIS)
        return rows + whole_turns((near * axis).sum(axis=-1, keepdims=True) - angle) * axis
    return rows.copy()


def whole_turns(angle: np.ndarray) -> np.ndarray:
    """Return the whole turns that are nearest to angles; all in rad."""
    return 2.0 * np.pi * np.round(angle / (2.0 * np.pi))


def _from_euler(rows: np.ndarray, axes: str) -> np.ndarray:
    first, middle, last = (_about(rows[:, turn], axes[1 + turn]) for turn in range(3))
    return last @ middle @ first if axes[0] == 's' else first @ middle @ last


def _about(angles: np.ndarray, axis: str) -> np.ndarray:
    along, u, v = _axes_from(axis)
    result = np.zeros((len(angles), 3, 3))
    result[:, along, along] = 1.0
    result[:, u, u] = result[:, v, v] = np.cos(angles)
    result[:, v, u] = np.sin(angles)
    result[:, u, v] = -result[:, v, u]
    return result


def _to_euler(matrices: np.ndarray, axes: str) -> np.ndarray:
    """(n, 3, 3) to (n, 3): transforms3d's angles; the last one is what the others leave over.

    Near gimbal lock transforms3d's last angle was up to 0.4 rad off.
    """
    rows = _stack((t3d_euler.mat2euler(matrix, axes=axes) for matrix in matrices), (3,))
    back = _from_euler(rows * [1.0, 1.0, 0.0], axes).transpose(0, 2, 1)
    rest = matrices @ back if axes[0] == 's' else back @ matrices
    _, u, v = _axes_from(axes[3])
    rows[:, 2] = np.arctan2(rest[:, v, u] - rest[:, u, v], rest[:, u, u] + rest[:, v, v])
    return rows


def _axes_from(axis: str) -> tuple[int, int, int]:
    along = 'xyz'.index(axis)
    return along, (along + 1) % 3, (along + 2) % 3


def _from_6d(rows: np.ndarray, form: RotationForm) -> np.ndarray:
    if form == 'rotation_6d_interleaved':
        first, second = rows[:, 0::2], rows[:, 1::2]
    else:
        first, second = rows[:, :3], rows[:, 3:]
    first_length = np.linalg.norm(first, axis=-1, keepdims=True)
    second_length = np.linalg.norm(second, axis=-1, keepdims=True)
    zero = np.minimum(first_length, second_length)[:, 0] < DEGENERATE
    _refuse_rows(zero, rows, form, 'has a vector of no length')
    x = first / first_length
    rest = second - np.sum(x * second, axis=-1, keepdims=True) * x
    rest_length = np.linalg.norm(rest, axis=-1, keepdims=True)
    parallel = (rest_length < DEGENERATE * second_length)[:, 0]
    _refuse_rows(parallel, rows, form, 'has parallel vectors')
    y = rest / rest_length
    # Vectors are rows of the matrix in that form alone.
    return np.stack([x, y, np.cross(x, y)], axis=-2 if form == 'rotation_6d_rows' else -1)


def _rows(values: np.ndarray, form: RotationForm) -> np.ndarray:
    """Return rotations as (n, k) float64; ValueError for a wrong width, or what is not finite."""
    width = rotation_width(form)
    values = np.asarray(values, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] != width:
        raise ValueError(
            f'a rotation as {form} has {width} numbers, got an array of shape {values.shape}'
        )
    rows = values.reshape(-1, width)
    _refuse_rows(~np.isfinite(rows).all(axis=-1), rows, form, 'is not finite')
    return rows


def _vectors_to_quaternions(vectors: np.ndarray) -> np.ndarray:
    """(n, 3) rotation vectors to (n, 4) unit quaternions."""
    angle = np.linalg.norm(vectors, axis=-1, keepdims=True)
    # sinc keeps the limit at no rotation: sin(angle / 2) / angle -> 1 / 2.
    half_sine_over_angle = 0.5 * np.sinc(angle / (2.0 * np.pi))
    return np.hstack([np.cos(angle / 2.0), half_sine_over_angle * vectors])


def _quaternions_to_vectors(quaternions: np.ndarray) -> np.ndarray:
    """(n, 4) canonical unit quaternions to (n, 3) rotation vectors, exact for small turns."""
    sine = np.linalg.norm(quaternions[:, 1:], axis=-1, keepdims=True)
    angle = 2.0 * np.arctan2(sine, quaternions[:, :1])
    scale = np.divide(angle, sine, out=np.full_like(sine, 2.0), where=sine > 0.0)
    return quaternions[:, 1:] * scale


def _reorder(rows: np.ndarray, form: RotationForm, *, to_wxyz: bool) -> np.ndarray:
    if form == 'quaternion_wxyz':
        return rows
    return np.roll(rows, 1 if to_wxyz else -1, axis=-1)


def _stack(rows: Iterable[np.ndarray], shape: tuple[int, ...] = (3, 3)) -> np.ndarray:
    return np.array(list(rows), dtype=np.float64).reshape(-1, *shape)


def _refuse_rows(bad: np.ndarray, rows: np.ndarray, form: str, what: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        where = f'row {row}: ' if len(rows) > 1 else ''
        raise ValueError(f'{where}rotation as {form} {what}: {rows[row].tolist()}')
