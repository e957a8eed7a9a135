"""Serial guidance: the rows one after the other give what the rows together give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import NOISE, load_policy, without_ages, write_guided
from thorough import thorough_but
from tiny_policy import observation

from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import resolve_cfg_mode
from vla_runtime.types import CommittedPlan

# Rows run alone and together round differently in their matrix products.
ROUNDING = 2e-5
PLAN = CommittedPlan(np.full((6, 3), 0.3), delay_steps=2, execution_horizon=6)


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp('bundles')
    return {family: write_guided(folder, family) for family in ('pi05', 'pi0', 'smolvla')}


families = pytest.mark.parametrize(
    'family', thorough_but(['pi05', 'smolvla'], ['pi05', 'pi0', 'smolvla'])
)


def guided(bundle: Path, max_rows: int = 2, **settings):
    return load_policy(bundle, max_rows, **{'cfg_enabled': True, 'cfg_beta': 2.0, **settings})


@families
@pytest.mark.parametrize('beta', thorough_but([2.5], [1.5, 2.5, 5.0]))
@pytest.mark.parametrize('plan', [None, PLAN], ids=['free', 'tied'])
def test_serial_guidance_is_fused_guidance_at_every_step(bundles, family, beta, plan):
    traces, reports = [], []
    for max_rows, mode in ((2, 'fused'), (1, 'serial')):
        policy, trace = guided(bundles[family], max_rows, cfg_mode=mode, cfg_beta=beta), []
        _, report = policy.infer(
            observation(),
            plan=plan,
            noise=NOISE,
            on_step=lambda k, x, v, trace=trace: trace.append(np.stack([x, *v])),
        )
        traces.append(np.stack(trace))
        reports.append(report)
    fused, serial = traces
    assert fused.shape == (3, 3, 8, 6)
    np.testing.assert_allclose(serial, fused, rtol=1e-5, atol=ROUNDING * beta)
    assert np.abs(fused[:, 1] - fused[:, 2]).max() > 1e-3, 'the rows differ'
    assert [report.guidance for report in reports] == ['fused', 'serial']
    assert reports[0].tokens == reports[1].tokens
    assert reports[0].tokens[0] > reports[0].tokens[1], 'each row counts its own tokens'


@families
def test_the_state_matters_under_serial_guidance(bundles, family):
    policy = guided(bundles[family], 1)
    near = policy.infer(observation(), noise=NOISE)[0].actions
    moved = observation(state=observation().state + np.float32([0.3, -0.2, 0.1]))
    far = policy.infer(moved, noise=NOISE)[0].actions
    expected = guided(bundles[family]).infer(moved, noise=NOISE)[0].actions
    np.testing.assert_allclose(far, expected, atol=1e-4)
    assert np.abs(far - near).max() > 1e-3


def test_serial_guidance_repeats_bit_for_bit(bundles):
    first, second = (
        [guided(bundles['pi05'], 1).infer(observation(i))[0].actions for i in range(4)]
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ('wanted', 'max_rows', 'expected'),
    [
        ('auto', 2, 'fused'),
        ('auto', 1, 'serial'),
        ('fused', 2, 'fused'),
        ('serial', 2, 'serial'),
        ('serial', 1, 'serial'),
    ],
)
def test_guidance_is_fused_where_the_engine_has_two_rows(wanted, max_rows, expected):
    assert resolve_cfg_mode(wanted, max_rows) == expected


def test_fused_guidance_on_an_engine_of_one_row_is_refused_and_the_old_settings_stay(bundles):
    policy = guided(bundles['pi05'], 1)
    before = policy.settings
    with pytest.raises(ValueError, match='cfg_mode'):
        policy.settings = replace(before, cfg_mode='fused')
    assert policy.settings == before


def test_an_engine_of_one_row_warms_up_with_both_kinds_of_guidance(bundles):
    policy = guided(bundles['pi05'], 1)
    assert policy.warm_up() > 0
    _, report = policy.infer(observation())
    prefix = cache_words(report.cache)['prefix']
    assert prefix == 'conditioned: miss (first), unconditioned: miss (first)'


# The cache under guidance, and what a toggle costs.


def test_serial_rows_are_cached_each_in_its_own_slot(bundles):
    policy = guided(bundles['pi05'], 1)
    first, report = policy.infer(observation(), noise=NOISE)
    assert report.runs == {'vision': 2, 'prefix': 2, 'expert': 6}
    again, report = policy.infer(observation(), noise=NOISE)
    assert (
        without_ages(cache_words(report.cache))['prefix'] == 'conditioned: hit, unconditioned: hit'
    )
    assert report.runs == {'vision': 0, 'prefix': 0, 'expert': 6}
    np.testing.assert_array_equal(again.actions, first.actions)
    other = observation(instruction='push the green block')
    _, report = policy.infer(other, noise=NOISE)
    assert report.runs == {'vision': 0, 'prefix': 2, 'expert': 6}


@pytest.mark.parametrize('mode', ['fused', 'serial'])
@pytest.mark.parametrize('moving', thorough_but([True], [False, True]), ids=['still', 'moving'])
def test_toggling_guidance_costs_at_most_one_prefix_run(bundles, mode, moving):
    policy = load_policy(bundles['pi05'], cfg_mode=mode, cfg_enabled=False)
    policy.infer(observation(0), noise=NOISE)
    for toggle in range(6):
        seen = observation(toggle // 2 + 1 if moving else 0)
        # What the observation itself costs without a toggle.
        policy.infer(seen, noise=NOISE)
        enabled = not policy.settings.cfg_enabled
        policy.settings = replace(policy.settings, cfg_enabled=enabled, cfg_beta=2.0)
        chunk, report = policy.infer(seen, noise=NOISE)
        assert report.runs['vision'] == 0
        assert report.runs['prefix'] <= 1
        if not moving and toggle:
            assert report.runs['prefix'] == 0, 'both prefixes are still there'
        fresh = load_policy(bundles['pi05'], cfg_mode=mode, cfg_enabled=enabled, cfg_beta=2.0)
        expected, _ = fresh.infer(seen, noise=NOISE)
        np.testing.assert_array_equal(chunk.actions, expected.actions)


def test_another_beta_runs_neither_vision_nor_prefix(bundles):
    policy = guided(bundles['pi05'])
    policy.infer(observation(), noise=NOISE)
    policy.settings = replace(policy.settings, cfg_beta=3.0)
    _, report = policy.infer(observation(), noise=NOISE)
    assert report.runs == {'vision': 0, 'prefix': 0, 'expert': 3}
    assert report.beta == 3.0
