"""Evo-1 through `Policy`: exact cache, masked uniform noise, what is tied and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import NOISE, load_policy, write_guided
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.sampling import chunk_noise
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

OFF = CachePolicy(mode='off')
REAL = 3


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'), 'evo1')


def test_noise_is_uniform_and_zero_where_actions_are_padded(bundle):
    chunk, report = load_policy(bundle).infer(observation())
    assert np.abs(report.noise[:, :REAL]).max() <= 1.0
    assert not report.noise[:, REAL:].any() and not chunk.normalised[:, REAL:].any()
    # A caller's noise is masked as well, and the caller's array stays as it is.
    given = NOISE.copy()
    again, report = load_policy(bundle).infer(observation(), noise=given)
    np.testing.assert_array_equal(given, NOISE)
    np.testing.assert_array_equal(report.noise[:, :REAL], NOISE[:, :REAL])
    assert not again.normalised[:, REAL:].any()
    many = chunk_noise(3, 4, (1000, 24), kind='uniform')
    assert many.dtype == np.float32
    assert (many.min() < -0.99, many.max() > 0.99, abs(many.mean()) < 0.02) == (True, True, True)
    assert many.std() == pytest.approx(3**-0.5, rel=0.02)


def test_a_committed_plan_pulls_the_chunk_towards_it(bundle):
    plan = CommittedPlan(np.full((8, REAL), 0.3), delay_steps=2, execution_horizon=6)
    free, _ = load_policy(bundle, rtc_mode='off').infer(observation(), noise=NOISE, plan=plan)
    tied, report = load_policy(bundle).infer(observation(), noise=NOISE, plan=plan)
    assert report.rtc_mode == 'guided'
    distance = [np.abs(chunk.actions[:2] - 0.3).max() for chunk in (free, tied)]
    assert distance[1] < distance[0]


def test_guidance_needs_tags(tmp_path):
    plain = write_tiny_policy(tmp_path / 'plain', tiny_spec('evo1'))
    with pytest.raises(ValueError, match='trained without advantage tags'):
        load_policy(plain, cfg_enabled=True, cfg_beta=2.0)


def test_an_absent_camera_counts_for_nothing(bundle):
    policy, seen = load_policy(bundle), observation()
    both, _ = policy.infer(seen, noise=NOISE)
    absent = replace(seen, images={**seen.images, 'wrist': None})
    one, _ = policy.infer(absent, noise=NOISE)
    assert np.abs(one.normalised - both.normalised).max() > 1e-3
    fresh, _ = load_policy(bundle).infer(absent, noise=NOISE)
    np.testing.assert_array_equal(one.normalised, fresh.normalised)


def test_images_of_any_shape_go_in(bundle):
    policy: Policy = load_policy(bundle)
    seen = observation()
    tall = {name: np.ascontiguousarray(i.transpose(1, 0, 2)) for name, i in seen.images.items()}
    chunk, _ = policy.infer(replace(seen, images=tall), noise=NOISE)
    assert np.isfinite(chunk.actions).all()
