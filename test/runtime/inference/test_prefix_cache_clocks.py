"""Ages in the prefix cache: only between times of one clock, and never below zero."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

HIT = {'vision': 'top: hit ({age}), wrist: hit ({age})', 'prefix': 'hit ({age})'}
BOUNDED = CachePolicy('bounded', 1.0, 5, 255.0, 256)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', tiny_spec())


def at(time_s: float | None, seed: int = 0) -> Observation:
    """Stamped, or from someone who has no stamps."""
    stamps = {} if time_s is None else {'top': round(time_s * 1e9)}
    return observation(seed, stamps_ns=stamps)


def second_of_two(policy: Policy, first: Observation, second: Observation) -> Mapping[str, str]:
    policy.infer(first)
    return cache_words(policy.infer(second)[1].cache)


@pytest.mark.parametrize(
    ('first_s', 'second_s', 'age'),
    [
        (5.0, 5.25, '0.250 s old'),
        # A stamp is never on the clock of who has none: 0 is its beginning, 1e9 the year 2001.
        (None, 0.0, 'of unknown age'),
        (None, 1e9, 'of unknown age'),
        (1e9, None, 'of unknown age'),
        (0.0, None, 'of unknown age'),
        (5.0, 4.5, 'of unknown age'),
    ],
)
def test_a_hit_has_an_age_where_the_times_can_be_compared(
    bundle: Path, first_s: float | None, second_s: float | None, age: str
) -> None:
    cache = second_of_two(Policy.load(bundle), at(first_s), at(second_s))
    assert cache == {level: text.format(age=age) for level, text in HIT.items()}


@pytest.mark.parametrize(('first_s', 'second_s'), [(None, 0.0), (0.0, None)])
def test_bounded_reuses_nothing_whose_age_is_unknown(
    bundle: Path, first_s: float | None, second_s: float | None
) -> None:
    policy = Policy.load(bundle, settings=PolicySettings(cache=BOUNDED))
    cache = second_of_two(policy, at(first_s), at(second_s, seed=1))
    assert cache['vision'] == 'top: miss (on another clock), wrist: miss (on another clock)'
    assert 'reused' in second_of_two(policy, at(7.0), at(7.5, seed=1))['vision']


@pytest.mark.parametrize('times_s', [(None, 3.0, 3.5), (3.0, None, None)])
def test_a_hit_brings_the_entry_onto_its_own_clock(
    bundle: Path, times_s: tuple[float | None, ...]
) -> None:
    policy = Policy.load(bundle, settings=PolicySettings(cache=BOUNDED))
    for time_s in times_s:
        cache = cache_words(policy.infer(at(time_s))[1].cache)
    for text in cache.values():
        assert 'hit' in text
        assert 'unknown' not in text
