"""The noise of a chunk: of its seed and number, recorded, and handed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from guided_policies import load_policy, write_guided
from tiny_policy import observation

from vla_runtime.inference.runner import chunk_noise, step_noise
from vla_runtime.types import CommittedPlan


def test_the_noise_of_a_seed_and_number_is_what_it_was():
    """Recordings of every release name their noise by these two alone."""
    bits = np.random.Philox(key=[3, 5], counter=[0, 0, 0, 0])
    expected = np.random.Generator(bits).standard_normal((8, 6), dtype=np.float32)
    np.testing.assert_array_equal(chunk_noise(3, 5, (8, 6)), expected)
    steps = step_noise(3, 5, 4, (8, 6))
    np.testing.assert_array_equal(steps[:2], step_noise(3, 5, 2, (8, 6)))
    assert len({one.tobytes() for one in (expected, *steps, chunk_noise(3, 6, (8, 6)))}) == 6


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'))


def test_recorded_noise_gives_the_chunk_again_bit_for_bit(bundle):
    policy = load_policy(bundle)
    plan = CommittedPlan(np.full((5, 3), 0.2), delay_steps=2, execution_horizon=5)
    policy.infer(observation(1), plan=plan)
    chunk, report = policy.infer(observation(), plan=plan)
    again, repeated = load_policy(bundle).infer(observation(), plan=plan, noise=report.noise)
    np.testing.assert_array_equal(again.actions, chunk.actions)
    np.testing.assert_array_equal(repeated.noise, report.noise)


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
            cfg_enabled=i % 5 < 2,
            cfg_beta=1.5,
            cfg_mode='serial' if i % 4 != 2 and i % 2 else 'fused',
        )
        policy.infer(observation(i % 7), plan=plan)
        if i >= 120:
            seen.append(process.memory_info().rss)
    assert max(seen) - seen[0] <= 5 * 2**20
