"""The prefix cache in `bounded`: what it reuses though it has changed, and where it stops."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cached_inference import infer, with_image, without_cache
from guided_policies import codec_of
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

BOUNDED = CachePolicy(
    mode='bounded', max_age_s=1.0, max_reuses=2, max_image_change=2.0, max_state_bins=3
)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    spec = tiny_spec(advantage='in_task_space')
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'guided', spec)


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


def grey(levels: np.ndarray) -> Observation:
    """The wrist image in the network's own size: a grey one, so much brighter."""
    return with_image('wrist', np.tile((100 + levels).astype(np.uint8)[..., None], 3))


HALVES = np.repeat([[20, -20]], 14, axis=1) * np.ones((28, 1), dtype=int)


@pytest.mark.parametrize(
    ('levels', 'told'),
    [
        (np.full((28, 28), 4), 'reused (1 in a row; 0.100 s old; changed by 4.00)'),
        (np.full((28, 28), -4), 'reused (1 in a row; 0.100 s old; changed by 4.00)'),
        (np.full((28, 28), 11), 'miss (changed by 11.00; limit 10.00)'),
        # What became brighter does not make up for what became darker.
        (HALVES, 'miss (changed by 20.00; limit 10.00)'),
        # A quarter of the pixels, 36 levels each.
        (
            HALVES.clip(0, 18) * 2 * (np.arange(28)[:, None] < 14),
            'reused (1 in a row; 0.100 s old; changed by 9.00)',
        ),
    ],
    ids=['brighter', 'darker', 'too bright', 'half and half', 'a quarter'],
)
def test_bounded_measures_the_change_of_an_image_in_grey_levels_pixel_by_pixel(
    bounded, levels, told
):
    bounded.settings = replace(bounded.settings, cache=replace(BOUNDED, max_image_change=10.0))
    infer(bounded, at(0.0, grey(np.zeros((28, 28), dtype=int))))
    vision = infer(bounded, at(0.1, grey(levels)))[1]['vision']
    assert vision == f'top: hit, wrist: {told}'


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


def bins(bundle: Path, seen: Observation) -> np.ndarray:
    codec = codec_of(bundle)
    return codec.state_bins(codec.check(seen))


def test_what_is_at_its_limit_of_age_and_of_bins_is_reused(bundle, bounded):
    moved = next(
        seen
        for seen in (joint(0.001 * count) for count in range(100))
        if np.abs(bins(bundle, seen) - bins(bundle, observation())).max() == BOUNDED.max_state_bins
    )
    infer(bounded, at(0.0, observation()))
    told = infer(bounded, at(BOUNDED.max_age_s, moved))[1]['prefix']
    assert told == 'reused (1 in a row; 1.000 s old; moved by 3 bins)'


@pytest.mark.parametrize('by', [0.05, -0.05], ids=['forwards', 'backwards'])
def test_bounded_asks_every_joint_for_itself(bundle, bounded, by):
    """One joint beyond the limit while the others stand still is within it on average."""

    far = joint(by)
    moved = np.abs(bins(bundle, far) - bins(bundle, observation()))
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


def test_bounded_never_reuses_a_prefix_for_another_advantage(bundle, bounded):
    infer(bounded, at(0.0, observation()))
    negative = replace(bounded.settings, advantage='negative')
    bounded.settings = negative
    actions, cache = infer(bounded, at(0.1, observation()))
    assert cache['prefix'].startswith('miss (tokens')
    np.testing.assert_array_equal(actions, without_cache(bundle, observation(), negative))


def test_back_to_exact_nothing_inexact_is_left(bundle, bounded):
    infer(bounded, at(0.0, observation()))
    infer(bounded, at(0.1, brighter(1)))
    bounded.settings = PolicySettings()
    actions, _ = infer(bounded, at(0.2, brighter(1)))
    np.testing.assert_array_equal(actions, without_cache(bundle, brighter(1)))


@pytest.mark.parametrize(
    ('bounds', 'message'),
    [
        ({}, 'cache_max_age_s'),
        ({'max_age_s': 1.0}, 'cache_max_reuses'),
        ({'max_age_s': float('nan'), 'max_reuses': 1}, 'cache_max_age_s'),
        ({'max_age_s': 1.0, 'max_reuses': 1, 'max_image_change': -1.0}, 'cache_max_image_change'),
    ],
)
def test_bounded_without_its_limits_is_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        CachePolicy(mode='bounded', **bounds)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match='bounded'):
        CachePolicy(mode='episode')
