"""Keys of the prefix cache, seen from the networks: calls and their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import CAMERAS, JOINTS, observation, tiny_spec, write_tiny_policy

from vla_runtime.engines.protocol import count_rows
from vla_runtime.inference.prefix_cache import CachePolicy, PrefixCache, PrefixInputs
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CacheOutcome, CacheReport, Reuse

EXACT = CachePolicy()
BOTH = ['image 0', 'image 1']


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    spec = tiny_spec(advantage='in_task_space')
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'guided', spec)


@pytest.fixture(scope='module')
def loaded(bundle) -> Policy:
    return Policy.load(bundle)


@pytest.fixture
def policy(loaded) -> Policy:
    loaded.settings = PolicySettings()
    loaded.reset()
    return loaded


@contextmanager
def watched(policy: Policy) -> Iterator[list[str]]:
    """The runs of the real vision and prefix networks, in order."""
    engine, runs = policy._engine, []
    vision, prefix = engine.encode_image, engine.encode_prefix

    def encode_image(camera, pixels):
        runs.append(f'image {camera}')
        vision(camera, pixels)

    def encode_prefix(image_mask, rows, *rest, **named):
        runs.append(f'prefix of {count_rows(rows)}')
        prefix(image_mask, rows, *rest, **named)

    with (
        patch.object(engine, 'encode_image', encode_image),
        patch.object(engine, 'encode_prefix', encode_prefix),
    ):
        yield runs


def prefix_inputs(rows: int = 2) -> PrefixInputs:
    random = np.random.default_rng(0)
    mask = np.zeros((rows, 64), dtype=bool)
    mask[:, :20] = True
    return PrefixInputs(
        pixels=random.uniform(-1, 1, (2, 3, 28, 28)).astype(np.float32),
        image_mask=np.ones(2, dtype=bool),
        rows={'tokens': random.integers(0, 400, (rows, 64)), 'token_mask': mask},
        words='words',
        state_bins=np.arange(3),
        time_s=0.0,
    )


def changed(**index: tuple) -> PrefixInputs:
    """The inputs with one number of one array changed as little as it can be."""
    inputs = prefix_inputs()
    ((name, place),) = index.items()
    values = (inputs.rows[name] if name in inputs.rows else getattr(inputs, name)).copy()
    if values.dtype == np.float32:
        values[place] = np.nextafter(values[place], np.float32(2))
    else:
        values[place] ^= 1
    if name in inputs.rows:
        return replace(inputs, rows={**inputs.rows, name: values})
    return replace(inputs, **{name: values})


def encode(cache: PrefixCache, inputs: PrefixInputs) -> CacheReport:
    images = cache.encode_images(inputs, EXACT)
    return CacheReport(images, (cache.encode_prefix(inputs, EXACT, 0),))


def swapped_rows() -> PrefixInputs:
    inputs = prefix_inputs()
    return replace(inputs, rows={name: array[::-1].copy() for name, array in inputs.rows.items()})


def other_mask() -> PrefixInputs:
    inputs = prefix_inputs()
    mask = inputs.rows['token_mask'] & ~np.eye(2, 64, 19, dtype=bool)
    return replace(inputs, rows={**inputs.rows, 'token_mask': mask})


def swapped_cameras() -> PrefixInputs:
    inputs = prefix_inputs()
    return replace(inputs, pixels=inputs.pixels[::-1].copy())


@pytest.mark.parametrize(
    ('inputs', 'runs'),
    [
        (prefix_inputs(), []),
        (replace(prefix_inputs(), time_s=9.0), []),
        (changed(pixels=(0, 2, 27, 0)), ['image 0', 'prefix of 2']),
        (changed(pixels=(1, 0, 0, 27)), ['image 1', 'prefix of 2']),
        (swapped_cameras(), [*BOTH, 'prefix of 2']),
        (replace(prefix_inputs(), image_mask=np.array([True, False])), ['prefix of 2']),
        (changed(tokens=(0, 0)), ['prefix of 2']),
        (changed(tokens=(1, 19)), ['prefix of 2']),
        (other_mask(), ['prefix of 2']),
        (swapped_rows(), ['prefix of 2']),
        (prefix_inputs(rows=1), ['prefix of 1']),
    ],
    ids=[
        'nothing',
        'time alone',
        'one ulp of one pixel',
        'a pixel of the other camera',
        'camera order',
        'image mask',
        'first token',
        'token of the second row',
        'token mask',
        'row order',
        'number of rows',
    ],
)
def test_the_networks_run_for_what_has_changed_and_for_nothing_else(policy, inputs, runs):
    cache = PrefixCache(policy._engine, CAMERAS)
    encode(cache, prefix_inputs())
    with watched(policy) as ran:
        encode(cache, inputs)
    assert ran == runs
    with watched(policy) as ran:
        told = encode(cache, inputs)
    shown = np.flatnonzero(inputs.image_mask)
    hit = CacheOutcome(Reuse.HIT, age_s=0.0)
    assert ran == []
    assert told == CacheReport({CAMERAS[camera]: hit for camera in shown}, (hit,))


@given(data=st.data())
def test_the_prefix_network_runs_exactly_when_something_it_sees_has_changed(loaded, data):
    loaded.reset()
    cache = PrefixCache(loaded._engine, CAMERAS)
    last: dict[int, tuple] = {}
    images: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        rows, token, length = (data.draw(st.integers(1, 2)) for _ in range(3))
        shown = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        looks = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        inputs = PrefixInputs(
            pixels=np.stack([np.full((3, 28, 28), look / 3, np.float32) for look in looks]),
            image_mask=np.array(shown),
            rows={
                'tokens': np.full((rows, 64), token),
                'token_mask': np.tile(np.arange(64) < length + 3, (rows, 1)),
            },
            words='words',
            state_bins=np.zeros(0, dtype=np.int64),
            time_s=0.0,
        )
        key = (
            tuple(look for look, seen in zip(looks, shown, strict=True) if seen),
            shown,
            token,
            length,
        )
        expected = [
            f'image {camera}'
            for camera in range(2)
            if shown[camera] and images.get(camera) != looks[camera]
        ]
        with watched(loaded) as ran:
            encode(cache, inputs)
        images |= {camera: looks[camera] for camera in range(2) if shown[camera]}
        assert [run for run in ran if run.startswith('image')] == expected
        if last.get(rows) != key:
            assert f'prefix of {rows}' in ran
        last[rows] = key


def test_cameras_of_30_and_10_hz_hit_each_at_its_own_rate(policy):
    """An inference with every frame of the fast camera; the slow one's is new every third time."""
    told = []
    for frame in range(30):
        images = {
            'top': observation(frame).images['top'],
            'wrist': observation(frame // 3).images['wrist'],
        }
        told.append(cache_words(policy.infer(observation(images=images))[1].cache)['vision'])
    words = [dict(part.split(': ') for part in line.split(', ')) for line in told]
    assert [word['wrist'].split()[0] for word in words] == ['miss', 'hit', 'hit'] * 10
    assert {word['top'].split()[0] for word in words} == {'miss'}


def test_an_inference_at_30_hz_of_a_10_hz_camera_alone_is_two_full_hits_in_three(policy):
    told = [
        cache_words(policy.infer(observation(frame // 3))[1].cache)['prefix'] for frame in range(30)
    ]
    assert [line.split()[0] for line in told] == ['miss', 'hit', 'hit'] * 10


def test_a_hit_runs_the_expert_alone(policy):
    policy.infer(observation())
    with watched(policy) as ran:
        policy.infer(observation())
    assert ran == []


def test_turning_guidance_on_or_off_costs_one_prefix_run_at_most(policy):
    policy.infer(observation())
    guided = replace(policy.settings, cfg_enabled=True, cfg_beta=2.0)
    for settings, runs in (
        (guided, ['prefix of 2']),
        (PolicySettings(), []),
        (guided, []),
        (replace(guided, cfg_beta=4.0), []),
    ):
        policy.settings = settings
        with watched(policy) as ran:
            policy.infer(observation())
        assert ran == runs


def test_after_a_reset_nothing_of_any_slot_is_read(policy):
    """Whatever the buffers hold: were a slot used, the chunk would not be a finite number."""
    for enabled in (False, True):
        policy.settings = PolicySettings(cfg_enabled=enabled, cfg_beta=1.5)
        policy.reset()
        first = policy.infer(observation())[0].normalised
        policy.infer(observation(1))
        policy.reset()
        _poison(policy._engine)
        np.testing.assert_array_equal(policy.infer(observation())[0].normalised, first)


def _poison(engine) -> None:
    engine._image_tokens[0].fill_(float('nan'))
    for rows in engine._buffers.values():
        for slot in rows.slots:
            slot['past_key'].fill_(float('nan'))
            slot['past_value'].fill_(float('nan'))
    # The copies that the denoise steps read.
    with torch.inference_mode():
        for prepared in engine._prepared.values():
            prepared.value._self_layers._attended._past_values.fill_(float('nan'))


def test_a_poisoned_slot_would_show(policy):
    """The negative control of the test before: without the reset, the hit reads the poison."""
    policy.infer(observation())
    _poison(policy._engine)
    with pytest.raises(ValueError, match='not finite'):
        policy.infer(observation())


@pytest.mark.thorough
@pytest.mark.parametrize('count', [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_inferences_keep_the_memory(policy, count):
    """Hits, misses of one camera and of both, guided and not."""
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (8, 28, 28, 3), dtype=np.uint8)
    process, seen = psutil.Process(), []
    state = np.zeros(len(JOINTS), np.float32)
    for i in range(count):
        policy.settings = PolicySettings(
            denoise_steps=1, cfg_enabled=i // 10 % 2 == 1, cfg_beta=1.5
        )
        images = {'top': frames[i // 3 % 8], 'wrist': frames[i // 9 % 8]}
        policy.infer(observation(images=images, state=state))
        if i >= 500 and i % 100 == 0:
            seen.append(process.memory_info().rss)
    assert max(seen) - seen[0] <= 5 * 2**20
