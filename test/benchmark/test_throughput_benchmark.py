"""benchmark/throughput.py: rates from first to last chunk, and ratios of the right ones."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from paths import ROOT
from tiny_policy import observation, tiny_spec, write_tiny_policy

sys.path.insert(0, str(ROOT / 'benchmark'))

import throughput

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy.load(write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', tiny_spec()))


@pytest.mark.parametrize('pipeline', ['latency', 'throughput'])
def test_a_stream_is_all_new_and_in_order(policy: Policy, pipeline: str) -> None:
    settings = replace(PolicySettings(), pipeline=pipeline)  # type: ignore[arg-type]
    for _ in range(2):
        rate, reports = throughput.stream(
            policy, [observation(seed) for seed in range(4)], settings
        )
        assert rate > 0
        assert [report.number for report in reports] == [0, 1, 2, 3]
        assert {report.pipeline for report in reports} == {pipeline}
        assert all(report.runs == {'vision': 2, 'prefix': 1, 'expert': 3} for report in reports)


def test_a_stream_that_finds_something_in_the_cache_is_no_measurement(policy: Policy) -> None:
    with pytest.raises(AssertionError):
        throughput.stream(policy, [observation(0), observation(0)], PolicySettings())


def test_two_halves_at_a_time_are_as_fast_as_the_longer_one() -> None:
    assert throughput.allowed(30.0, 10.0) == pytest.approx(4 / 3)
    assert throughput.allowed(10.0, 10.0) == 2.0
    assert throughput.allowed(0.0, 10.0) == 1.0
    # Vision and prefix of three cameras are most of an inference.
    assert throughput.counted() == pytest.approx(1.194, abs=1e-3)


def test_encoding_is_all_that_comes_before_the_denoising(policy: Policy) -> None:
    _, reports = throughput.stream(
        policy, [observation(seed) for seed in range(2)], PolicySettings()
    )
    encoding, denoising = throughput.halves(reports)
    inside = sum(r.milliseconds['total'] - r.milliseconds['actions'] for r in reports) / 2
    assert encoding + denoising == pytest.approx(inside)


def test_ratios_are_within_a_round() -> None:
    found = {
        'latency': [1.0, 2.0, 4.0],
        'throughput': [1.5, 2.5, 5.0],
        'latency_on_twice_the_threads': [1.5, 5.0, 5.0],
        'encoding': [30.0, 20.0, 40.0],
        'denoising': [10.0, 10.0, 10.0],
    }
    figures = throughput.summary(found)
    assert figures['throughput_over_latency']['median'] == 1.25
    low, high = figures['throughput_over_latency']['median_95']
    assert (low, high) == (1.25, 1.5)
    assert figures['throughput_over_latency_on_twice_the_threads']['median'] == 1.0
    assert figures['allowed']['by_time_in_latency'] == pytest.approx(4 / 3)
    assert figures['chunks_per_s']['throughput'] == 2.5
    assert figures['ms_in_latency'] == {'encoding': 30.0, 'denoising': 10.0}
