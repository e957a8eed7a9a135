"""benchmark/prefix_cache.py and guidance.py: the ratios are of the right times, round by round."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

import guidance
import mid_size
import prefix_cache

from vla_runtime.performance.operation_counts import count_operations


def test_what_is_saved_is_counted_in_vision_times_of_the_other_two():
    found = {
        'hit': [52.0, 110.0],
        'denoise': [50.0, 100.0],
        'all_new': [300.0, 600.0],
        'one_new': [200.0, 410.0],
        'all_new_vision': [150.0, 300.0],
        'one_new_vision': [50.0, 100.0],
        'vision_of_two': [100.0, 200.0],
        'all_new_beside_vision': [2.0, 6.0],
        'one_new_beside_vision': [1.0, 2.0],
        'hit_denoise': [51.0, 100.0],
        'hit_beside_denoise': [1.02, 4.0],
    }
    figures = prefix_cache.summary(found)
    assert figures['hit_over_denoise']['median'] == pytest.approx((1.04 + 1.1) / 2)
    assert figures['cost_of_hit_over_denoise']['median'] == pytest.approx((0.02 + 0.04) / 2)
    assert figures['saved_over_vision_of_two']['median'] == pytest.approx((1.0 + 0.95) / 2)
    assert figures['saved_in_vision_over_vision_of_two']['median'] == 1.0
    assert figures['cost_of_reuse_over_vision_of_two']['median'] == pytest.approx(-0.015)


def test_guidance_is_compared_with_twice_the_prefix_and_nearly_twice_the_expert():
    one = {'vision': 30.0, 'prefix': 50.0, 'denoise': 20.0, 'total': 101.0}
    unguided = {phase: np.array([ms]) for phase, ms in one.items()}
    expected = guidance.counted(unguided)[0]
    # Vision and the rest once; x is embedded once for both rows.
    assert expected == pytest.approx(101 + 50 + 20, rel=1e-3)
    assert expected < 171


def test_guidance_figures_are_of_misses_and_hits_apart():
    phases = ('vision', 'prefix', 'denoise', 'total')
    times = {
        'unguided miss': (30.0, 50.0, 20.0, 100.0),
        'fused miss': (30.0, 90.0, 30.0, 150.0),
        'serial miss': (30.0, 100.0, 40.0, 170.0),
        'unguided hit': (0.0, 0.0, 20.0, 20.0),
        'fused hit': (0.0, 0.0, 30.0, 30.0),
        'serial hit': (0.0, 0.0, 40.0, 40.0),
    }
    found = {
        kind: {phase: [ms] * 3 for phase, ms in zip(phases, values, strict=True)}
        for kind, values in times.items()
    }
    figures = guidance.summary(found)
    assert figures['miss_fused_over_unguided']['median'] == 1.5
    assert figures['miss_fused_over_serial']['median'] == pytest.approx(150 / 170)
    assert figures['hit_fused_over_serial']['median'] == 0.75
    assert figures['hit_fused_over_counted']['median'] == pytest.approx(0.75, rel=1e-3)


def test_the_mid_size_policy_has_about_a_hundred_million_parameters():
    dims = mid_size.DIMS
    read = count_operations('pi05', dims).inference(steps=1, images=1)
    # Every weight once, but for the rows of the text table that are not looked up, the last prefix
    # layer's unused half and the time network.
    weights = sum(work.weight_bytes for work in read.values()) / 4
    assert 75e6 < weights + dims.vocabulary * dims.language.width < 110e6
