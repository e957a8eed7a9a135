"""SmolVLA through `Policy`: the exact cache with its state token, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import load_policy, write_guided
from tiny_policy import observation

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.request import cache_words


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
