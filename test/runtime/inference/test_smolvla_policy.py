"""SmolVLA through `Policy`: the exact cache with its state token, samples, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import NOISE, load_policy, write_guided
from tiny_policy import observation

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.request import cache_words
from vla_runtime.types import CommittedPlan


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'), 'smolvla')


def test_a_moved_state_is_never_within_bounds(bundle):
    # Bounds are on bins of a state in the prompt; a state token has none.
    bounds = CachePolicy(
        mode='bounded', max_age_s=9.0, max_reuses=9, max_image_change=9.0, max_state_bins=9
    )
    policy, seen = load_policy(bundle, cache=bounds), observation()
    policy.infer(seen)
    _, report = policy.infer(replace(seen, state=seen.state + np.float32(1e-6)))
    assert cache_words(report.cache)['prefix'] == 'miss (state)'


@pytest.mark.parametrize('guided', [False, True])
def test_samples_are_the_chunks_of_their_noises(bundle, guided):
    noise = np.random.default_rng(1).normal(size=(3, *NOISE.shape)).astype(np.float32)
    plan = CommittedPlan(np.full((6, 3), 0.3), delay_steps=2, execution_horizon=6)
    settings = {'cfg_enabled': guided, 'cfg_beta': 2.0, 'rtc_mode': 'off'}
    alone = load_policy(bundle, **settings)
    chunks = [alone.infer(observation(), noise=one)[0].normalised for one in noise]
    chosen, report = load_policy(bundle, samples=3, **settings).infer(
        observation(), plan=plan, noise=noise
    )
    assert report.samples == 3 and len(set(report.sample_distances)) == 3
    np.testing.assert_allclose(chosen.normalised, chunks[report.sample], rtol=0, atol=1e-5)
