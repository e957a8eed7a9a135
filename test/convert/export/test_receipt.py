"""The bounds of a comparison, and what its receipt says of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vla_convert.export.receipt import (
    ChunkComparison,
    Comparison,
    Receipt,
    chunk_bound,
)
from vla_runtime.engines.recorded_cases import BOUNDS, error_of


@pytest.mark.parametrize(
    ('precision', 'gain', 'bound', 'by'),
    [
        ('float32', 0.1, 5e-5, 'precision'),
        ('float32', 1.0, 5e-5, 'precision'),
        ('float32', 4.0, 2e-4, 'gain'),
        ('float32', 10.0, 5e-4, 'gain'),
        ('float32', 11.0, 5e-4, 'ceiling'),
        ('float16', 3.0, 3e-2, 'gain'),
        ('float16', 1e6, 1e-1, 'ceiling'),
        ('bfloat16', 1.2, 9.6e-2, 'gain'),
        ('bfloat16', 2.0, 1e-1, 'ceiling'),
        ('float16', math.inf, 1e-1, 'ceiling'),
        ('float16', math.nan, 1e-2, 'precision'),
    ],
)
def test_a_chunks_bound_grows_with_its_gain_up_to_a_ceiling(precision, gain, bound, by):
    found, decided = chunk_bound(precision, gain)
    assert found == pytest.approx(bound) and decided == by


@pytest.mark.parametrize('precision', list(BOUNDS))
def test_no_gain_lets_a_chunk_pass_that_is_another_motion(precision):
    # A twentieth of the normalised range: what no precision explains.
    chunk = ChunkComparison.of('expert.onnx', 'expert.onnx', 0, 1e9, (0.11, 0.01), [], precision)
    assert not chunk.passed


def receipt(*chunks: ChunkComparison) -> Receipt:
    return Receipt('float16', 'cpu', [], [], list(chunks), [])


def test_the_receipt_says_which_bound_applied():
    gains = (0.5, 3.0, 40.0)
    chunks = [
        ChunkComparison.of('g', 'g', 0, gain, (0.001, 0.001), [], 'float16') for gain in gains
    ]
    figures = receipt(*chunks).figures()
    assert [item['bound_by'] for item in figures['chunks']] == ['precision', 'gain', 'ceiling']
    assert [item['bound'] for item in figures['chunks']] == pytest.approx([0.01, 0.03, 0.1])
    assert figures['bounds'] == {'tensor': 1e-2, 'chunk': 1e-2, 'ceiling': 1e-1}
    for word in ('precision', 'gain', 'ceiling'):
        assert f"'{word}'" in figures['bound_by']


@pytest.mark.parametrize(
    ('gain', 'told'),
    [
        (0.5, 'the bound for float16 is 0.01'),
        (3.0, 'the bound for float16 is 0.03, with its gain of 3'),
        (40.0, 'is 0.1, the largest that is accepted: the policy itself makes a change of the '),
    ],
)
def test_a_failure_says_which_bound_it_broke(gain, told):
    chunk = ChunkComparison.of('expert.onnx', 'expert.onnx', 2, gain, (0.2, 0.1), [], 'float16')
    (line,) = receipt(chunk).failures
    assert line.startswith('expert.onnx: the chunk of case 2 differs from PyTorch by 0.2')
    assert told in line


def test_a_tensor_is_judged_by_its_worst_case_and_a_nan_fails():
    good = Comparison.of('vision', 'image_tokens', [(1e-3, 1e-4), (4e-3, 3e-4)], 'float16')
    assert (good.max_error, good.bound, good.passed) == (4e-3, 1e-2, True)
    assert good.mean_error == pytest.approx(2e-4)
    bad = Comparison.of('vision', 'image_tokens', [(1e-3, 1e-4), (math.nan, 1e-4)], 'float16')
    assert math.isnan(bad.max_error) and not bad.passed


def test_errors_are_absolute_below_one_and_relative_to_the_largest_number_above():
    assert error_of(np.array([0.5, 0.0]), np.array([0.25, 0.0])) == (0.25, 0.125)
    assert error_of(np.array([8.0, 0.0]), np.array([4.0, 2.0])) == (1.0, 0.75)
    assert error_of(np.array([True]), np.array([False])) == (1.0, 1.0)
    assert all(map(math.isnan, error_of(np.zeros(2), np.zeros(3))))
    assert math.isnan(error_of(np.array([math.nan]), np.zeros(1))[0])
