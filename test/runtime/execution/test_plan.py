"""A plan is sampled as a pure function of time: values and velocities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from thorough import examples

from vla_runtime.execution.plan import Plan, Sampler, make_plan

knots = st.integers(2, 8).flatmap(
    lambda n: arrays(np.float64, (n, 2), elements=st.floats(-10, 10, width=32))
)


def sampled(plan: Plan, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Setpoints and derivatives at step times within a plan, (times, columns) each."""
    positions, velocities = (np.zeros((len(times), plan.knots.shape[1])) for _ in range(2))
    for row, time in enumerate(times - plan.first_step):
        interval = min(int(time), len(plan.coefficients) - 1)
        Sampler().sample_into(plan, interval, time - interval, positions[row], velocities[row])
    return positions, velocities


def test_when_linear_expect_straight_lines_between_knots() -> None:
    plan = make_plan(np.array([[0.0], [2.0], [1.0]]), interpolation='linear')
    positions, velocities = sampled(plan, np.array([0.25, 1.5]))
    assert positions[:, 0] == pytest.approx([0.5, 1.5])
    assert velocities[:, 0] == pytest.approx([2.0, -1.0])


def test_when_knots_lie_on_a_line_expect_cubic_to_be_that_line() -> None:
    plan = make_plan(np.arange(6.0)[:, None] * 0.3)
    positions, velocities = sampled(plan, np.linspace(0, 5, 41))
    assert positions[:, 0] == pytest.approx(np.linspace(0, 5, 41) * 0.3)
    assert velocities[:, 0] == pytest.approx(np.full(41, 0.3))


def test_when_interpolation_is_unknown_expect_error() -> None:
    with pytest.raises(ValueError, match="'quintic'"):
        make_plan(np.zeros((2, 1)), interpolation='quintic')  # type: ignore[arg-type]


def test_when_there_are_no_knots_expect_error() -> None:
    with pytest.raises(ValueError, match='shape'):
        make_plan(np.zeros((0, 3)))


@examples(150)
@given(knots, st.sampled_from(['linear', 'cubic']))
def test_when_sampled_anywhere_expect_knots_met_and_never_overshot(
    values: np.ndarray, interpolation: str
) -> None:
    plan = make_plan(values, 5, interpolation)  # type: ignore[arg-type]
    times = np.linspace(5, 4 + len(values), 20 * len(values))
    found, _ = sampled(plan, times)
    interval = np.clip((times - 5).astype(int), 0, max(len(values) - 2, 0))
    following = np.minimum(interval + 1, len(values) - 1)
    low = np.minimum(values[interval], values[following])
    high = np.maximum(values[interval], values[following])
    slack = 1e-9 * (1 + np.abs(values).max())
    assert (found >= low - slack).all() and (found <= high + slack).all()
    at_knots, _ = sampled(plan, 5.0 + np.arange(len(values)))
    assert at_knots == pytest.approx(values, abs=slack)


@examples(100)
@given(knots)
def test_when_cubic_expect_continuous_velocity_at_every_knot(values: np.ndarray) -> None:
    plan = make_plan(values)
    for knot in range(1, len(values) - 1):
        _, (before, after) = sampled(plan, knot + np.array([-1e-7, 1e-7]))
        assert after == pytest.approx(before, abs=1e-4)
