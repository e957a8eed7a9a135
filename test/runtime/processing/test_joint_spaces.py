"""openpi's ALOHA joints: joint by joint against an oracle of their own, and from the geometry."""

import math

import numpy as np
import pytest

from vla_runtime.processing.joint_spaces import joint_space

ALOHA = joint_space('openpi_aloha')
COUNT = 14


def state_oracle(state: list[float]) -> list[float]:
    """The policy's state, number by number."""
    result = []
    for place, value in enumerate(state):
        match place % 7:
            case 1 | 2:
                value = -value
            case 6:
                finger = 0.01844 * (1 - value) + 0.058 * value
                sine = (0.022 / finger + finger / 0.022 - 0.036 * 0.036 / finger / 0.022) / 2
                value = (math.asin(min(1.0, max(-1.0, sine))) - 0.5476) / (1.6296 - 0.5476)
        result.append(value)
    return result


def action_oracle(action: list[float]) -> list[float]:
    """The robot's targets, number by number."""
    result = []
    for place, value in enumerate(action):
        match place % 7:
            case 1 | 2:
                value = -value
            case 6:
                value = (value + 0.5476 - -0.6213) / (1.4910 - -0.6213)
        result.append(value)
    return result


def test_states_are_the_oracles():
    random = np.random.default_rng(0)
    for _ in range(50):
        state = random.uniform(-2, 2, COUNT)
        state[[6, 13]] = random.uniform(-0.2, 1.2, 2)
        expected = state_oracle(state.tolist())
        np.testing.assert_allclose(ALOHA.state_to_policy(state), expected, rtol=0, atol=1e-12)


def test_actions_are_the_oracles_and_come_back():
    actions = np.random.default_rng(1).uniform(-2, 2, (9, COUNT))
    found = ALOHA.actions_to_robot(actions)
    expected = [action_oracle(row) for row in actions.tolist()]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(ALOHA.actions_to_policy(found), actions, rtol=0, atol=1e-12)


def test_grippers_have_the_numbers_that_openpi_gives():
    # Computed with openpi's own functions.
    for measured, expected in (
        (-0.2, -1.957852428),
        (0.0, -1.079865548),
        (0.25, -0.513077607),
        (0.5, -0.140055922),
        (1.0, 0.945652797),
        (1.1, 0.945652797),
    ):
        found = ALOHA.state_to_policy(np.full(COUNT, measured))
        np.testing.assert_allclose(found[[6, 13]], expected, rtol=0, atol=1e-8)
    for answered, expected in ((-1.2, -0.014723287), (0.0, 0.553377835), (0.9434, 1.0)):
        found = ALOHA.actions_to_robot(np.full((1, COUNT), answered))
        np.testing.assert_allclose(found[0, [6, 13]], expected, rtol=0, atol=1e-8)


def test_a_grippers_angle_is_where_the_rod_reaches_the_finger():
    for measured in np.linspace(0.0, 0.99, 7):
        angle = ALOHA.state_to_policy(np.full(COUNT, measured))[6] * 1.082 + 0.5476
        tip = np.array([math.sin(angle), math.cos(angle)]) * 0.022
        finger = np.array([0.01844 + measured * 0.03956, 0.0])
        assert np.linalg.norm(tip - finger) == pytest.approx(0.036, abs=1e-9)


@pytest.mark.parametrize('measured', [-0.47, -5.0, np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings('error')
def test_a_gripper_without_a_meaning_is_nan(measured):
    state = np.zeros(COUNT)
    state[13] = measured
    assert np.flatnonzero(np.isnan(ALOHA.state_to_policy(state))).tolist() == [13]


def test_inputs_are_left_alone():
    state, actions = np.full(COUNT, 0.5), np.full((3, COUNT), 0.5)
    ALOHA.state_to_policy(state)
    ALOHA.actions_to_policy(actions)
    ALOHA.actions_to_robot(actions)
    assert (state == 0.5).all() and (actions == 0.5).all()


def test_the_robots_own_joints_stay_as_they_are():
    values = np.array([[0.5, 1.5]])
    own = joint_space(None)
    assert own.units is None
    for convert in (own.state_to_policy, own.actions_to_policy, own.actions_to_robot):
        np.testing.assert_array_equal(convert(values), values)
