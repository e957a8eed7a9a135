"""Measured values that no motion explains: refused, and what it takes to believe them."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.state import MeasuredState

START_NS = 1_700_000_000_000_000_000
NAMES = ('elbow', 'wrist')


class Driver:
    """Publishes two joints at a rate, with limits of 3 rad/s."""

    def __init__(self, rate_hz: float = 100.0, at: tuple[float, float] = (1.6, 0.0)) -> None:
        columns = CommandColumns([Column(name) for name in NAMES])
        limit = ColumnLimits(-2.0, 2.7, 3.0, 40.0, 0.5)
        self.state = MeasuredState(
            ColumnModel(columns, make_limits(NAMES, dict.fromkeys(NAMES, limit)))
        )
        self.now_ns, self.period_ns = START_NS, round(1e9 / rate_hz)
        self.send(*at)

    def send(self, elbow: float, wrist: float = 0.0, source: str = '/joint_states#1') -> bool:
        """Publish once; return whether it was taken."""
        self.now_ns += self.period_ns
        refused = self.state.plausibility.refused
        self.state.observe(NAMES, (elbow, wrist), self.now_ns, source)
        return self.state.plausibility.refused == refused

    @property
    def doubted(self) -> bool:
        return self.now_ns < self.state.plausibility.doubted_until_ns


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
def test_a_joint_at_full_speed_is_believed(rate_hz: float) -> None:
    driver = Driver(rate_hz, at=(0.0, 0.0))
    for at in np.arange(0.0, 2.5, 3.0 / rate_hz):
        assert driver.send(float(at))
    assert not driver.doubted


@pytest.mark.parametrize('rate_hz', [10.0, 100.0, 500.0])
@pytest.mark.parametrize('value', [0.0, 1.6 + 2.0 * np.pi, -1.2])
def test_one_wrong_value_is_refused_and_the_next_good_one_is_taken(
    rate_hz: float, value: float
) -> None:
    driver = Driver(rate_hz)
    assert not driver.send(value)
    assert driver.doubted and "'elbow'" in driver.state.plausibility.describe()
    assert driver.state.positions[0] == 1.6
    assert driver.send(1.6)


@pytest.mark.parametrize(('rate_hz', 'samples'), [(100.0, 49), (500.0, 249), (10.0, 4)])
def test_wrong_values_that_stay_are_not_believed_because_time_goes_by(
    rate_hz: float, samples: int
) -> None:
    driver = Driver(rate_hz)
    assert not any(driver.send(0.0) for _ in range(samples))
    assert driver.send(1.6)
    assert not driver.state.plausibility.taken_over.any()


def test_wrong_values_that_differ_are_not_believed_because_time_goes_by() -> None:
    driver, numbers = Driver(), np.random.default_rng(0)
    for value in numbers.uniform(-1.9, 0.9, 200):
        assert not driver.send(float(value))


def test_values_that_stay_are_believed_in_the_end_but_no_hold_may_follow_them() -> None:
    driver = Driver()
    taken = [driver.send(0.0) for _ in range(80)]
    assert not any(taken[:50]) and all(taken[51:])
    assert driver.state.plausibility.taken_over.tolist() == [True, False]
    assert not driver.state.plausibility.returned[0]


def test_a_joint_may_be_anywhere_after_a_gap_but_outside_its_limits_or_at_nothing() -> None:
    for value, taken in ((-1.2, True), (0.0, False), (1.6 + 2.0 * np.pi, False)):
        driver = Driver()
        driver.now_ns += 15_000_000_000
        assert driver.send(value) == taken
        assert driver.state.plausibility.returned[0] == taken
