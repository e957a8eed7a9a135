"""Two inferences at a time: the chunks of one after the other, in their order, and really at once.

Threads wait for each other's steps, never for a time.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gate import PATIENCE_S, Gate
from guided_policies import load_policy, policy_on_engine, without_ages, write_guided
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import CAMERAS, observation

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.protocol import count_rows
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan, Observation

THROUGHPUT = PolicySettings(pipeline='throughput')
BOUNDED = CachePolicy(
    mode='bounded', max_age_s=1.0, max_reuses=2, max_image_change=40.0, max_state_bins=30
)
PLAN = CommittedPlan(np.full((6, 3), 0.3), delay_steps=2, execution_horizon=6)


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp('bundles')
    return {family: write_guided(folder, family) for family in ('pi05', 'pi0', 'smolvla')}


@pytest.fixture
def policy(bundles) -> Iterator[Policy]:
    policy = load_policy(bundles['pi05'], pipeline='throughput')
    yield policy
    policy.close()


def one_after_the_other(bundle: Path, looks: list[Observation], **settings) -> list[np.ndarray]:
    policy = load_policy(bundle, **settings)
    return [policy.infer(seen)[0].normalised for seen in looks]


def chunk_of(future) -> np.ndarray:
    return future.result(PATIENCE_S)[0].normalised


# At once.


def test_the_next_request_is_encoded_while_one_is_denoised(bundles, policy):
    gate = Gate()
    first = policy.submit(observation(0), on_step=gate)
    gate.wait()
    # The first denoise loop stands still at its first step: this returns all the same.
    second = policy.submit(observation(1))
    assert not first.done()
    gate.open()
    reports = [future.result(PATIENCE_S)[1] for future in (first, second)]
    assert [report.number for report in reports] == [0, 1]
    assert reports[1].runs == {'vision': 2, 'prefix': 1, 'expert': 3}
    encoding_ms = reports[1].milliseconds['vision'] + reports[1].milliseconds['prefix']
    assert reports[0].overlap_ms == 0.0
    assert 0 < encoding_ms <= reports[1].overlap_ms + 1e-6
    assert 'wait' in reports[1].milliseconds
    assert {report.pipeline for report in reports} == {'throughput'}
    expected = one_after_the_other(bundles['pi05'], [observation(0), observation(1)])
    np.testing.assert_array_equal(chunk_of(first), expected[0])
    np.testing.assert_array_equal(chunk_of(second), expected[1])


def test_a_prefix_that_is_denoised_over_is_found_and_not_written(bundles, policy):
    gate = Gate()
    first = policy.submit(observation(0), on_step=gate)
    gate.wait()
    second = policy.submit(observation(0))
    gate.open()
    reports = [future.result(PATIENCE_S)[1] for future in (first, second)]
    assert without_ages(cache_words(reports[1].cache)) == {
        'vision': 'top: hit, wrist: hit',
        'prefix': 'hit',
    }
    expected = one_after_the_other(bundles['pi05'], [observation(0)] * 2)
    np.testing.assert_array_equal(chunk_of(first), expected[0])
    np.testing.assert_array_equal(chunk_of(second), expected[1])


def test_one_slot_for_both_would_show(bundles, policy, monkeypatch):
    """The negative control: encode over what is being denoised, and the chunk is another one."""
    real = policy._runner.encode
    monkeypatch.setattr(policy._runner, 'encode', lambda request, held=(): real(request))
    gate = Gate()
    first = policy.submit(observation(0), on_step=gate)
    gate.wait()
    policy.submit(observation(1))
    gate.open()
    expected = one_after_the_other(bundles['pi05'], [observation(0)])
    assert not np.array_equal(chunk_of(first), expected[0])


def test_two_are_under_way_at_most(policy):
    gate = Gate()
    assert policy.has_room
    policy.submit(observation(0), on_step=gate)
    gate.wait()
    assert policy.has_room
    policy.submit(observation(1))
    assert not policy.has_room
    third = threading.Thread(target=policy.submit, args=(observation(2),))
    with Watch(policy) as encoded:
        third.start()
        gate.open()
        third.join(PATIENCE_S)
        policy.drain()
    # None is left where the machine let both finish before the third's thread ran on.
    assert encoded in ([0], [1]), 'the third waited until at most one was left'
    assert policy.has_room


class Watch:
    """Unfinished requests at the start of every encoding."""

    def __init__(self, policy: Policy) -> None:
        self._runner: Any = policy._runner
        self._pipeline = policy._pipeline
        self._seen: list[int] = []

    def __enter__(self) -> list[int]:
        self._real = self._runner.encode

        def encode(*arguments):
            self._seen.append(len(self._pipeline._unfinished))
            return self._real(*arguments)

        self._runner.encode = encode
        return self._seen

    def __exit__(self, *_: object) -> None:
        self._runner.encode = self._real


def test_serial_guidance_needs_both_slots_and_overlaps_with_nothing(bundles):
    serial = {'cfg_enabled': True, 'cfg_beta': 2.0, 'cfg_mode': 'serial'}
    policy = load_policy(bundles['pi05'], pipeline='throughput', **serial)
    with Watch(policy) as encoded:
        futures = [policy.submit(observation(i)) for i in range(3)]
        policy.settings = THROUGHPUT
        futures.append(policy.submit(observation(3)))
        reports = [future.result(PATIENCE_S)[1] for future in futures]
    assert encoded == [0, 0, 0, 0]
    assert [report.overlap_ms for report in reports] == [0.0] * 4
    expected = one_after_the_other(bundles['pi05'], [observation(i) for i in range(3)], **serial)
    for future, chunk in zip(futures, expected, strict=False):
        np.testing.assert_array_equal(chunk_of(future), chunk)
    policy.close()


# The same chunks.


def sample(draw: Any, seeds: int = 3) -> tuple[Observation, PolicySettings, CommittedPlan | None]:
    """Next request of an executor: often one that was there already."""
    look = observation(draw(st.integers(0, seeds - 1)))
    wrist = observation(draw(st.integers(0, seeds - 1))).images['wrist']
    images = {**look.images, 'wrist': draw(st.sampled_from([look.images['wrist'], wrist, None]))}
    settings = PolicySettings(
        denoise_steps=draw(st.sampled_from([1, 2])),
        cfg_enabled=draw(st.booleans()),
        cfg_beta=1.5,
        cfg_mode=draw(st.sampled_from(['fused', 'serial'])),
        cache=draw(st.sampled_from([CachePolicy(), CachePolicy(mode='off')])),
        rtc_mode='guided',
    )
    return replace(look, images=images), settings, draw(st.sampled_from([None, PLAN]))


_PAIRS: dict[str, tuple[Policy, Policy]] = {}


def pair(bundles: dict[str, Path], family: str) -> tuple[Policy, Policy]:
    if family not in _PAIRS:
        _PAIRS[family] = load_policy(bundles[family]), load_policy(bundles[family])
    for policy in _PAIRS[family]:
        policy.reset()
    return _PAIRS[family]


@pytest.mark.parametrize(
    'family',
    ['pi05', *(pytest.param(name, marks=pytest.mark.thorough) for name in ('pi0', 'smolvla'))],
)
@given(data=st.data())
def test_any_sequence_gives_the_chunks_of_one_after_the_other_in_their_order(bundles, family, data):
    overlapped, plain = pair(bundles, family)
    futures, expected, finished = [], [], []
    for number in range(data.draw(st.integers(1, 8))):
        look, settings, plan = sample(data.draw)
        plain.settings = settings
        expected.append(plain.infer(look, plan=plan)[0].normalised)
        # Now and then one after the other, to change over while running.
        mode = data.draw(st.sampled_from(['throughput'] * 3 + ['latency']))
        overlapped.settings = replace(settings, pipeline=mode)
        futures.append(overlapped.submit(look, plan=plan))
        futures[-1].add_done_callback(lambda _, number=number: finished.append(number))
    overlapped.drain()
    for future, chunk in zip(futures, expected, strict=True):
        np.testing.assert_array_equal(chunk_of(future), chunk)
    assert finished == sorted(finished)
    assert [future.result()[1].number for future in futures] == list(range(len(futures)))


@pytest.mark.thorough
@given(data=st.data())
def test_bounded_reuse_is_that_of_one_after_the_other(bundles, data):
    overlapped, plain = pair(bundles, 'pi05')
    futures, expected = [], []
    time_s = 0.0
    for _ in range(data.draw(st.integers(2, 8))):
        time_s += data.draw(st.sampled_from([0.1, 0.6]))
        look = observation(data.draw(st.integers(0, 1)))
        shift = data.draw(st.integers(0, 2)) * 10
        look = replace(
            look,
            images={name: image // 2 + shift for name, image in look.images.items()},
            state=look.state + np.float32(shift * 1e-3),
            stamps_ns={'state': round(time_s * 1e9)},
        )
        settings = PolicySettings(
            denoise_steps=1,
            cfg_enabled=data.draw(st.booleans()),
            cfg_beta=1.5,
            cfg_mode=data.draw(st.sampled_from(['fused', 'serial'])),
            # Now and then exact, to change over while running.
            cache=data.draw(st.sampled_from([BOUNDED, BOUNDED, BOUNDED, CachePolicy()])),
        )
        plain.settings = settings
        chunk, report = plain.infer(look)
        expected.append((chunk.normalised, cache_words(report.cache), settings))
        overlapped.settings = replace(settings, pipeline='throughput')
        futures.append(overlapped.submit(look))
    for future, (chunk, cache, settings) in zip(futures, expected, strict=True):
        np.testing.assert_array_equal(chunk_of(future), chunk)
        told = cache_words(future.result()[1].cache)
        assert told['vision'] == cache['vision']
        # A miss of the other slot has another reason, and an exact hit may be in either.
        if settings.cache == BOUNDED:
            assert words(told['prefix']) == words(cache['prefix'])


def words(prefix: str) -> list[str]:
    """Hit, reused or miss, row by row."""
    return re.findall(r'(hit|reused|miss)(?: \()', prefix)


def moved(state: float, time_s: float) -> Observation:
    """A look at nothing new, the joints alone somewhere else."""
    look = observation(0)
    return replace(
        look,
        state=look.state + np.float32(state),
        stamps_ns={'state': round(time_s * 1e9)},
    )


@pytest.mark.parametrize('cache', [BOUNDED, CachePolicy()], ids=['bounded', 'exact between'])
def test_bounded_reuses_no_row_that_one_after_the_other_would_have_lost(bundles, cache):
    """Serial guidance leaves a row in the second slot; chunks of one row then use the first."""
    serial = PolicySettings(
        cfg_enabled=True, cfg_beta=2.0, cfg_mode='serial', cache=BOUNDED, denoise_steps=1
    )
    plain = PolicySettings(cache=cache, denoise_steps=1)
    sequence = [
        (serial, moved(0.0, 0.1)),
        (plain, moved(0.5, 0.2)),
        (plain, moved(1.0, 0.3)),
        (serial, moved(0.01, 0.4)),
    ]
    chunks = {}
    for pipeline in ('latency', 'throughput'):
        policy, gate = load_policy(bundles['pi05']), Gate()
        futures = []
        for number, (settings, look) in enumerate(sequence):
            policy.settings = replace(settings, pipeline=pipeline)
            held = number == 1 and pipeline == 'throughput'
            futures.append(policy.submit(look, on_step=gate if held else None))
            if number == 2:
                gate.open()
        chunks[pipeline] = [chunk_of(future) for future in futures]
        told = cache_words(futures[-1].result()[1].cache)['prefix']
        assert words(told) == ['miss', 'miss']
        policy.close()
    for found, expected in zip(chunks['throughput'], chunks['latency'], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_bounded_reuses_no_prefix_from_before_the_latest(bundles):
    settings = PolicySettings(cache=BOUNDED, denoise_steps=1)
    looks = [moved(0.0, 0.1), moved(0.5, 0.2), moved(0.01, 0.3)]
    expected = one_after_the_other(bundles['pi05'], looks, cache=BOUNDED, denoise_steps=1)
    policy = load_policy(bundles['pi05'])
    policy.settings = replace(settings, pipeline='throughput')
    gates = [Gate(), Gate()]
    futures = [policy.submit(look, on_step=gate) for look, gate in zip(looks, gates, strict=False)]
    gates[0].open()
    gates[1].wait()
    # The second is held: the third goes where the first was, whose state was almost the same.
    futures.append(policy.submit(looks[2]))
    gates[1].open()
    for future, chunk in zip(futures, expected, strict=True):
        np.testing.assert_array_equal(chunk_of(future), chunk)
    assert words(cache_words(futures[2].result()[1].cache)['prefix']) == ['miss']
    policy.close()


# When something goes wrong.


def test_a_refused_observation_leaves_no_trace(bundles, policy):
    looks = [observation(0), observation(1)]
    futures = [policy.submit(looks[0])]
    with pytest.raises(ValueError, match='state'):
        policy.submit(observation(state=np.zeros(4)))
    futures.append(policy.submit(looks[1]))
    for future, chunk in zip(futures, one_after_the_other(bundles['pi05'], looks), strict=True):
        np.testing.assert_array_equal(chunk_of(future), chunk)


def test_an_error_of_one_chunk_is_that_chunks_alone(bundles, policy):
    looks = [observation(i) for i in range(3)]

    def fail(*_: object) -> None:
        raise RuntimeError('the device is gone')

    futures = [
        policy.submit(look, on_step=fail if number == 1 else None)
        for number, look in enumerate(looks)
    ]
    with pytest.raises(RuntimeError, match='device'):
        futures[1].result(PATIENCE_S)
    expected = one_after_the_other(bundles['pi05'], looks)
    for number in (0, 2):
        np.testing.assert_array_equal(chunk_of(futures[number]), expected[number])


def test_whoever_gives_up_on_a_chunk_does_not_stop_the_others(bundles, policy):
    gate = Gate()
    first = policy.submit(observation(0), on_step=gate)
    gate.wait()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(first), 0)

    asyncio.run(give_up())
    second = policy.submit(observation(1))
    assert not first.cancel()
    assert not second.cancel()
    gate.open()
    looks = [observation(0), observation(1)]
    for future, chunk in zip(
        (first, second), one_after_the_other(bundles['pi05'], looks), strict=True
    ):
        np.testing.assert_array_equal(chunk_of(future), chunk)
    policy.drain()


def test_a_network_that_fails_while_encoding_leaves_the_other_chunk_alone(
    bundles, policy, monkeypatch
):
    gate = Gate()
    first = policy.submit(observation(0), on_step=gate)
    gate.wait()

    def broken(*_: object) -> None:
        raise RuntimeError('out of memory')

    with monkeypatch.context() as planted:
        planted.setattr(TorchEngine, 'encode_prefix', broken)
        with pytest.raises(RuntimeError, match='memory'):
            policy.submit(observation(1))
    second = policy.submit(observation(1))
    gate.open()
    looks = [observation(0), observation(1)]
    for future, chunk in zip(
        (first, second), one_after_the_other(bundles['pi05'], looks), strict=True
    ):
        np.testing.assert_array_equal(chunk_of(future), chunk)


def test_a_reset_waits_for_what_is_under_way_and_begins_anew(bundles, policy):
    futures = [policy.submit(observation(i)) for i in range(2)]
    policy.reset()
    assert all(future.done() for future in futures)
    chunk, report = policy.infer(observation(0))
    assert (report.number, cache_words(report.cache)['prefix']) == (0, 'miss (first)')
    expected = one_after_the_other(bundles['pi05'], [observation(0)])
    np.testing.assert_array_equal(chunk.normalised, expected[0])


def test_closing_finishes_what_is_under_way_and_ends_the_thread(bundles):
    policy = load_policy(bundles['pi05'], pipeline='throughput')
    before = threading.active_count()
    futures = [policy.submit(observation(i)) for i in range(2)]
    assert threading.active_count() == before + 1
    policy.close()
    assert threading.active_count() == before
    assert all(future.exception() is None for future in futures)
    with pytest.raises(ValueError, match='closed'):
        policy.submit(observation())


@pytest.mark.parametrize(
    ('settings', 'slots'),
    [
        ({'pipeline': 'latency'}, [(1, 0), (2, 0)]),
        ({'pipeline': 'throughput'}, [(1, 0), (1, 1), (2, 0), (2, 1)]),
        ({'pipeline': 'throughput', 'cfg_mode': 'serial'}, [(1, 0), (1, 1), (1, 0), (1, 1)]),
    ],
    ids=['latency', 'throughput', 'serial'],
)
def test_warming_up_runs_every_slot_that_will_be_used(bundles, monkeypatch, settings, slots):
    """A graph is captured at its first run; the first real inference is not to pay for it."""
    policy = load_policy(bundles['pi05'], **settings)
    real, seen = TorchEngine.encode_prefix, []

    def encode_prefix(self, image_mask, rows, slot=0):
        seen.append((count_rows(rows), slot))
        real(self, image_mask, rows, slot)

    monkeypatch.setattr(TorchEngine, 'encode_prefix', encode_prefix)
    policy.warm_up()
    assert seen == slots
    assert cache_words(policy.infer(observation())[1].cache)['prefix'] == 'miss (first)'
    policy.close()


def test_latency_mode_starts_no_thread_and_reports_no_overlap(bundles):
    policy = load_policy(bundles['pi05'])
    before = threading.active_count()
    future = policy.submit(observation())
    assert future.done()
    assert threading.active_count() == before
    report = future.result()[1]
    assert (report.pipeline, report.overlap_ms) == ('latency', 0.0)
    assert 'wait' not in report.milliseconds


def test_an_engine_that_cannot_overlap_is_refused_and_the_old_settings_stay(bundles):
    _, engine = policy_on_engine(bundles['pi05'])
    engine.features = frozenset({'jacobian'})
    policy = Policy(read_bundle(bundles['pi05']), engine)
    with pytest.raises(ValueError, match="'throughput'"):
        policy.settings = THROUGHPUT
    assert policy.settings.pipeline == 'latency'


@pytest.mark.thorough
def test_a_thousand_overlapped_inferences_keep_the_memory(policy):
    policy.settings = replace(THROUGHPUT, denoise_steps=1)
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (8, 28, 28, 3), dtype=np.uint8)
    process, seen = psutil.Process(), []
    for i in range(1000):
        images = dict.fromkeys(CAMERAS, frames[i // 2 % 8])
        future = policy.submit(observation(images=images))
        if i >= 100 and i % 50 == 0:
            future.result(PATIENCE_S)
            seen.append(process.memory_info().rss)
    assert max(seen) - seen[0] <= 5 * 2**20
