"""From an observation and the settings to a request, without running a network."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_policy import observation, tiny_dims, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.candidates import Candidate
from vla_runtime.engines.devices import cpu_threads
from vla_runtime.engines.loading import EngineOptions, load_engine
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.real_time_chunking import PlanSchedule
from vla_runtime.inference.request import ChunkRequest, cache_words
from vla_runtime.inference.request_builder import RequestBuilder
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.settings import live_settings, settings_from
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

BOUNDED = CachePolicy(mode='bounded', max_age_s=1.0, max_reuses=9, max_image_change=255.0)
# Of eight actions the first two are executed for certain, and from the sixth on all are free.
PLAN = CommittedPlan(np.full((7, 3), 0.2), delay_steps=2, execution_horizon=5)
FALL = (0.75, 0.5, 0.25)
TIES = {
    'linear': [1.0, 1.0, *FALL, 0.0, 0.0, 0.0],
    'exp': [1.0, 1.0, *(c * (math.exp(c) - 1) / (math.e - 1) for c in FALL), 0.0, 0.0, 0.0],
}


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'tiny', tiny_spec())


@pytest.fixture(scope='module')
def builder(bundle) -> RequestBuilder:
    return builder_of(bundle)


def builder_of(folder: Path) -> RequestBuilder:
    checked = read_bundle(folder)
    engine = load_engine(
        checked,
        Candidate('torch', 'float32'),
        EngineOptions('cpu', 1, cpu_threads(None), use_cuda_graphs=False),
    )
    return RequestBuilder(PolicyCodec(checked), engine)


@pytest.fixture(scope='module')
def long_builder(tmp_path_factory) -> RequestBuilder:
    """Of a policy of 24 actions."""
    spec = replace(tiny_spec(), dims=tiny_dims('pi05', 24))
    return builder_of(write_tiny_policy(tmp_path_factory.mktemp('long') / 'tiny', spec))


@pytest.mark.parametrize(
    ('mode', 'delay', 'asked', 'tied'),
    [
        ('guided', 2, 0, 10),
        ('guided', 0, 0, 10),
        ('guided', 14, 0, 14),
        ('guided', 2, 6, 6),
        ('guided', 2, 1024, 20),
        ('jacobian', 2, 0, 20),
        ('jacobian', 2, 6, 6),
        ('hard_prefix', 14, 0, 14),
    ],
)
def test_guided_ties_ten_actions_as_lerobot_does_and_the_whole_plan_where_asked(
    long_builder, mode, delay, asked, tied
):
    plan = CommittedPlan(np.full((20, 3), 0.2), delay_steps=delay, execution_horizon=20)
    settings = PolicySettings(rtc_mode=mode, rtc_horizon=asked)
    weight = long_builder.build(observation(), settings, 0, plan=plan).inputs.plan_weight
    assert (weight[:, :tied] > 0.0).all() and (weight[:, tied:] == 0.0).all()


def planned(builder: RequestBuilder, **settings) -> ChunkRequest:
    return builder.build(
        observation(),
        PolicySettings(**{'rtc_mode': 'guided', **settings}),
        0,
        plan=PLAN,
    )


@pytest.mark.parametrize('rtc_mode', ['guided', 'jacobian'])
@pytest.mark.parametrize('schedule', TIES)
def test_a_tie_falls_off_as_its_schedule_says_and_is_bounded(
    builder, schedule: PlanSchedule, rtc_mode
):
    request = planned(
        builder,
        denoise_steps=3,
        rtc_mode=rtc_mode,
        plan_schedule=schedule,
        max_guidance_weight=4.0,
    )
    # At flow times 1, 2/3 and 1/3: without bound the first is infinite.
    strength = [4.0, 2.5, 2.5]
    np.testing.assert_allclose(
        request.inputs.plan_weight, np.outer(strength, TIES[schedule]), rtol=1e-6
    )
    assert request.rtc_mode == rtc_mode


@pytest.mark.parametrize(
    ('top_s', 'state_s', 'age_s'),
    [(10.0, 10.4, 0.4), (10.4, 10.0, 0.4), (10.0, 11.5, 1.5), (11.5, 10.0, 1.5), (11.2, 11.5, 1.5)],
)
def test_an_observation_was_made_at_its_newest_stamp(
    bundle, top_s: float, state_s: float, age_s: float
):
    policy = Policy.load(bundle, settings=PolicySettings(cache=BOUNDED, denoise_steps=1))
    policy.infer(observation(0, stamps_ns={'top': 10_000_000_000, 'state': 10_000_000_000}))
    stamps_ns = {'top': round(top_s * 1e9), 'state': round(state_s * 1e9)}
    report = policy.infer(observation(1, stamps_ns=stamps_ns))[1]
    told = cache_words(report.cache)['vision'].split(', ')[0]
    if age_s > BOUNDED.max_age_s:
        assert told == f'top: miss ({age_s:.3f} s old; limit 1.000)'
    else:
        assert told.startswith(f'top: reused (1 in a row; {age_s:.3f} s old; ')


def test_a_policy_without_steps_refuses_the_switch_that_was_set(tmp_path: Path) -> None:
    checked = read_bundle(write_tiny_policy(tmp_path / 'act', tiny_spec('act')))
    engine: Any = SimpleNamespace(max_rows=1, backend='torch', features=())
    single = RequestBuilder(PolicyCodec(checked), engine)
    given = {row.name: row.default for row in live_settings().values()}
    single.check(settings_from(given))
    with pytest.raises(ValueError, match=r'^real_time_chunking is on .*to false$'):
        single.check(settings_from(given | {'real_time_chunking': True}))
