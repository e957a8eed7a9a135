"""An inference under way is that of the settings it began with, whatever is set meanwhile."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from gate import PATIENCE_S, Gate
from guided_policies import load_policy, write_guided
from tiny_policy import observation

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import CommittedPlan, InferenceReport

PLAN = CommittedPlan(np.full((6, 3), 0.3), delay_steps=2, execution_horizon=6)
BEGUN = PolicySettings(
    seed=3,
    denoise_steps=2,
    cfg_enabled=True,
    cfg_beta=2.0,
    cfg_mode='fused',
    advantage='positive',
    rtc_mode='guided',
    plan_schedule='exp',
    max_guidance_weight=4.0,
    rtc_horizon=5,
    cache=CachePolicy(),
    pipeline='throughput',
)
# No field of these is as it was, but for what a flow has no use for.
OF_OTHER_HEADS = {'noise_scheduler'}
MEANWHILE = PolicySettings(
    seed=4,
    denoise_steps=3,
    cfg_enabled=False,
    cfg_beta=3.0,
    cfg_mode='serial',
    advantage='negative',
    rtc_mode='hard_prefix',
    plan_schedule='linear',
    max_guidance_weight=7.0,
    rtc_horizon=3,
    cache=CachePolicy(mode='off'),
    pipeline='latency',
)
# Wall time.
MEASURED = {'milliseconds', 'overlap_ms'}


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'))


def facts(report: InferenceReport) -> dict[str, object]:
    """All that a report says but how long it took."""
    told = {**vars(report), 'noise': report.noise.tolist()}
    return {name: value for name, value in told.items() if name not in MEASURED}


def test_what_is_set_while_a_chunk_is_denoised_is_not_in_it_nor_in_its_report(bundle):
    names = {row.name for row in fields(BEGUN)} - OF_OTHER_HEADS
    assert all(getattr(BEGUN, name) != getattr(MEANWHILE, name) for name in names)
    gate = Gate()
    policy, plain = load_policy(bundle), load_policy(bundle)
    policy.settings = plain.settings = BEGUN
    # With a stamp, for without one the ages of cache entries would be wall time.
    seen = observation(stamps_ns={'state': 1_000_000_000})
    held = policy.submit(seen, plan=PLAN, on_step=gate)
    gate.wait()
    policy.settings = MEANWHILE
    gate.open()
    chunk, report = held.result(PATIENCE_S)
    expected, expected_report = plain.submit(seen, plan=PLAN).result(PATIENCE_S)
    np.testing.assert_array_equal(chunk.normalised, expected.normalised)
    # By what they say: not-a-number is unequal to itself in dataclasses from Python 3.13 on.
    assert repr(facts(report)) == repr(facts(expected_report))
    # Where they are in force they are seen.
    other = facts(policy.infer(seen, plan=PLAN)[1])
    alike = {name for name, value in facts(report).items() if other[name] == value}
    assert alike <= {'clean_steps', 'cuda_graph', 'stamps_ns', 'ticks', 'answers_per_s', 'together'}
    for each in (policy, plain):
        each.close()
