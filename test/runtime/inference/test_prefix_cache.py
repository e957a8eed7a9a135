"""The prefix cache on a real engine: what is a hit, what is not, and that a hit changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cached_inference import infer, one_pixel, with_image, without_cache
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import CAMERAS, observation, tiny_spec, write_tiny_policy

from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    spec = tiny_spec(advantage='in_task_space')
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'guided', spec)


@pytest.fixture
def policy(bundle) -> Policy:
    return Policy.load(bundle)


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


def test_a_prefix_of_old_images_is_not_used_by_the_other_number_of_rows(bundle, policy):
    infer(policy, observation())
    guided = replace(policy.settings, cfg_enabled=True, cfg_beta=1.5)
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
    real = TorchEngine.encode_prefix

    def broken(*arguments):
        real(*arguments)
        raise RuntimeError('the device is gone')

    monkeypatch.setattr(TorchEngine, 'encode_prefix', broken)
    with pytest.raises(RuntimeError):
        infer(policy, one_pixel('top'))
    monkeypatch.undo()
    actions, cache = infer(policy, observation())
    assert cache['prefix'] == 'miss (first)'
    np.testing.assert_array_equal(actions, without_cache(bundle, observation()))


def test_a_vision_network_that_fails_after_it_wrote_leaves_no_image_tokens(
    bundle, policy, monkeypatch
):
    infer(policy, observation())
    real = TorchEngine.encode_image

    def broken(*arguments):
        real(*arguments)
        raise RuntimeError('the device is gone')

    with monkeypatch.context() as planted:
        planted.setattr(TorchEngine, 'encode_image', broken)
        with pytest.raises(RuntimeError):
            infer(policy, one_pixel('top'))
    # In the engine lie the tokens of the other image, or of half of it.
    actions, cache = infer(policy, observation())
    assert cache == {'vision': 'top: miss (first), wrist: hit', 'prefix': 'miss (images)'}
    np.testing.assert_array_equal(actions, without_cache(bundle, observation()))


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
            policy.settings = replace(policy.settings, cfg_enabled=guided, cfg_beta=1.5)
        np.testing.assert_array_equal(infer(cached, seen)[0], infer(plain, seen)[0])


_PAIR: list[Policy] = []


def _pair(bundle: Path) -> list[Policy]:
    if not _PAIR:
        off = PolicySettings(cache=CachePolicy(mode='off'), denoise_steps=1)
        _PAIR.extend([Policy.load(bundle), Policy.load(bundle, settings=off)])
        _PAIR[0].settings = replace(_PAIR[0].settings, denoise_steps=1)
    return _PAIR
