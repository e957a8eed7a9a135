"""Normalisation: reference cases, the sources' own formulas, round trips, bad statistics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference_cases import find
from safetensors.numpy import load_file

from vla_runtime.processing.normalization import Normalizer

KINDS = ('quantiles_openpi', 'quantiles_lerobot', 'mean_std_openpi', 'mean_std_lerobot', 'min_max')
LOW, HIGH = np.array([-2.0, 0.0, 5.0]), np.array([1.0, 0.5, 5.0])
STATISTICS = {
    'mean': np.array([0.5, -1.0, 5.0]),
    'std': np.array([2.0, 0.25, 0.0]),
    'min': LOW,
    'max': HIGH,
    'q01': LOW,
    'q99': HIGH,
}


@pytest.mark.cases
@pytest.mark.parametrize('case', find('processing_*.safetensors'), ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ('kind', 'mode'),
    [('quantiles_lerobot', 'quantiles'), ('mean_std_lerobot', 'mean_std'), ('min_max', 'min_max')],
)
def test_reference_values_are_reproduced_both_ways(case, kind, mode):
    tensors = load_file(case)
    statistics = {
        name.removeprefix('stats_'): values
        for name, values in tensors.items()
        if name.startswith('stats_')
    }
    normalizer = Normalizer(kind, statistics)
    x = tensors['norm_input']
    # Relative above 1: the degenerate dimension divides by 1e-8 and reaches 1e8.
    expected = tensors[f'norm_{mode}']
    np.testing.assert_allclose(normalizer.normalise(x), expected, rtol=1e-6, atol=1e-6)
    expected = tensors[f'unnorm_{mode}']
    np.testing.assert_allclose(normalizer.denormalise(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ('kind', 'normalised', 'denormalised'),
    [
        # x = 1 in every dimension; the last one is degenerate.
        (
            'quantiles_openpi',
            [3 / (3 + 1e-6) * 2 - 1, 1 / (0.5 + 1e-6) * 2 - 1, -4 / 1e-6 * 2 - 1],
            [3 + 1e-6 - 2, 0.5 + 1e-6, 5 + 1e-6],
        ),
        ('quantiles_lerobot', [1, 3, -8 / 1e-8 - 1], [1, 0.5, 5 + 1e-8]),
        (
            'mean_std_openpi',
            [0.5 / (2 + 1e-6), 2 / (0.25 + 1e-6), -4 / 1e-6],
            [2.5 + 1e-6, -0.75 + 1e-6, 5 + 1e-6],
        ),
        ('mean_std_lerobot', [0.25, 8, -4 / 1e-8], [2.5, -0.75, 5]),
        ('min_max', [1, 3, -8 / 1e-8 - 1], [1, 0.5, 5 + 1e-8]),
        ('identity', [1, 1, 1], [1, 1, 1]),
    ],
)
def test_values_by_hand(kind, normalised, denormalised):
    normalizer = Normalizer(kind, STATISTICS)
    one = np.ones(3)
    np.testing.assert_allclose(normalizer.normalise(one), normalised, rtol=3e-7)
    np.testing.assert_allclose(normalizer.denormalise(one), denormalised, rtol=3e-7)


def test_openpi_statistics_keep_their_float64_digits():
    q01, q99 = np.array([0.1]), np.array([1234567.1])
    x = np.array([765432.3])
    exact = (x - q01) / (q99 - q01 + 1e-6) * 2.0 - 1.0
    normalizer = Normalizer('quantiles_openpi', {'q01': q01, 'q99': q99})
    np.testing.assert_array_equal(normalizer.normalise(x), exact.astype(np.float32))


@st.composite
def _statistics(draw):
    size = draw(st.integers(1, 8))
    vector = hnp.arrays(np.float32, size, elements=st.floats(-5, 5, width=32))
    spread = hnp.arrays(np.float32, size, elements=st.floats(0.0625, 5, width=32))
    low, width = draw(vector), draw(spread)
    x = draw(hnp.arrays(np.float32, (3, size), elements=st.floats(-10, 10, width=32)))
    high = low + width
    return {'mean': low, 'std': width, 'min': low, 'max': high, 'q01': low, 'q99': high}, x


@pytest.mark.parametrize('kind', ['identity', *KINDS])
@given(drawn=_statistics())
def test_denormalise_undoes_normalise(kind, drawn):
    statistics, x = drawn
    normalizer = Normalizer(kind, statistics)
    there_and_back = normalizer.denormalise(normalizer.normalise(x))
    assert there_and_back.dtype == np.float32
    np.testing.assert_allclose(there_and_back, x, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize('kind', ['quantiles_openpi', 'quantiles_lerobot', 'min_max'])
@given(drawn=_statistics())
def test_bounds_map_to_minus_one_and_one(kind, drawn):
    statistics, _ = drawn
    normalizer = Normalizer(kind, statistics)
    np.testing.assert_allclose(normalizer.normalise(statistics['min']), -1, atol=1e-6)
    np.testing.assert_allclose(normalizer.normalise(statistics['max']), 1, atol=1e-4)


@pytest.mark.parametrize('kind', ['identity', *KINDS])
@pytest.mark.parametrize('shape', [(3,), (10, 3), (2, 10, 3), (0, 3)])
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_leading_dimensions_are_kept_and_the_input_is_left_alone(kind, shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    x.flags.writeable = False
    normalizer = Normalizer(kind, STATISTICS)
    for result in (normalizer.normalise(x), normalizer.denormalise(x)):
        assert result.shape == shape and result.dtype == np.float32
        assert not np.shares_memory(result, x)
    rows = x.reshape(-1, 3)
    one_by_one = np.array([normalizer.normalise(row) for row in rows], np.float32)
    np.testing.assert_array_equal(normalizer.normalise(x).reshape(-1, 3), one_by_one.reshape(-1, 3))


def test_statistics_are_copied():
    statistics = {name: values.copy() for name, values in STATISTICS.items()}
    normalizer = Normalizer('min_max', statistics)
    before = normalizer.normalise(np.ones(3))
    statistics['min'][:] = -99
    np.testing.assert_array_equal(normalizer.normalise(np.ones(3)), before)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('shape', [(32,), (2,), (4, 2), (3, 1), ()])
def test_another_width_is_an_error_that_names_the_dimensions(kind, shape):
    normalizer = Normalizer(kind, STATISTICS, ['shoulder', 'elbow', 'gripper'])
    for direction in (normalizer.normalise, normalizer.denormalise):
        with pytest.raises(ValueError) as error:
            direction(np.zeros(shape))
        assert '3 numbers (shoulder, elbow, gripper)' in str(error.value)
        assert str(shape) in str(error.value)


def test_identity_checks_the_width_when_it_knows_it():
    assert Normalizer('identity', {}).normalise(np.zeros(7)).shape == (7,)
    with pytest.raises(ValueError, match='2 numbers'):
        Normalizer('identity', {}, ['x', 'y']).normalise(np.zeros(3))


@pytest.mark.parametrize(
    ('kind', 'changes', 'words'),
    [
        ('quantiles_openpi', {'q99': None}, ["'q99'", 'missing', 'quantiles_openpi', 'q01']),
        ('min_max', {'min': None}, ["'min'", 'missing']),
        ('mean_std_openpi', {'mean': [0.0, np.nan, 0.0]}, ["'mean'", 'finite', 'elbow', 'nan']),
        ('mean_std_lerobot', {'std': [np.inf, 1.0, 1.0]}, ["'std'", 'finite', 'shoulder', 'inf']),
        ('mean_std_lerobot', {'std': [1.0, 1.0, -0.5]}, ["'std'", 'negative', 'gripper: -0.5']),
        ('quantiles_lerobot', {'q99': [9.0, -9.0, 9.0]}, ["'q99'", "below 'q01'", 'elbow']),
        ('min_max', {'max': [9.0, 9.0, -9.0]}, ["'max'", "below 'min'", 'gripper']),
        ('min_max', {'max': [9.0, 9.0]}, ["'max'", '2 numbers', 'expected 3', 'elbow']),
        ('min_max', {'max': [[9.0, 9.0, 9.0]]}, ["'max'", '(1, 3)']),
        ('min_max', {'max': []}, ["'max'", '(0,)']),
        ('percentiles', {}, ['normaliser', 'min_max', 'percentiles']),
    ],
)
def test_bad_statistics_are_an_error_that_names_them(kind, changes, words):
    statistics = {**STATISTICS, **changes}
    statistics = {name: values for name, values in statistics.items() if values is not None}
    with pytest.raises(ValueError) as error:
        Normalizer(kind, statistics, ['shoulder', 'elbow', 'gripper'])
    for word in words:
        assert word in str(error.value)


def test_unnamed_and_many_bad_dimensions_are_counted():
    with pytest.raises(ValueError, match='nan'):
        Normalizer('mean_std_openpi', {'mean': np.full(8, np.nan), 'std': np.ones(8)})
