"""Figures of tick_jitter over minutes hold all windows, not the newest alone."""

from __future__ import annotations

import sys

import pytest
from paths import ROOT

pytest.importorskip('rclpy')
sys.path.insert(0, str(ROOT / 'benchmark'))

import tick_jitter


def window(p50: float, p99: float, most: float) -> dict[str, str]:
    return {'late_p50_ms': str(p50), 'late_p99_ms': str(p99), 'late_max_ms': str(most)}


def test_one_bad_window_of_many_is_told():
    windows = [window(0.1, 0.5, 0.9), window(0.2, 7.0, 9.0), window(0.1, 0.6, 1.0)]
    assert tick_jitter.lateness_of(windows) == {
        'windows': 3,
        'late_p50_ms': 0.1,
        'late_p99_ms': 0.6,
        'late_p99_worst_ms': 7.0,
        'late_max_ms': 9.0,
    }


def test_the_work_of_this_process_is_counted_as_the_benchmarks():
    load = tick_jitter.Load()
    while load._own_cpu_s() - load._own_s < 0.3:
        sum(range(100_000))
    figures = load.since()
    assert figures['busy_cores_of_benchmark'] > 0.0
    assert figures['busy_cores'] > 0.0
