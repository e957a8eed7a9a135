"""A head that runs once refuses by name what only a flow can be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import BundleError
from vla_runtime.bundle.writer import seal
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    loaded = Policy.load(
        write_tiny_policy(tmp_path_factory.mktemp('act') / 'act', tiny_spec('act'))
    )
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('seed', 3),
        ('denoise_steps', 1),
        ('rtc_mode', 'guided'),
        ('plan_schedule', 'linear'),
        ('max_guidance_weight', 3.0),
        ('rtc_horizon', 4),
    ],
)
def test_a_setting_of_a_flow_is_refused_by_name(policy: Policy, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf'{name}.*{value!r}.*: the head of act \(single\)'):
        policy.settings = PolicySettings(**{name: value})


def test_noise_is_refused(policy: Policy) -> None:
    dims = policy.spec.dims
    with pytest.raises(ValueError, match='act'):
        policy.infer(observation(), noise=np.zeros((dims.horizon, dims.action_dim), np.float32))


def test_a_bundle_that_wants_several_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match='denoise_steps'):
        seal(tmp_path, replace(tiny_spec('act'), denoise_steps=3))
