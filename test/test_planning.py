"""From an observation to a request, where no network has to run to see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.policy import Policy
from vla_runtime.settings import PolicySettings

BOUNDED = CachePolicy(mode='bounded', max_age_s=1.0, max_reuses=9, max_image_change=255.0)


@pytest.fixture
def bundle(tmp_path) -> Path:
    return write_tiny_policy(tmp_path / 'bundle', tiny_spec())


@pytest.mark.parametrize(
    ('stamps_s', 'age_s'),
    [
        # The camera stands still, or the state does: the newest of them says when it was.
        ({'top': 10.0, 'state': 10.4}, 0.4),
        ({'top': 10.4, 'state': 10.0}, 0.4),
        ({'top': 10.0, 'state': 11.5}, 1.5),
        ({'top': 11.5, 'state': 10.0}, 1.5),
        ({'top': 11.2, 'state': 11.5}, 1.5),
    ],
)
def test_an_observation_is_as_old_as_its_newest_stamp(
    bundle, stamps_s: Mapping[str, float], age_s: float
):
    policy = Policy.load(bundle, settings=PolicySettings(cache=BOUNDED, denoise_steps=1))
    policy.infer(observation(0, stamps_ns={'top': 10_000_000_000, 'state': 10_000_000_000}))
    looks = {name: round(stamp * 1e9) for name, stamp in stamps_s.items()}
    report = policy.infer(observation(1, stamps_ns=looks))[1]
    told = report.cache['vision'].split(', ')[0]
    if age_s > BOUNDED.max_age_s:
        assert told == f'top: miss ({age_s:.3f} s old; limit 1.000)'
    else:
        assert told.startswith(f'top: reused (1 in a row; {age_s:.3f} s old; ')
