"""Guidance weights, plan weights, schedules and noise against their formulas, written as loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_runtime.inference.denoise import flow_times
from vla_runtime.inference.real_time_chunking import guidance_weights, plan_weights, prefix_weights
from vla_runtime.inference.runner import chunk_noise
from vla_runtime.inference.settings import PolicySettings, row_weights


@given(beta=st.floats(1.0, 1e3), cond=st.floats(-9, 9), uncond=st.floats(-9, 9))
def test_row_weights_extrapolate_from_unconditioned_to_conditioned(beta, cond, uncond):
    weights = row_weights(beta).astype(np.float64)
    expected = uncond + beta * (cond - uncond)
    assert weights @ [cond, uncond] == pytest.approx(expected, rel=1e-5, abs=1e-5 * beta)


@pytest.mark.parametrize('beta', [0.999, 0.0, -1.0, 5.1, math.nan, math.inf, -math.inf])
def test_a_beta_out_of_range_is_refused(beta):
    with pytest.raises(ValueError, match='cfg_beta'):
        PolicySettings(cfg_beta=beta)


def test_without_guidance_there_is_one_row_of_weight_one():
    np.testing.assert_array_equal(row_weights(None), [1.0])


@pytest.mark.parametrize('steps', [1, 2, 3, 10, 50])
def test_flow_times_run_from_one_to_one_step_above_zero(steps):
    times = flow_times(steps)
    assert times[0] == 1.0
    assert times[-1] == pytest.approx(1 / steps)
    assert len(times) == steps


@given(st.data())
def test_prefix_weights_equal_the_papers_equation(data):
    horizon = data.draw(st.integers(1, 60))
    end = data.draw(st.integers(0, horizon))
    delay = data.draw(st.integers(0, horizon))
    schedule = data.draw(st.sampled_from(['linear', 'exp']))
    weights = prefix_weights(schedule, delay, end, horizon)
    d = min(delay, end)
    for i in range(horizon):
        if i < d:
            expected = 1.0
        elif i < end:
            c = (end - i) / (end - d + 1)
            expected = c if schedule == 'linear' else c * (math.exp(c) - 1) / (math.e - 1)
        else:
            expected = 0.0
        assert weights[i] == pytest.approx(expected, abs=1e-12)
    assert (np.diff(weights) <= 1e-12).all(), 'the tie never grows along the chunk'


def test_guidance_weights_equal_the_papers_bound_and_start_at_the_maximum():
    times = flow_times(10)
    weights = guidance_weights(times, maximum=10.0)
    assert weights[0] == 10.0
    for t, weight in list(zip(times, weights, strict=True))[1:]:
        tau = 1 - t
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        assert weight == pytest.approx(min(10.0, (1 - tau) / (tau * r2)))


def test_plan_weights_are_strength_times_tie():
    times = flow_times(4)
    weight = plan_weights(
        times, schedule='exp', delay=2, execution_horizon=5, horizon=8, maximum=7.0
    )
    assert weight.shape == (4, 8)
    assert weight.dtype == np.float32
    np.testing.assert_allclose(weight[:, 0], guidance_weights(times, 7.0), rtol=1e-6)
    assert (weight[:, 5:] == 0).all()


@pytest.mark.parametrize(
    ('delay', 'end', 'message'),
    [(0, 9, 'execution_horizon'), (-1, 4, 'delay is -1'), (0, -1, 'execution_horizon')],
)
def test_impossible_horizons_are_refused_with_the_numbers(delay, end, message):
    with pytest.raises(ValueError, match=message):
        prefix_weights('exp', delay, end, 8)


def test_noise_depends_on_seed_and_number_and_on_nothing_before():
    shape = (16, 32)
    fifth = chunk_noise(3, 5, shape)
    for number in range(5):
        chunk_noise(3, number, shape)
    np.testing.assert_array_equal(chunk_noise(3, 5, shape), fifth)
    assert not np.array_equal(chunk_noise(3, 6, shape), fifth)
    assert not np.array_equal(chunk_noise(4, 5, shape), fifth)


def test_noise_is_standard_normal():
    noise = chunk_noise(0, 0, (500, 200)).astype(np.float64)
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(noise) > 3).mean() == pytest.approx(0.0027, abs=0.001)


@pytest.mark.parametrize('steps', [1, 3, 10, 32, 100])
def test_summed_times_are_those_of_a_float32_that_counts_down(steps):
    time, step, expected = np.float32(1.0), np.float32(-1.0 / steps), []
    while time >= -step / 2:
        expected.append(time)
        time = np.float32(time + step)
    np.testing.assert_array_equal(flow_times(steps, 'summed'), np.array(expected, np.float64))
    np.testing.assert_allclose(flow_times(steps, 'summed'), flow_times(steps), atol=1e-5)


def test_times_are_exact_unless_told_otherwise():
    np.testing.assert_array_equal(flow_times(4), [1.0, 0.75, 0.5, 0.25])
    assert (flow_times(10) != flow_times(10, 'summed')).any()
