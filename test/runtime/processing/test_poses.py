"""Rotation forms: oracles, round trips in every form, degenerate input; sines of a state."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rotation_oracle import FORMS
from thorough import examples, thorough_but

from vla_runtime.processing.poses import (
    check_euler_axes,
    continue_from,
    from_matrix,
    from_quaternions,
    rotation_width,
    to_matrix,
    to_quaternions,
    unit_quaternions,
    with_angles,
    write_near,
)

AXES = ('sxyz', 'rzyx', 'szxz', 'rxyz')
ALL_AXES = tuple(
    f'{frame}{first}{second}{third}'
    for frame, first, second, third in itertools.product('sr', 'xyz', 'xyz', 'xyz')
    if second not in (first, third)
)
Z_QUARTER = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])

vectors = hnp.arrays(np.float64, 3, elements=st.floats(-1.8, 1.8))


def _exponential(vector: np.ndarray) -> np.ndarray:
    """Oracle: the matrix exponential of the rotation vector."""
    x, y, z = vector
    skew = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return torch.matrix_exp(torch.from_numpy(skew)).numpy()


@pytest.mark.parametrize(
    ('form', 'values'),
    [
        ('quaternion_wxyz', [math.sqrt(0.5), 0, 0, math.sqrt(0.5)]),
        ('quaternion_xyzw', [0, 0, math.sqrt(0.5), math.sqrt(0.5)]),
        ('euler', [0, 0, math.pi / 2]),
        ('axis_angle', [0, 0, math.pi / 2]),
        ('rotation_6d', [0, 1, 0, -1, 0, 0]),
        ('rotation_6d_rows', [0, -1, 0, 1, 0, 0]),
        ('rotation_6d_interleaved', [0, -1, 1, 0, 0, 0]),
    ],
)
def test_quarter_turn_about_z_in_every_form(form, values):
    np.testing.assert_allclose(to_matrix(np.array(values), form), Z_QUARTER, atol=1e-15)
    np.testing.assert_allclose(from_matrix(Z_QUARTER, form), values, atol=1e-15)
    assert rotation_width(form) == len(values)


@pytest.mark.parametrize('axes', ['sxyz', 'rxyz', 'rzyx'])
def test_euler_angles_follow_the_axis_code(axes):
    angles = np.array([0.3, -0.5, 1.1])
    x, y, z = np.eye(3)
    first, second, third = (
        _exponential(angle * {'x': x, 'y': y, 'z': z}[letter])
        for angle, letter in zip(angles, axes[1:], strict=True)
    )
    # Static axes: each turn from the left; rotating ones: from the right.
    expected = third @ second @ first if axes[0] == 's' else first @ second @ third
    np.testing.assert_allclose(to_matrix(angles, 'euler', axes), expected, atol=1e-14)
    np.testing.assert_allclose(from_matrix(expected, 'euler', axes), angles, atol=1e-14)


@given(vector=vectors)
@example(vector=np.zeros(3))
@example(vector=np.array([1e-9, 0.0, 0.0]))
@example(vector=np.array([0.0, 1e-200, 0.0]))
def test_axis_angle_is_the_exponential_map_and_keeps_small_turns(vector):
    matrix = to_matrix(vector, 'axis_angle')
    np.testing.assert_allclose(matrix, _exponential(vector), atol=1e-14)
    if np.linalg.norm(vector) < 3.1:
        np.testing.assert_allclose(from_matrix(matrix, 'axis_angle'), vector, atol=1e-13)


@pytest.mark.parametrize('axes', thorough_but(['sxyz', 'rzyx'], AXES))
@pytest.mark.parametrize('form', FORMS)
@given(vector=vectors)
@example(vector=np.zeros(3))
@example(vector=np.array([math.pi, 0.0, 0.0]))
@example(vector=np.array([0.0, math.pi / 2, 0.0]))
def test_every_form_holds_every_rotation(form, axes, vector):
    matrix = _exponential(vector)
    values = from_matrix(matrix, form, axes)
    assert values.shape == (rotation_width(form),)
    np.testing.assert_allclose(to_matrix(values, form, axes), matrix, atol=1e-13)


@pytest.mark.parametrize('form', FORMS)
def test_batches_equal_single_rotations(form):
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(2, 5, 3))
    matrices = to_matrix(vectors, 'axis_angle')
    assert matrices.shape == (2, 5, 3, 3)
    values = from_matrix(matrices, form)
    assert values.shape == (2, 5, rotation_width(form))
    for index in np.ndindex(2, 5):
        np.testing.assert_array_equal(values[index], from_matrix(matrices[index], form))
        np.testing.assert_array_equal(
            to_matrix(values, form)[index], to_matrix(values[index], form)
        )
    assert to_matrix(np.zeros((0, rotation_width(form))), form).shape == (0, 3, 3)
    assert from_matrix(np.zeros((0, 3, 3)), form).shape == (0, rotation_width(form))


@given(values=hnp.arrays(np.float64, 4, elements=st.floats(-1, 1)), length=st.floats(0.2, 100))
def test_quaternions_of_any_length_and_sign_mean_the_same(values, length):
    if np.linalg.norm(values) < 0.01:
        return
    unit = unit_quaternions(values[None])[0]
    assert unit @ unit == pytest.approx(1, abs=1e-15)
    assert unit[np.flatnonzero(unit)[0]] > 0
    for scaled in (length * values, -length * values):
        np.testing.assert_allclose(unit_quaternions(scaled[None])[0], unit, atol=1e-14)
    np.testing.assert_allclose(
        to_matrix(length * values, 'quaternion_wxyz'),
        to_matrix(-np.roll(values, -1), 'quaternion_xyzw'),
        atol=1e-14,
    )


@given(
    vector=vectors, lengths=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), lean=st.floats(-2, 2)
)
def test_6d_is_orthonormalised_first_column_first(vector, lengths, lean):
    matrix = _exponential(vector)
    first, second = lengths[0] * matrix[:, 0], lengths[1] * matrix[:, 1]
    columns = np.stack([first, second + lean * first], axis=-1)
    for form, skewed in (
        ('rotation_6d', columns.T.ravel()),
        ('rotation_6d_interleaved', columns.ravel()),
    ):
        np.testing.assert_allclose(to_matrix(skewed, form), matrix, atol=1e-12)
    rows = to_matrix(columns.T.ravel(), 'rotation_6d_rows')
    np.testing.assert_allclose(rows, matrix.T, atol=1e-12)


@pytest.mark.parametrize('form', FORMS)
@given(
    axis=hnp.arrays(np.float64, 3, elements=st.floats(-1, 1)),
    start=vectors,
    step=st.floats(-0.2, 0.2),
)
def test_continued_rotations_are_the_same_and_never_jump(form, axis, start, step):
    if np.linalg.norm(axis) < 0.1:
        axis = np.array([0.0, 0.0, 1.0])
    axis = axis / np.linalg.norm(axis)
    base = _exponential(start)
    matrices = np.array([base @ _exponential(axis * step * i) for i in range(60)])
    values = from_matrix(matrices, form)
    continued = continue_from(values[0], values[1:], form)
    np.testing.assert_allclose(to_matrix(continued, form), matrices[1:], atol=1e-7)
    if form.startswith('quaternion'):
        jumps = np.linalg.norm(np.diff(np.vstack([values[:1], continued]), axis=0), axis=-1)
        assert jumps.max() <= abs(step) / 2 + 1e-9


@pytest.mark.parametrize(
    ('form', 'unit'), [('euler', [0.0, 0.0, 1.0]), ('axis_angle', [0.0, 0.6, 0.8])]
)
def test_angle_running_past_a_half_turn_goes_on(form, unit):
    angles = np.linspace(2.5, 8.0, 56)
    matrices = to_matrix(angles[:, None] * np.array([unit]), form)
    values = from_matrix(matrices, form)
    assert np.abs(np.diff(values, axis=0)).max() > 3
    continued = continue_from(2.5 * np.array(unit), values, form)
    np.testing.assert_allclose(continued, angles[:, None] * np.array([unit]), atol=1e-12)


@pytest.mark.parametrize(
    ('form', 'values', 'words'),
    [
        ('quaternion_wxyz', [0, 0, 0, 0], 'no length'),
        ('quaternion_xyzw', [5e-4, 0, 0, 0], 'no length'),
        ('rotation_6d', [0, 0, 0, 0, 1, 0], 'no length'),
        ('rotation_6d', [0, 1, 0, 0, 0, 0], 'no length'),
        ('rotation_6d', [1, 2, 3, -2, -4, -6], 'parallel'),
        ('rotation_6d', [1, 1e-5, 0, 1, 0, 0], 'parallel'),
        ('rotation_6d_rows', [1, 2, 3, 2, 4, 6], 'rotation_6d_rows has parallel'),
        ('rotation_6d_interleaved', [1, 2, 1, 2, 1, 2], 'interleaved has parallel'),
        ('euler', [0, math.nan, 0], 'not finite'),
        ('axis_angle', [0, math.inf, 0], 'not finite'),
    ],
)
def test_degenerate_rotation_is_an_error_that_names_the_row(form, values, words):
    good = from_matrix(np.eye(3), form)
    with pytest.raises(ValueError, match=rf'row 2: .*{words}'):
        to_matrix(np.array([good, good, values, good], dtype=float), form)
    with pytest.raises(ValueError, match=words):
        to_matrix(np.array(values, dtype=float), form)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('shape', [(), (5,), (3, 2)])
def test_wrong_width_is_an_error(form, shape):
    with pytest.raises(ValueError, match=rf'{form} has {rotation_width(form)} numbers'):
        to_matrix(np.zeros(shape), form)


@pytest.mark.parametrize('axes', ['xyz', 'qxyz', '', 'sxx', None])
def test_unknown_axis_code_is_an_error(axes):
    with pytest.raises(ValueError, match='euler axes'):
        check_euler_axes(axes)


def test_unknown_form_is_an_error():
    with pytest.raises(ValueError, match="'rpy'") as error:
        rotation_width('rpy')
    # One of them mends it.
    said = re.findall(r'\w+', str(error.value))
    assert set(FORMS) <= set(said)


@pytest.mark.parametrize('form', FORMS)
@given(vector=vectors, turns=st.integers(-3, 3))
def test_quaternions_and_back_are_the_same_rotation_in_the_writing_that_is_near(
    form, vector, turns
):
    matrices = np.array([_exponential(vector), np.eye(3)])
    written = from_matrix(matrices, form)
    if form == 'euler':
        written += 2 * np.pi * turns
    elif form.startswith('quaternion') and turns % 2:
        written = -written
    quaternions = to_quaternions(written, form)
    np.testing.assert_allclose(np.linalg.norm(quaternions, axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(to_matrix(quaternions, 'quaternion_wxyz'), matrices, atol=1e-7)
    back = write_near(from_quaternions(-quaternions, form), written, form)
    np.testing.assert_allclose(to_matrix(back, form), matrices, atol=1e-7)
    np.testing.assert_array_equal(back, written)


angles = st.tuples(*[st.floats(-7.0, 7.0)] * 3)


@pytest.mark.parametrize('axes', ALL_AXES)
@examples(30)
@given(written=angles)
@example(written=(0.1, 1.7, 0.2))
@example(written=(0.3, math.pi / 2, 0.5))
@example(written=(0.3, 0.0, 0.5))
@example(written=(0.3, math.pi, -2.5))
def test_euler_angles_come_back_in_the_branch_that_they_were_written_in(axes, written):
    rows = np.array([written])
    quaternions = to_quaternions(rows, 'euler', axes)
    back = write_near(from_quaternions(quaternions, 'euler', axes), rows, 'euler', axes)
    np.testing.assert_array_equal(back, rows)


@pytest.mark.parametrize('axes', ALL_AXES)
@examples(30)
@given(written=angles, near=angles)
def test_no_writing_of_euler_angles_lies_nearer(axes, written, near):
    rows, near = np.array(written), np.array(near)
    matrix = to_matrix(rows, 'euler', axes)
    found = write_near(from_matrix(matrix, 'euler', axes), near, 'euler', axes)
    np.testing.assert_allclose(to_matrix(found, 'euler', axes), matrix, atol=2e-9)
    middle = -found[1] if axes[1] == axes[3] else math.pi - found[1]
    twin = np.array([found[0] + math.pi, middle, found[2] + math.pi])
    np.testing.assert_allclose(to_matrix(twin, 'euler', axes), matrix, atol=2e-9)
    turns = 2 * math.pi * np.array(list(itertools.product(range(-2, 3), repeat=3)))
    others = np.vstack([found + turns, twin + turns])
    nearest = np.linalg.norm(others - near, axis=1).min()
    assert np.linalg.norm(found - near) <= nearest + 1e-9


@pytest.mark.parametrize('axes', ALL_AXES)
def test_continued_euler_angles_go_on_through_gimbal_lock(axes):
    lock = 0.0 if axes[1] == axes[3] else math.pi / 2
    path = np.array([[0.3, lock + 0.02 * step - 0.31, 0.5] for step in range(32)])
    rows = from_matrix(to_matrix(path, 'euler', axes), 'euler', axes)
    continued = continue_from(path[0], rows, 'euler', axes)
    np.testing.assert_allclose(continued, path, atol=1e-12)
    still = np.tile([0.3, lock, 0.5], (3, 1))
    rows = from_matrix(to_matrix(still, 'euler', axes), 'euler', axes)
    np.testing.assert_array_equal(continue_from(still[0], rows, 'euler', axes), still)


@pytest.mark.parametrize('axes', ALL_AXES)
@pytest.mark.parametrize('beside', [0.0, 1e-16, 1e-15, 1e-14, 1e-12, 1e-10, 1e-8, 1e-4])
def test_euler_angles_hold_a_rotation_beside_gimbal_lock(axes, beside):
    lock = 0.0 if axes[1] == axes[3] else math.pi / 2
    outer = np.random.default_rng(0).uniform(-3.0, 3.0, (20, 2))
    rows = np.stack([outer[:, 0], np.full(20, lock - beside), outer[:, 1]], axis=1)
    quaternions = to_quaternions(rows, 'euler', axes)
    back = from_quaternions(quaternions, 'euler', axes)
    wanted = to_matrix(quaternions, 'quaternion_wxyz')
    np.testing.assert_allclose(to_matrix(back, 'euler', axes), wanted, atol=1e-13)


@given(vector=vectors, length=st.floats(0.1, 9.0), lean=st.floats(-2.0, 2.0))
def test_6d_and_quaternions_of_any_length_come_back_as_they_were_written(vector, length, lean):
    first, second = _exponential(vector)[:, :2].T
    skewed = np.concatenate([length * first, second + lean * first])[None]
    back = from_quaternions(to_quaternions(skewed, 'rotation_6d'), 'rotation_6d')
    np.testing.assert_array_equal(write_near(back, skewed, 'rotation_6d'), skewed)
    long = -length * from_matrix(_exponential(vector), 'quaternion_xyzw')[None]
    unit = from_quaternions(to_quaternions(long, 'quaternion_xyzw'), 'quaternion_xyzw')
    np.testing.assert_array_equal(write_near(unit, long, 'quaternion_xyzw'), long)


def test_a_rotation_vector_beyond_half_a_turn_is_written_near_one_and_none_near_a_whole_turn():
    near = np.array([[3.2, 0.0, 0.0], [0.0, 6.2, 0.0], [0.1, 0.0, 0.0]])
    rows = np.array([[3.1 - 2 * np.pi, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    wanted = [[3.1, 0.0, 0.0], [0.0, 2 * np.pi, 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(write_near(rows, near, 'axis_angle'), wanted, atol=1e-12)


@pytest.mark.parametrize(
    ('form', 'rotation'),
    [('quaternion_wxyz', [1.0, 0.0, 0.0, 0.0]), ('rotation_6d', [1.0, 0.0, 0.0, 0.0, 1.0, 0.0])],
)
def test_rows_that_continue_a_state_of_another_length_keep_their_own(form, rotation):
    rows = np.array([rotation, rotation])
    np.testing.assert_array_equal(continue_from(0.5 * rows[0], rows, form), rows)


# --- Sines and cosines of a state, against NVIDIA's formula written out


def joined_by_group(normalised, state, groups, angles):
    """Isaac-GR00T's `apply_state`: each group as numbers or as [sines, cosines], then joined."""
    parts = []
    for index, (first, count) in enumerate(groups):
        of_group = slice(first, first + count)
        if index in angles:
            parts.append(np.concatenate([np.sin(state[of_group]), np.cos(state[of_group])]))
        else:
            parts.append(normalised[of_group])
    return np.concatenate(parts)


@pytest.mark.parametrize('angles', [{0}, {1}, {2}, {0, 1}, {0, 2}, {0, 1, 2}])
def test_a_group_s_sines_come_before_its_cosines_where_its_numbers_stood(angles):
    groups = [(0, 6), (6, 1), (7, 3)]
    random = np.random.default_rng(0)
    normalised, state = random.uniform(-3, 3, (2, 10)).astype(np.float32)
    found = with_angles(normalised, state, [groups[index] for index in sorted(angles)])
    expected = joined_by_group(normalised, state, groups, angles)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
