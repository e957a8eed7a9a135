"""A bundle's joint space: where the codec applies it, forwards and backwards."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tiny_policy import aloha_spec, observation, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
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
