"""Several robots on one policy: a chunk of a batch is the one that its request has alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_bundles import tiny_onnx_bundle
from tiny_policy import TINY_FAMILIES, observation, tiny_spec, write_tiny_policy

from vla_runtime.engines.onnx.session import Buffer
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.buffers import RowBuffers as TorchRows
from vla_runtime.family.listing import find_family
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.sessions import Request, Session
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan, Observation, Reuse

INSTRUCTIONS = ('pick up the red cup', 'go', 'push the green box left')
TAGGED = [
    name
    for name in TINY_FAMILIES
    if tiny_spec(name).prompt is not None and find_family(name).head == 'flow'
]


@pytest.fixture(scope='module')
def bundles(tmp_path_factory):
    @lru_cache
    def written(family: str, tagged: bool = False) -> Path:
        spec = tiny_spec(family, advantage='in_task_space' if tagged else None)
        return write_tiny_policy(tmp_path_factory.mktemp('bundle') / family, spec)

    return written


def robots(policy: Policy, count: int) -> list[Session]:
    return [policy.open_session() for _ in range(count)]


def seen_by(robot: int, turn: int) -> Observation:
    """Every other robot sees in turn 1 what it saw in turn 0."""
    seed = 10 * robot + (0 if turn == 1 and robot % 2 else turn)
    return observation(seed, instruction=INSTRUCTIONS[robot % len(INSTRUCTIONS)])


def plan_of(seen: Observation, delay: int) -> CommittedPlan:
    rows = seen.state + np.linspace(0.0, 0.4, 8, dtype=np.float32)[:, None]
    return CommittedPlan(rows.astype(np.float32), delay, 4)


def alone(policy: Policy, requests: Sequence[Request]) -> list[np.ndarray]:
    return [policy.infer_batch([request])[0][0].actions for request in requests]


def together(policy: Policy, requests: Sequence[Request]) -> list[np.ndarray]:
    return [chunk.actions for chunk, _ in policy.infer_batch(requests)]


@pytest.mark.parametrize('count', [2, 3, 8])
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_chunks_of_a_batch_are_bit_for_bit_those_of_each_request_alone(family, count, bundles):
    shared, single = (Policy.load(bundles(family), 'torch') for _ in range(2))
    sessions, lone = robots(shared, count), robots(single, count)
    takes_plans = find_family(family).takes_steps
    for turn in range(3):
        requests = []
        for robot, session in enumerate(sessions):
            seen, plan = seen_by(robot, turn), None
            settings = PolicySettings(seed=robot) if takes_plans else PolicySettings()
            if takes_plans and turn and robot % 3 == 0:
                settings = replace(settings, rtc_mode='guided')
                plan = plan_of(seen, delay=1 + robot)
            requests.append(Request(seen, session, settings, plan))
        swapped = [replace(one, session=own) for one, own in zip(requests, lone, strict=True)]
        found = shared.infer_batch(requests)
        for robot, ((chunk, report), expected) in enumerate(
            zip(found, alone(single, swapped), strict=True)
        ):
            assert np.array_equal(chunk.actions, expected), (turn, robot)
            assert report.number == turn
            assert report.together in (1, count)
            hit = turn == 1 and robot % 2 == 1
            assert all(one.reuse is Reuse.HIT for one in report.cache.prefixes) is hit
    chunks = [chunk.actions for chunk, _ in found]
    assert all(np.abs(chunks[0] - other).max() > 1e-3 for other in chunks[1:])


@pytest.mark.parametrize('family', TAGGED)
def test_guided_requests_and_unguided_ones_are_each_what_they_are_alone(family, bundles):
    shared, single = (Policy.load(bundles(family, tagged=True), 'torch') for _ in range(2))
    betas = (1.0, 2.0, 1.7, 1.0, 2.5)
    requests = [
        Request(seen_by(robot, 0), session, PolicySettings(cfg_beta=beta), number=7 + robot)
        for robot, (session, beta) in enumerate(zip(robots(shared, 5), betas, strict=True))
    ]
    swapped = [replace(request, session=None) for request in requests]
    for found, expected in zip(together(shared, requests), alone(single, swapped), strict=True):
        assert np.array_equal(found, expected)


def test_requests_that_cannot_run_together_run_beside_the_others(bundles):
    """Other schedules, a tie through the Jacobian, known actions, serial guidance."""
    bundle = bundles('pi05', tagged=True)
    shared, single = (Policy.load(bundle, 'torch') for _ in range(2))
    plain = PolicySettings()
    kinds = (
        plain,
        replace(plain, denoise_steps=2),
        replace(plain, rtc_mode='jacobian'),
        replace(plain, cfg_beta=2.0, cfg_mode='serial'),
        replace(plain, rtc_mode='hard_prefix'),
        replace(plain, cache=CachePolicy('off')),
    )
    requests = [
        Request(seen_by(robot, 0), session, kind, plan_of(seen_by(robot, 0), 2), number=3)
        for robot, (session, kind) in enumerate(zip(robots(shared, 6), kinds, strict=True))
    ]
    found = shared.infer_batch(requests)
    swapped = [replace(request, session=None) for request in requests]
    for (chunk, _), expected in zip(found, alone(single, swapped), strict=True):
        assert np.array_equal(chunk.actions, expected)
    assert [report.together for _, report in found] == [3, 1, 1, 1, 3, 3]


def test_one_bad_request_fails_alone_and_changes_nothing(bundles):
    policy, other = (Policy.load(bundles('pi05'), 'torch') for _ in range(2))
    first, bad, last = robots(policy, 3)
    broken = observation(5, state=np.full(6, np.nan, dtype=np.float32))
    futures = policy.submit_batch(
        [Request(seen_by(0, 0), first), Request(broken, bad), Request(seen_by(2, 0), last)]
    )
    with pytest.raises(ValueError, match='state'):
        futures[1].result()
    expected = alone(
        other, [Request(seen_by(n, 0), s) for n, s in zip((0, 2), robots(other, 2), strict=True)]
    )
    for future, chunk in zip((futures[0], futures[2]), expected, strict=True):
        assert np.array_equal(future.result()[0].actions, chunk)
    assert (first.number, bad.number, last.number) == (1, 0, 1)


def test_where_products_do_not_keep_their_bits_requests_run_one_after_the_other(
    bundles, monkeypatch
):
    policy, single = (Policy.load(bundles('pi05'), 'torch') for _ in range(2))
    run = policy._engine._join_and_run
    monkeypatch.setattr(
        policy._engine,
        '_join_and_run',
        lambda places, inputs: [np.nextafter(x, 9.0, dtype=x.dtype) for x in run(places, inputs)],
    )
    requests = [Request(seen_by(n, 0), s, number=n) for n, s in enumerate(robots(policy, 2))]
    expected = alone(single, [replace(request, session=None) for request in requests])
    for _ in range(2):
        for (chunk, report), one in zip(policy.infer_batch(requests), expected, strict=True):
            assert np.array_equal(chunk.actions, one)
            assert report.together == 1


def test_chunks_that_are_no_numbers_say_nothing_of_the_bits(bundles, monkeypatch):
    policy = Policy.load(bundles('pi05'), 'torch')
    requests = [Request(seen_by(n, 0), s) for n, s in enumerate(robots(policy, 2))]
    with monkeypatch.context() as broken:
        advance = policy._engine._network.advance
        broken.setattr(
            policy._engine._network, 'advance', lambda *inputs: advance(*inputs) * float('nan')
        )
        for future in policy.submit_batch(requests):
            with pytest.raises(ValueError):
                future.result()
    assert [report.together for _, report in policy.infer_batch(requests)] == [2, 2]


def test_an_engine_that_fails_fails_the_requests_of_its_group_alone(bundles, monkeypatch):
    policy = Policy.load(bundles('pi05'), 'torch')
    one, two, three = robots(policy, 3)

    def fail(places, inputs):
        raise RuntimeError('out of memory')

    monkeypatch.setattr(policy._engine, 'denoise_together', fail)
    apart = PolicySettings(denoise_steps=2)
    requests = [Request(seen_by(0, 0), one), Request(seen_by(1, 0), two)]
    futures = policy.submit_batch([*requests, Request(seen_by(2, 0), three, apart)])
    for future in futures[:2]:
        with pytest.raises(RuntimeError, match='out of memory'):
            future.result()
    assert np.isfinite(futures[2].result()[0].actions).all()
    assert (one.number, three.number) == (0, 1)


def test_a_session_resets_for_itself_and_its_place_is_used_again(bundles):
    policy = Policy.load(bundles('pi05'), 'torch')
    one, two = robots(policy, 2)
    for _ in range(2):
        policy.infer_batch([Request(seen_by(0, 0), one), Request(seen_by(1, 0), two)])
    one.reset()
    (_, of_one), (_, of_two) = policy.infer_batch(
        [Request(seen_by(0, 0), one), Request(seen_by(1, 0), two)]
    )
    assert (of_one.number, of_two.number) == (0, 2)
    assert [of_one.cache.prefixes[0].reuse, of_two.cache.prefixes[0].reuse] == [
        Reuse.MISS,
        Reuse.HIT,
    ]
    policy.close_session(one)
    again = policy.open_session()
    assert again.cache is one.cache and again.number == 0
    (_, report) = policy.infer_batch([Request(seen_by(0, 0), again)])[0]
    assert report.cache.prefixes[0].reuse is Reuse.MISS


def test_a_session_that_is_not_open_here_is_refused(bundles):
    policy, other = (Policy.load(bundles('pi05'), 'torch') for _ in range(2))
    (mine,), (theirs,) = robots(policy, 1), robots(other, 1)
    policy.close_session(mine)
    policy.open_session()
    for session in (mine, theirs):
        with pytest.raises(ValueError, match='open one here'):
            policy.submit_batch([Request(seen_by(0, 0), session)])
        with pytest.raises(ValueError, match='open one here'):
            policy.close_session(session)
    with pytest.raises(ValueError, match='stays open'):
        policy.close_session(policy._own)


def test_more_requests_than_run_together_run_in_several_passes(bundles):
    policy, single = (Policy.load(bundles('pi05'), 'torch') for _ in range(2))
    requests = [Request(seen_by(n, 0), s, number=n) for n, s in enumerate(robots(policy, 10))]
    found = policy.infer_batch(requests)
    expected = alone(single, [replace(request, session=None) for request in requests])
    for (chunk, report), one in zip(found, expected, strict=True):
        assert np.array_equal(chunk.actions, one)
        assert report.pipeline == 'latency'
    assert {report.together for _, report in found} <= {1, 2, 8}


def test_a_closed_engine_keeps_no_network_for_its_batches(bundles):
    policy = Policy.load(bundles('pi05'), 'torch')
    policy.infer_batch([Request(seen_by(n, 0), s) for n, s in enumerate(robots(policy, 2))])
    expert = weakref.ref(policy._engine._network)
    gc.disable()
    try:
        policy.close()
        assert expert() is None
    finally:
        gc.enable()


def test_a_session_has_one_request_a_batch_and_the_policys_own_is_one_too(bundles):
    policy = Policy.load(bundles('pi05'), 'torch')
    (other,) = robots(policy, 1)
    for session in (None, other):
        with pytest.raises(ValueError, match='one session'):
            policy.submit_batch([Request(seen_by(0, 0), session)] * 2)
    chunk, _ = policy.infer(seen_by(0, 0))
    batch = policy.infer_batch([Request(seen_by(0, 0), number=0), Request(seen_by(1, 0), other)])
    assert np.array_equal(batch[0][0].actions, chunk.actions)
    assert batch[0][1].cache.prefixes[0].reuse is Reuse.HIT


def test_batches_and_other_pipelines_take_turns(bundles):
    policy, other = (Policy.load(bundles('pi05'), 'torch') for _ in range(2))
    (session,) = robots(policy, 1)
    overlapped = policy.submit(seen_by(0, 0), settings=PolicySettings(pipeline='throughput'))
    batch = policy.infer_batch([Request(seen_by(0, 1)), Request(seen_by(1, 0), session)])
    expected = [other.infer(seen_by(0, turn))[0].actions for turn in (0, 1)]
    assert np.array_equal(overlapped.result()[0].actions, expected[0])
    assert np.array_equal(batch[0][0].actions, expected[1])


@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_with_shapes_that_a_graph_can_hold_a_batch_is_within_rounding(family, bundles, monkeypatch):
    """As on CUDA: prefixes beside each other, filled up to a power of two."""
    monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
    shared, single = (
        Policy.load(bundles(family), 'torch', use_cuda_graphs=False) for _ in range(2)
    )
    sessions = robots(shared, 3)
    for turn in range(2):
        requests = [Request(seen_by(n, turn), one, number=n) for n, one in enumerate(sessions)]
        swapped = [replace(request, session=None) for request in requests]
        for found, expected in zip(together(shared, requests), alone(single, swapped), strict=True):
            bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
            assert np.abs(found - expected).max() <= bound


def test_sessions_on_onnx_runtime_are_apart():
    bundle = tiny_onnx_bundle()
    policy, single = (Policy.load(bundle, 'onnxruntime') for _ in range(2))
    sessions = robots(policy, 2)
    for turn in range(2):
        requests = [Request(seen_by(n, turn), one, number=n) for n, one in enumerate(sessions)]
        swapped = [replace(request, session=None) for request in requests]
        found = policy.infer_batch(requests)
        for (chunk, report), expected in zip(found, alone(single, swapped), strict=True):
            assert np.array_equal(chunk.actions, expected)
            assert report.together == 1
    assert found[1][1].cache.prefixes[0].reuse is Reuse.HIT


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_a_session_without_room_is_refused_and_the_others_go_on(backend: str, monkeypatch):
    policy = Policy.load(tiny_onnx_bundle(), backend)
    asked = [Request(seen_by(n, 0), one, number=0) for n, one in enumerate(robots(policy, 2))]

    def chunks() -> list[np.ndarray]:
        return [chunk.actions for chunk, _ in policy.infer_batch(asked)]

    expected = chunks()
    owner, name, error = {
        'torch': (TorchRows, 'make_slots', torch.cuda.OutOfMemoryError('CUDA out of memory.')),
        'onnxruntime': (Buffer, '__init__', RuntimeError('Failed to allocate memory')),
    }[backend]
    whole, calls = getattr(owner, name), []

    def full(self: object, *arguments: object) -> object:
        calls.append(self)
        # With the first part there.
        if len(calls) > 1:
            raise error
        return whole(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(ValueError, match='max-sessions'):
            policy.open_session()
    asked += [Request(seen_by(0, 0), session, number=0) for session in robots(policy, 1)]
    assert np.array_equal(chunks(), [*expected, expected[0]])
