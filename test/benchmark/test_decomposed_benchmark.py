"""benchmark/decomposed.py: both forms give one chunk, and counts stand beside the right ratios."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from onnx_bundles import tiny_onnx_bundle
from paths import ROOT

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.performance.roofline import Rates

sys.path.insert(0, str(ROOT / 'benchmark'))

import decomposed

# One operation and one byte a nanosecond.
RATES = Rates(1e9, 1e9, 'made up')


@pytest.fixture
def subject(monkeypatch):
    bundle = tiny_onnx_bundle()
    spec = read_bundle(bundle, verify=False).spec
    monkeypatch.setattr(decomposed, 'DIMS', spec.dims)
    monkeypatch.setattr(decomposed, 'STEPS', spec.denoise_steps)
    return decomposed.Subject(bundle)


def test_every_piece_gives_the_same_chunk_and_is_timed_once_a_round(subject):
    found = decomposed.measure(subject, rounds=3)
    assert set(found['whole']) == {'monolithic', 'miss', 'one_new', 'hit'}
    assert set(found['phases']) == {'vision', 'prefix', 'denoise'}
    assert {len(values) for part in found.values() for values in part.values()} == {3}


def test_a_chunk_that_differs_ends_the_measurement(subject, monkeypatch):
    real = subject.monolithic
    monkeypatch.setattr(subject, 'monolithic', lambda: real() + 2 * decomposed.BOUND)
    with pytest.raises(SystemExit, match='monolithic: differs from the decomposed chunk by'):
        decomposed.measure(subject, rounds=1)


def test_ratios_are_taken_within_a_round(subject):
    whole = {
        'monolithic': [30.0, 300.0],
        'miss': [10.0, 100.0],
        'one_new': [5.0, 50.0],
        'hit': [1.0, 10.0],
    }
    phases = {'vision': [4.0, 8.0], 'prefix': [4.0, 4.0], 'denoise': [2.0, 9.0]}
    figures = decomposed.summary({'whole': whole, 'phases': phases}, RATES)
    ratio = figures['ratios']['monolithic_over_miss']
    assert ratio['median'] == ratio['of_the_fastest'] == 3.0
    assert figures['ratios']['hit_over_monolithic']['median'] == pytest.approx(1 / 30)
    shares = [phase['share_of_the_time'] for phase in figures['phases'].values()]
    assert shares == pytest.approx([0.4, 0.4, 0.2])
    assert sum(
        phase['share_of_the_operations'] for phase in figures['phases'].values()
    ) == pytest.approx(1.0)


def test_counts_order_the_pieces_as_they_are_made(subject):
    count = {name: of['gflop'] for name, of in decomposed.counted(RATES).items()}
    assert count['hit'] < count['one_new'] < count['miss'] == count['monolithic']
    assert count['miss'] < count['no_cache']
    # A step has fewer tokens than a prefix: what it reads again weighs more than it computes.
    slow_memory = decomposed.counted(Rates(1e12, 1e6, ''))
    ratio = slow_memory['hit']['least_ms'] / slow_memory['miss']['least_ms']
    assert ratio > count['hit'] / count['miss']
    assert np.isfinite(ratio)
