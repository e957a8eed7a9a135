"""`Policy` blames what is at fault: a plan that binds nothing, one too long, a closed policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_policy import JOINTS, observation, tiny_spec, write_tiny_policy

from vla_runtime.inference.real_time_chunking import RtcMode
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

HORIZON = 8
ROWS = np.cumsum(np.full((HORIZON + 4, len(JOINTS)), 0.1), axis=0)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', tiny_spec())


@pytest.mark.parametrize(
    ('mode', 'maximum', 'delay', 'horizon'),
    [
        ('guided', 0.0, 2, 6),
        ('jacobian', 0.0, 2, 6),
        # No weight in float32.
        ('guided', 1e-46, 2, 6),
        ('guided', 10.0, 2, 0),
        ('jacobian', 10.0, 0, 0),
        ('hard_prefix', 10.0, 2, 0),
    ],
)
def test_a_chunk_that_no_weight_ties_is_the_free_one_and_is_told_as_such(
    bundle: Path, mode: RtcMode, maximum: float, delay: int, horizon: int
) -> None:
    """An executor that believed it would take it without blending, and the robot would jump."""
    settings = PolicySettings(rtc_mode=mode, max_guidance_weight=maximum)
    free, _ = Policy.load(bundle, settings=settings).infer(observation())
    chunk, report = Policy.load(bundle, settings=settings).infer(
        observation(), plan=CommittedPlan(ROWS[:6], delay, horizon)
    )
    np.testing.assert_array_equal(chunk.actions, free.actions)
    assert (report.rtc_mode, report.clean_steps) == ('off', 0)


@pytest.mark.parametrize('mode', ['guided', 'jacobian', 'hard_prefix'])
@pytest.mark.parametrize('delay', [3, HORIZON + 2])
def test_a_plan_longer_than_the_chunk_is_cut_to_it(bundle: Path, mode: RtcMode, delay: int) -> None:
    settings = PolicySettings(rtc_mode=mode, denoise_steps=10)
    long, cut = (
        Policy.load(bundle, settings=settings).infer(
            observation(), plan=CommittedPlan(ROWS[:rows], min(delay, rows), rows)
        )
        for rows in (len(ROWS), HORIZON)
    )
    np.testing.assert_array_equal(long[0].actions, cut[0].actions)
    assert long[1].rtc_mode == mode


def test_a_closed_policy_refuses_to_warm_up(bundle: Path) -> None:
    policy = Policy.load(bundle)
    policy.close()
    with pytest.raises(ValueError, match='closed'):
        policy.warm_up()


def test_a_number_that_is_not_finite_is_blamed_on_the_weight_of_the_plan_too(bundle: Path) -> None:
    """The weights are sound: float32 has the plan, but not what the weight makes of it."""
    settings = PolicySettings(rtc_mode='guided', max_guidance_weight=100.0, denoise_steps=10)
    policy = Policy.load(bundle, settings=settings)
    with pytest.raises(ValueError, match='max_guidance_weight'):
        policy.infer(observation(), plan=CommittedPlan(ROWS[:6] * 3e37, 2, 6))
