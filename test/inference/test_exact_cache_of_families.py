"""Exact prefix cache of every family with a state token: a hit changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import without_ages
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.family.listing import find_family
from vla_runtime.inference.cache_words import cache_words
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

OFF = PolicySettings(cache=CachePolicy(mode='off'))


@pytest.mark.parametrize('family', ['act', 'evo1', 'smolvla'])
def test_a_hit_changes_nothing_and_needs_an_equal_state(family: str, tmp_path: Path):
    bundle = write_tiny_policy(tmp_path / family, tiny_spec(family))
    cached, fresh = Policy.load(bundle), Policy.load(bundle, settings=OFF)
    seen = observation()
    moved = replace(seen, state=seen.state + np.float32(1e-3))
    other = replace(moved, images={**seen.images, 'top': 255 - seen.images['top']})
    hit = 'top: hit, wrist: hit'
    looks = [
        (seen, 'top: miss (first), wrist: miss (first)', 'miss (first)'),
        (seen, hit, 'hit'),
        (moved, hit, 'miss (state)'),
        (other, 'top: miss (pixels), wrist: hit', 'miss (images)'),
    ]
    if find_family(family).has_language:
        looks.append((replace(other, instruction='stop'), hit, 'miss (tokens, token mask)'))
    for look, vision, prefix in looks:
        chunk, report = cached.infer(look)
        expected, without = fresh.infer(look)
        assert without_ages(cache_words(report.cache)) == {'vision': vision, 'prefix': prefix}
        assert cache_words(without.cache)['prefix'] == 'off'
        np.testing.assert_array_equal(chunk.normalised, expected.normalised)
