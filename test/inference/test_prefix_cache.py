"""The prefix cache on a real engine: what is a hit, what is not, and that a hit changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from guided_policies import without_ages
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import CAMERAS, observation, tiny_spec, write_tiny_policy

from vla_runtime.inference.prefix_cache import CachePolicy, PrefixCache, PrefixInputs
from vla_runtime.policy import Policy
from vla_runtime.settings import PolicySettings
from vla_runtime.types import Observation

NOISE = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
BOUNDED = CachePolicy(
    mode='bounded', max_age_s=1.0, max_reuses=2, max_image_change=2.0, max_state_bins=3
)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    spec = tiny_spec(advantage='in_task_space')
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'guided', spec)


@pytest.fixture
def policy(bundle) -> Policy:
    return Policy.load(bundle)


def infer(policy: Policy, seen: Observation):
    chunk, report = policy.infer(seen, noise=NOISE)
    return chunk.actions, without_ages(report.cache)


def without_cache(bundle: Path, seen: Observation, settings: PolicySettings | None = None):
    settings = replace(settings or PolicySettings(), cache=CachePolicy(mode='off'))
    actions, cache = infer(Policy.load(bundle, settings=settings), seen)
    assert cache['prefix'] == 'off'
    return actions


def with_image(name: str, image: np.ndarray, **changes) -> Observation:
    return observation(images={**observation().images, name: image}, **changes)


def one_pixel(name: str) -> Observation:
    # 28 pixels a side from 48 x 64: this pixel is one that the resize reads.
    image = np.array(observation().images[name])
    image[24, 32] ^= 0x80
    image[23, 32] ^= 0x80
    return with_image(name, image)


def test_the_same_observation_is_a_hit_on_both_levels_and_bit_equal_to_no_cache(bundle, policy):
    first, cache = infer(policy, observation())
    assert cache == {'vision': 'top: miss (first), wrist: miss (first)', 'prefix': 'miss (first)'}
    again, cache = infer(policy, observation())
    assert cache == {'vision': 'top: hit, wrist: hit', 'prefix': 'hit'}
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(without_cache(bundle, observation()), first)


@pytest.mark.parametrize(
    ('changed', 'vision', 'prefix'),
    [
        (one_pixel('wrist'), 'top: hit, wrist: miss (pixels)', 'miss (images)'),
        (one_pixel('top'), 'top: miss (pixels), wrist: hit', 'miss (images)'),
        (
            observation(
                images=dict(zip(CAMERAS[::-1], observation().images.values(), strict=True))
            ),
            'top: miss (pixels), wrist: miss (pixels)',
            'miss (images)',
        ),
        (with_image('wrist', None), 'top: hit', 'miss (images)'),
        (observation(instruction='pick up red the cup'), 'top: hit, wrist: hit', 'miss (tokens)'),
        (
            observation(instruction='pick up the red cup now'),
            'top: hit, wrist: hit',
            'miss (tokens, token mask)',
        ),
        (
            observation(state=observation().state + np.float32([0.0, 0.02, 0.0])),
            'top: hit, wrist: hit',
            'miss (tokens)',
        ),
    ],
    ids=['wrist pixel', 'top pixel', 'cameras swapped', 'camera gone', 'word', 'length', 'bin'],
)
def test_any_change_is_a_miss_with_its_reason_and_gives_what_no_cache_gives(
    bundle, policy, changed, vision, prefix
):
    before, _ = infer(policy, observation())
    actions, cache = infer(policy, changed)
    assert (cache['vision'], cache['prefix']) == (vision, prefix)
    assert not np.array_equal(actions, before)
    np.testing.assert_array_equal(actions, without_cache(bundle, changed))
    np.testing.assert_array_equal(infer(policy, observation())[0], before)


def test_a_camera_that_comes_back_with_the_same_pixels_is_no_stale_prefix(bundle, policy):
    expected, _ = infer(policy, observation())
    infer(policy, with_image('wrist', None))
    actions, cache = infer(policy, observation())
    assert cache == {'vision': 'top: hit, wrist: hit', 'prefix': 'miss (images)'}
    np.testing.assert_array_equal(actions, expected)


def test_toggling_guidance_keeps_the_prefixes_of_both(bundle, policy):
    plain, _ = infer(policy, observation())
    guided = replace(policy.settings, cfg_enabled=True, cfg_beta=2.0)
    policy.settings = guided
    chunk, cache = infer(policy, observation())
    assert cache == {'vision': 'top: hit, wrist: hit', 'prefix': 'miss (first)'}
    np.testing.assert_array_equal(chunk, without_cache(bundle, observation(), guided))
    policy.settings = PolicySettings()
    chunk, cache = infer(policy, observation())
    assert cache['prefix'] == 'hit'
    np.testing.assert_array_equal(chunk, plain)
    policy.settings = replace(guided, cfg_beta=3.0)
    assert infer(policy, observation())[1]['prefix'] == 'hit', 'beta is no part of the prefix'


def test_another_advantage_is_another_prefix(bundle, policy):
    infer(policy, observation())
    negative = replace(policy.settings, advantage='negative')
    policy.settings = negative
    chunk, cache = infer(policy, observation())
    assert cache['prefix'].startswith('miss')
    np.testing.assert_array_equal(chunk, without_cache(bundle, observation(), negative))


def test_a_prefix_of_old_images_is_not_used_by_the_other_number_of_rows(bundle, policy):
    infer(policy, observation())
    guided = replace(policy.settings, cfg_enabled=True)
    policy.settings = guided
    infer(policy, one_pixel('top'))
    policy.settings = PolicySettings()
    actions, cache = infer(policy, one_pixel('top'))
    assert cache == {'vision': 'top: hit, wrist: hit', 'prefix': 'miss (images)'}
    np.testing.assert_array_equal(actions, without_cache(bundle, one_pixel('top')))


def test_nothing_survives_a_reset_or_the_warm_up(policy):
    policy.warm_up()
    assert infer(policy, observation())[1]['prefix'] == 'miss (first)'
    policy.reset()
    assert infer(policy, observation())[1] == {
        'vision': 'top: miss (first), wrist: miss (first)',
        'prefix': 'miss (first)',
    }


def test_a_network_that_fails_leaves_no_entry(bundle, policy, monkeypatch):
    infer(policy, observation())
    engine = policy._engine
    real = engine.encode_prefix

    def broken(*arguments):
        real(*arguments)
        raise RuntimeError('the device is gone')

    monkeypatch.setattr(engine, 'encode_prefix', broken)
    with pytest.raises(RuntimeError):
        infer(policy, one_pixel('top'))
    monkeypatch.undo()
    actions, cache = infer(policy, observation())
    assert cache['prefix'] == 'miss (first)'
    np.testing.assert_array_equal(actions, without_cache(bundle, observation()))


# Bounded.


def at(time_s: float, seen: Observation) -> Observation:
    return replace(seen, stamps_ns={'state': round(time_s * 1e9)})


def brighter(levels: int) -> Observation:
    image = observation().images['wrist']
    return with_image('wrist', np.clip(image.astype(int) + levels, 0, 255).astype(np.uint8))


@pytest.fixture
def bounded(bundle) -> Policy:
    return Policy.load(bundle, settings=PolicySettings(cache=BOUNDED))


def test_bounded_reuses_a_little_changed_image_so_often_and_says_so(bounded):
    first, _ = infer(bounded, at(0.0, observation()))
    for count in (1, 2):
        actions, cache = infer(bounded, at(0.1 * count, brighter(1)))
        told = f'wrist: reused ({count} in a row; 0.{count}00 s old; changed by 0.'
        assert told in cache['vision']
        np.testing.assert_array_equal(actions, first)
    assert 'wrist: miss' in infer(bounded, at(0.3, brighter(1)))[1]['vision']


@pytest.mark.parametrize(
    ('time_s', 'levels'), [(1.5, 1), (0.1, 8), (-0.5, 1)], ids=['age', 'change', 'clock went back']
)
def test_bounded_does_not_reuse_beyond_its_limits(bundle, bounded, time_s, levels):
    infer(bounded, at(1.0, observation()))
    actions, cache = infer(bounded, at(1.0 + time_s, brighter(levels)))
    assert 'wrist: miss' in cache['vision']
    np.testing.assert_array_equal(actions, without_cache(bundle, brighter(levels)))


def test_bounded_reuses_a_prefix_whose_state_moved_few_bins(bundle, bounded):
    first, _ = infer(bounded, at(0.0, observation()))
    near = observation(state=observation().state + np.float32([0.0, 0.02, 0.0]))
    far = observation(state=observation().state + np.float32([0.0, 0.2, 0.0]))
    actions, cache = infer(bounded, at(0.1, near))
    assert cache['prefix'].startswith('reused (1 in a row; 0.100 s old; moved by ')
    np.testing.assert_array_equal(actions, first)
    actions, cache = infer(bounded, at(0.2, far))
    assert cache['prefix'].startswith('miss')
    np.testing.assert_array_equal(actions, without_cache(bundle, far))


def joint(moved: float) -> Observation:
    """The second joint moved; the others stand still."""
    return observation(state=observation().state + np.float32([0.0, moved, 0.0]))


def test_bounded_reuses_a_prefix_so_often_and_no_more(bundle, bounded):
    first, _ = infer(bounded, at(0.0, observation()))
    for count in (1, 2):
        actions, cache = infer(bounded, at(0.1 * count, joint(0.02)))
        assert cache['prefix'].startswith(f'reused ({count} in a row; 0.{count}00 s old; moved by ')
        np.testing.assert_array_equal(actions, first)
    actions, cache = infer(bounded, at(0.3, joint(0.02)))
    assert cache['prefix'] == 'miss (reused 2 of 2)'
    np.testing.assert_array_equal(actions, without_cache(bundle, joint(0.02)))
    assert infer(bounded, at(0.4, joint(0.0)))[1]['prefix'].startswith('reused (1 in a row')


@pytest.mark.parametrize(
    ('time_s', 'reason'),
    [(2.5, '1.500 s old; limit 1.000'), (0.5, 'the clock went back by 0.500 s')],
    ids=['age', 'clock went back'],
)
def test_bounded_does_not_reuse_a_prefix_beyond_its_limits_of_time(bundle, bounded, time_s, reason):
    infer(bounded, at(1.0, observation()))
    actions, cache = infer(bounded, at(time_s, joint(0.02)))
    assert cache['prefix'] == f'miss ({reason})'
    np.testing.assert_array_equal(actions, without_cache(bundle, joint(0.02)))


def test_bounded_asks_every_joint_for_itself(bundle, bounded):
    """One joint beyond the limit while the others stand still is within it on average."""
    bins = bounded._codec.state_bins
    far = joint(0.05)
    moved = np.abs(bins(far) - bins(observation()))
    assert moved.mean() <= BOUNDED.max_state_bins < moved.max()
    infer(bounded, at(0.0, observation()))
    actions, cache = infer(bounded, at(0.1, far))
    assert cache['prefix'] == f'miss (moved by {moved.max()} bins; limit 3)'
    np.testing.assert_array_equal(actions, without_cache(bundle, far))


@pytest.mark.parametrize(
    ('level', 'changed', 'near'),
    [('vision', 'wrist: ', brighter(1)), ('prefix', '', joint(0.02))],
    ids=['image', 'prefix'],
)
def test_an_exact_hit_begins_the_age_and_the_count_of_bounded_anew(bounded, level, changed, near):
    told = []
    for time_s in range(6):
        seen = observation() if time_s in (0, 3) else near
        told.append(infer(bounded, at(0.4 * time_s, seen))[1][level].removeprefix('top: hit, '))
    assert told[0].endswith(f'{changed}miss (first)')
    assert told[3] == f'{changed}hit'
    expected = [(1, 0.4), (2, 0.8), (1, 0.4), (2, 0.8)]
    for text, (count, age_s) in zip(told[1:3] + told[4:], expected, strict=True):
        assert text.startswith(f'{changed}reused ({count} in a row; {age_s:.3f} s old; ')


def test_the_report_says_why_bounded_missed_and_what_a_hit_stands_on(bounded):
    infer(bounded, at(0.0, observation()))
    cache = infer(bounded, at(0.1, brighter(1)))[1]
    assert cache['prefix'] == 'hit (0.100 s old; on reused images)'
    infer(bounded, at(0.2, brighter(1)))
    assert 'wrist: miss (reused 2 of 2)' in infer(bounded, at(0.3, brighter(1)))[1]['vision']
    told = infer(bounded, at(0.4, brighter(8)))[1]['vision']
    assert re.search(r'wrist: miss \(changed by [3-8]\.\d\d; limit 2\.00\)', told)
    assert (
        'wrist: miss (3.000 s old; limit 1.000)'
        in (infer(bounded, at(3.4, brighter(9)))[1]['vision'])
    )
    assert (
        'wrist: miss (the clock went back by 1.000 s)'
        in (infer(bounded, at(2.4, brighter(8)))[1]['vision'])
    )


def test_bounded_never_reuses_a_prefix_for_another_instruction(bundle, bounded):
    infer(bounded, at(0.0, observation()))
    other = observation(instruction='pick up the red cub')
    actions, cache = infer(bounded, at(0.1, other))
    assert cache['prefix'].startswith('miss')
    np.testing.assert_array_equal(actions, without_cache(bundle, other))


def test_back_to_exact_nothing_inexact_is_left(bundle, bounded):
    infer(bounded, at(0.0, observation()))
    infer(bounded, at(0.1, brighter(1)))
    bounded.settings = PolicySettings()
    actions, _ = infer(bounded, at(0.2, brighter(1)))
    np.testing.assert_array_equal(actions, without_cache(bundle, brighter(1)))


@pytest.mark.parametrize(
    ('bounds', 'message'),
    [
        ({}, 'cache_max_age_s is 0.0'),
        ({'max_age_s': 1.0}, 'cache_max_reuses is 0'),
        ({'max_age_s': float('nan'), 'max_reuses': 1}, 'cache_max_age_s is nan'),
        ({'max_age_s': 1.0, 'max_reuses': 1, 'max_image_change': -1.0}, 'cache_max_image_change'),
    ],
)
def test_bounded_without_its_limits_is_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        CachePolicy(mode='bounded', **bounds)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match='exact, bounded, off'):
        CachePolicy(mode='episode')


# Negative control, memory, random sequences.


def test_a_planted_image_blind_cache_is_caught(bundle, policy, monkeypatch):
    """The fault that failed closed loop for others: keyed by episode and text, not by pixels."""
    monkeypatch.setattr(np, 'array_equal', lambda *_: True)
    infer(policy, observation())
    blind, cache = infer(policy, one_pixel('top'))
    monkeypatch.undo()
    assert cache['prefix'] == 'hit'
    assert not np.array_equal(blind, without_cache(bundle, one_pixel('top')))


@given(data=st.data())
def test_any_sequence_gives_what_no_cache_gives(bundle, data):
    cached, plain = _pair(bundle)
    cached.reset()
    for _ in range(data.draw(st.integers(1, 6))):
        seen = data.draw(
            st.sampled_from(
                [
                    observation(),
                    one_pixel('top'),
                    one_pixel('wrist'),
                    with_image('top', None),
                    observation(instruction='push'),
                    observation(state=np.zeros(3, np.float32)),
                ]
            )
        )
        guided = data.draw(st.booleans())
        for policy in (cached, plain):
            policy.settings = replace(policy.settings, cfg_enabled=guided)
        np.testing.assert_array_equal(infer(cached, seen)[0], infer(plain, seen)[0])


_PAIR: list[Policy] = []


def _pair(bundle: Path) -> list[Policy]:
    if not _PAIR:
        off = PolicySettings(cache=CachePolicy(mode='off'), denoise_steps=1)
        _PAIR.extend([Policy.load(bundle), Policy.load(bundle, settings=off)])
        _PAIR[0].settings = replace(_PAIR[0].settings, denoise_steps=1)
    return _PAIR


def test_ten_thousand_encodings_keep_the_memory(policy):
    cache = PrefixCache(policy._engine, ('top', 'wrist'))
    random = np.random.default_rng(0)
    pixels = random.uniform(-1, 1, (8, 2, 3, 28, 28)).astype(np.float32)
    process, seen = psutil.Process(), []
    for i in range(10_000):
        inputs = PrefixInputs(
            pixels=pixels[i // 20 % 8],
            image_mask=np.ones(2, dtype=bool),
            tokens=np.full((1, 64), i // 30 % 7, dtype=np.int64),
            token_mask=np.ones((1, 64), dtype=bool),
            words='words',
            state_bins=np.zeros(0, dtype=np.int64),
            time_s=i * 0.1,
        )
        cache.encode_images(inputs, CachePolicy())
        cache.encode_prefix(inputs, CachePolicy())
        if i >= 200 and i % 100 == 0:
            seen.append(process.memory_info().rss)
    assert max(seen) - seen[0] <= 5 * 2**20
