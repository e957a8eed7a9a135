"""A bundle's joint space and switched actions: where the codec applies them, both ways."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tiny_policy import aloha_spec, observation, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import SwitchSpec
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

GRIPPERS = [6, 13]
SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
# Grippers at 0.5 and 0.25, and what openpi makes of them.
STATE = np.linspace(-0.6, 0.7, 14)
STATE[GRIPPERS] = 0.5, 0.25
SEEN = SIGNS * STATE
SEEN[GRIPPERS] = -0.140055922, -0.513077607


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'aloha', aloha_spec())


@pytest.fixture(scope='module')
def codec(bundle):
    return PolicyCodec(read_bundle(bundle))


def seen_by(codec: PolicyCodec, state: np.ndarray) -> np.ndarray:
    return codec.check(observation(state=state))


def test_the_state_is_converted_before_it_is_normalised(codec):
    # Quantiles of -1.5 and 1.5.
    np.testing.assert_allclose(seen_by(codec, STATE), SEEN / 1.5, rtol=0, atol=1e-6)
    as_float32 = seen_by(codec, STATE.astype(np.float32))
    np.testing.assert_allclose(as_float32, SEEN / 1.5, rtol=0, atol=1e-6)


def test_actions_are_converted_after_deltas_were_added_to_the_converted_state(bundle):
    policy = Policy.load(bundle)
    chunk, _ = policy.infer(observation(state=STATE))
    statistics = read_bundle(bundle).statistics
    spread = statistics['actions.std'] + 1e-8
    expected = chunk.normalised[:, :14] * spread + statistics['actions.mean']
    arms = np.delete(np.arange(14), GRIPPERS)
    expected[:, arms] += SEEN[arms]
    expected *= SIGNS
    expected[:, GRIPPERS] = (expected[:, GRIPPERS] + 0.5476 + 0.6213) / 2.1123
    np.testing.assert_allclose(chunk.actions, expected, rtol=0, atol=1e-6)
    policy.close()


def test_a_committed_plan_is_shown_as_the_policy_answered_it(codec):
    normalised = np.zeros((8, 16), np.float32)
    normalised[:, :14] = np.random.default_rng(2).normal(size=(8, 14))
    look = observation(state=STATE)
    plan = CommittedPlan(codec.actions(normalised, look).actions, 1, 4)
    np.testing.assert_allclose(codec.plan(plan, look), normalised, rtol=0, atol=1e-5)


def test_a_gripper_without_a_meaning_is_refused_by_name(codec):
    state = STATE.copy()
    state[13] = -0.5
    with pytest.raises(ValueError, match=re.escape('no usable number: rg = -0.5')):
        seen_by(codec, state)


@pytest.fixture(scope='module')
def switching(tmp_path_factory):
    """A policy whose second action is closed (-1) or open (1)."""
    spec = tiny_spec('act')
    arm, gripper, *rest = spec.actions
    switch = SwitchSpec(at_least=0.25, above=-1.0, below=1.0)
    changed = replace(gripper, kind='absolute', relative_to=None, switch=switch)
    folder = tmp_path_factory.mktemp('bundles') / 'switching'
    written = write_tiny_policy(folder, replace(spec, actions=(arm, changed, *rest)))
    return PolicyCodec(read_bundle(written))


def test_an_action_that_is_one_of_two_is_either(switching):
    dims, look = switching.spec.dims, observation()
    output = np.zeros((dims.horizon, dims.action_dim), np.float32)
    output[:4, 1] = -2.0, 0.2, 0.25, 3.0
    chunk = switching.actions(output, look)
    np.testing.assert_array_equal(chunk.actions[:5, 1], [1.0, 1.0, -1.0, -1.0, 1.0])
    # The plan that a chunk is tied to has the two at the ends of the normalised scale.
    plan = switching.plan(CommittedPlan(chunk.actions, 1, 4), look)
    np.testing.assert_array_equal(plan[:5, 1], [-1.0, -1.0, 1.0, 1.0, -1.0])
    np.testing.assert_allclose(plan[:, 0], output[:, 0], rtol=0, atol=1e-5)
