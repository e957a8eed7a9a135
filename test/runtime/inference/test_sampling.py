"""Several samples over one prefix: their noise, their distances, and which is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from guided_policies import load_policy, write_guided
from tiny_policy import observation

from vla_runtime.inference.real_time_chunking import prefix_weights
from vla_runtime.inference.sampling import chunk_noise, plan_distances, sample_noise
from vla_runtime.types import CommittedPlan


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'))


def test_the_first_sample_has_the_noise_of_a_single_one_and_no_two_are_alike():
    shape = (8, 6)
    single = sample_noise(3, 5, 1, shape)
    noises = sample_noise(3, 5, 16, shape)
    np.testing.assert_array_equal(single, chunk_noise(3, 5, shape))
    np.testing.assert_array_equal(noises[0], single)
    np.testing.assert_array_equal(noises[:4], sample_noise(3, 5, 4, shape))
    following = sample_noise(3, 6, 16, shape)
    assert len({noise.tobytes() for noise in (*noises, *following)}) == 32


def test_distances_are_the_weighted_mean_squares_of_the_real_actions():
    random = np.random.default_rng(0)
    chunks, plan = random.normal(size=(4, 8, 6)), random.normal(size=(8, 6))
    weight = prefix_weights('exp', 2, 5, 8)
    distances = plan_distances(
        chunks.astype(np.float32), plan.astype(np.float32), np.repeat(weight[:, None], 3, axis=1)
    )
    for n in range(4):
        total = 0.0
        for i in range(8):
            for j in range(3):
                total += weight[i] / weight.sum() * (chunks[n, i, j] - plan[i, j]) ** 2 / 3
        assert distances[n] == pytest.approx(np.sqrt(total), rel=1e-5)


@pytest.mark.parametrize('seed', range(4))
def test_the_sample_that_continues_the_plan_best_is_returned(bundle, seed):
    policy = load_policy(bundle, samples=6, rtc_mode='off', seed=seed)
    plan = CommittedPlan(np.full((5, 3), 0.2), delay_steps=2, execution_horizon=5)
    chunk, report = policy.infer(observation(), plan=plan)
    assert (report.samples, len(report.sample_distances)) == (6, 6)
    alone = load_policy(bundle, rtc_mode='off')
    target = alone._codec.plan(plan, observation())
    weight = prefix_weights('exp', 2, 5, 8)
    expected = []
    for noise in report.noise:
        sample = alone.infer(observation(), noise=noise)[0].normalised
        square = np.square(sample[:, :3].astype(np.float64) - target[:, :3]).mean(axis=1)
        expected.append(np.sqrt((weight * square).sum() / weight.sum()))
    np.testing.assert_allclose(report.sample_distances, expected, atol=1e-4)
    assert report.sample == np.argmin(expected)
    best = alone.infer(observation(), noise=report.noise[report.sample])[0]
    np.testing.assert_allclose(chunk.normalised, best.normalised, atol=5e-5)


def test_the_choice_is_not_always_the_first(bundle):
    policy = load_policy(bundle, samples=6, rtc_mode='off')
    plan = CommittedPlan(np.full((5, 3), 0.2), delay_steps=2, execution_horizon=5)
    chosen = {policy.infer(observation(), plan=plan)[1].sample for _ in range(8)}
    assert len(chosen) > 1


@pytest.mark.parametrize(
    'plan',
    [None, CommittedPlan(np.zeros((4, 3)), delay_steps=0, execution_horizon=0)],
    ids=['no plan', 'no overlap'],
)
def test_without_an_overlap_the_first_sample_is_returned(bundle, plan):
    single = load_policy(bundle).infer(observation())[0]
    chunk, report = load_policy(bundle, samples=4).infer(observation(), plan=plan)
    assert (report.sample, report.sample_distances) == (0, ())
    np.testing.assert_allclose(chunk.normalised, single.normalised, atol=5e-5)


def test_samples_share_one_prefix_and_one_loop(bundle):
    policy = load_policy(bundle, samples=8)
    assert policy.infer(observation())[1].runs == {'vision': 2, 'prefix': 1, 'expert': 3}
    policy.settings = replace(policy.settings, samples=2)
    assert policy.infer(observation())[1].runs == {'vision': 0, 'prefix': 0, 'expert': 3}


@pytest.mark.parametrize('samples', [1, 5])
def test_recorded_noise_gives_the_chunk_again_bit_for_bit(bundle, samples):
    policy = load_policy(bundle, samples=samples)
    plan = CommittedPlan(np.full((5, 3), 0.2), delay_steps=2, execution_horizon=5)
    policy.infer(observation(1), plan=plan)
    chunk, report = policy.infer(observation(), plan=plan)
    again, repeated = load_policy(bundle, samples=samples).infer(
        observation(), plan=plan, noise=report.noise
    )
    np.testing.assert_array_equal(again.actions, chunk.actions)
    assert repeated.sample == report.sample


def test_back_to_one_sample_is_what_one_sample_was(bundle):
    policy = load_policy(bundle)
    first = policy.infer(observation())[0].actions
    policy.settings = replace(policy.settings, samples=7)
    policy.infer(observation())
    policy.settings = replace(policy.settings, samples=1)
    policy.reset()
    np.testing.assert_array_equal(policy.infer(observation())[0].actions, first)


def test_noise_of_another_number_of_samples_is_refused(bundle):
    policy = load_policy(bundle, samples=3)
    with pytest.raises(ValueError, match='samples'):
        policy.infer(observation(), noise=np.zeros((8, 6), np.float32))


@pytest.mark.thorough
def test_every_setting_in_turn_keeps_the_memory(bundle):
    policy = load_policy(bundle)
    plan = CommittedPlan(np.full((5, 3), 0.2), delay_steps=2, execution_horizon=5)
    process, seen = psutil.Process(), []
    modes = ('off', 'guided', 'jacobian', 'hard_prefix')
    for i in range(600):
        policy.settings = replace(
            policy.settings,
            rtc_mode=modes[i % 4],
            samples=1 + i % 3,
            cfg_enabled=i % 5 < 2,
            cfg_beta=1.5,
            cfg_mode='serial' if i % 4 != 2 and i % 2 else 'fused',
        )
        policy.infer(observation(i % 7), plan=plan)
        if i >= 120:
            seen.append(process.memory_info().rss)
    assert max(seen) - seen[0] <= 5 * 2**20
