"""A plan is sampled as a pure function of time: values, velocities, flags."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vla_runtime.execution.plan import Sampler, make_plan, sample

knots = st.integers(1, 8).flatmap(
    lambda n: arrays(np.float64, (n, 2), elements=st.floats(-10, 10, width=32))
)


def test_when_time_is_before_the_first_knot_expect_flag_and_first_setpoint_at_rest() -> None:
    plan = make_plan(np.array([[1.0], [3.0]]), first_step=10)
    found = sample(plan, 9.5)
    assert found.before_start and not found.past_end
    assert found.positions == pytest.approx([1.0])
    assert found.velocities == pytest.approx([0.0])


def test_when_time_is_past_the_last_knot_expect_flag_and_last_setpoint_at_rest() -> None:
    plan = make_plan(np.array([[1.0], [3.0]]), first_step=10)
    found = sample(plan, 11.5)
    assert found.past_end and not found.before_start
    assert found.positions == pytest.approx([3.0])
    assert found.velocities == pytest.approx([0.0])


def test_when_time_is_on_an_end_knot_expect_no_flag() -> None:
    plan = make_plan(np.array([[1.0], [3.0]]), first_step=10)
    found = sample(plan, np.array([10.0, 11.0]))
    assert not found.before_start.any() and not found.past_end.any()
    assert found.positions[:, 0] == pytest.approx([1.0, 3.0])


def test_when_linear_expect_straight_lines_between_knots() -> None:
    plan = make_plan(np.array([[0.0], [2.0], [1.0]]), interpolation='linear')
    found = sample(plan, np.array([0.25, 1.5]))
    assert found.positions[:, 0] == pytest.approx([0.5, 1.5])
    assert found.velocities[:, 0] == pytest.approx([2.0, -1.0])


def test_when_knots_lie_on_a_line_expect_cubic_to_be_that_line() -> None:
    plan = make_plan(np.arange(6.0)[:, None] * 0.3)
    found = sample(plan, np.linspace(0, 5, 41))
    assert found.positions[:, 0] == pytest.approx(np.linspace(0, 5, 41) * 0.3)
    assert found.velocities[:, 0] == pytest.approx(np.full(41, 0.3))


def test_when_plan_has_one_knot_expect_it_at_every_time() -> None:
    plan = make_plan(np.array([[4.0, 5.0]]), first_step=3)
    found = sample(plan, np.array([0.0, 3.0, 9.0]))
    assert (found.positions == [[4.0, 5.0]] * 3).all()
    assert found.before_start.tolist() == [True, False, False]
    assert found.past_end.tolist() == [False, False, True]


def test_when_interpolation_is_unknown_expect_error() -> None:
    with pytest.raises(ValueError, match="'quintic'"):
        make_plan(np.zeros((2, 1)), interpolation='quintic')  # type: ignore[arg-type]


def test_when_there_are_no_knots_expect_error() -> None:
    with pytest.raises(ValueError, match='shape'):
        make_plan(np.zeros((0, 3)))


@settings(max_examples=150, deadline=None)
@given(knots, st.sampled_from(['linear', 'cubic']))
def test_when_sampled_anywhere_expect_knots_met_and_never_overshot(
    values: np.ndarray, interpolation: str
) -> None:
    plan = make_plan(values, 5, interpolation)  # type: ignore[arg-type]
    times = np.linspace(5, plan.last_step, 20 * len(values))
    found = sample(plan, times).positions
    interval = np.clip((times - 5).astype(int), 0, max(len(values) - 2, 0))
    following = np.minimum(interval + 1, len(values) - 1)
    low = np.minimum(values[interval], values[following])
    high = np.maximum(values[interval], values[following])
    slack = 1e-9 * (1 + np.abs(values).max())
    assert (found >= low - slack).all() and (found <= high + slack).all()
    at_knots = sample(plan, 5.0 + np.arange(len(values))).positions
    assert at_knots == pytest.approx(values, abs=slack)


@settings(max_examples=100, deadline=None)
@given(knots)
def test_when_cubic_expect_continuous_velocity_at_every_knot(values: np.ndarray) -> None:
    plan = make_plan(values)
    for knot in range(1, len(values) - 1):
        before, after = (sample(plan, knot + side).velocities for side in (-1e-7, 1e-7))
        assert after == pytest.approx(before, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(knots, st.floats(0, 1))
def test_when_sampled_into_arrays_expect_the_same_as_the_pure_function(
    values: np.ndarray, fraction: float
) -> None:
    plan = make_plan(values)
    positions, velocities = np.zeros(2), np.zeros(2)
    for interval in range(len(values) - 1):
        Sampler().sample_into(plan, interval, fraction, positions, velocities)
        expected = sample(plan, interval + fraction)
        assert positions == pytest.approx(expected.positions, abs=1e-9)
        if 0.0 < fraction < 1.0:
            assert velocities == pytest.approx(expected.velocities, abs=1e-7)
