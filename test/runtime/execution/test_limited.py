"""What counts as limited: a change that a person would care about, by its joint and its limit."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import Counters, LimitKind
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.motion_limiter import MotionLimiter

DT_S = 0.01
NAMES = ('a', 'b')
FREE = ColumnLimits(-10.0, 10.0, 3.0, 1e6, 5.0)


def limiter_of(limit: ColumnLimits) -> MotionLimiter:
    columns = CommandColumns(tuple(Column(name) for name in NAMES))
    return MotionLimiter(make_limits(NAMES, {'a': FREE, 'b': limit}), columns)


@pytest.mark.parametrize(
    ('limit', 'target', 'by'),
    [
        (ColumnLimits(-10.0, 0.004, 3.0, 1e6, 5.0), 0.02, LimitKind.POSITION),
        (ColumnLimits(-10.0, 10.0, 0.5, 1e6, 5.0), -0.02, LimitKind.VELOCITY),
        (ColumnLimits(-10.0, 10.0, 3.0, 10.0, 5.0), 0.02, LimitKind.ACCELERATION),
        (ColumnLimits(-10.0, 10.0, 3.0, 1e6, 0.01), 0.02, LimitKind.STEP_FROM_MEASURED),
    ],
)
def test_what_limits_a_command_is_named(limit: ColumnLimits, target: float, by: LimitKind) -> None:
    limiter, counters, command = limiter_of(limit), Counters(), np.zeros(2)
    goal = np.array([0.0, target])
    assert limiter.apply(command, goal, np.zeros(2), np.zeros(2), DT_S)
    counters.count_limited(limiter.causes())
    assert counters.limited_ticks == 1
    assert counters.limited == {('b', by): 1}


@pytest.mark.parametrize(('share', 'counts'), [(0.009, False), (0.011, True)])
def test_a_change_below_a_hundredth_of_what_the_limit_allows_does_not_count(
    share: float, counts: bool
) -> None:
    limit = ColumnLimits(-10.0, 10.0, 0.5, 1e6, 5.0)
    limiter, command = limiter_of(limit), np.zeros(2)
    goal = np.array([0.0, 0.5 * DT_S * (1.0 + share)])
    assert limiter.apply(command, goal, np.zeros(2), np.zeros(2), DT_S) is counts
    # It is limited all the same.
    assert command[1] == pytest.approx(0.5 * DT_S)


@pytest.mark.parametrize(('beyond', 'counts'), [(0.9e-4, False), (1.1e-4, True)])
def test_where_speed_is_free_a_hundredth_of_the_largest_step_counts(
    beyond: float, counts: bool
) -> None:
    limiter, command = limiter_of(ColumnLimits(-10.0, 10.0, step_from_measured=0.01)), np.zeros(2)
    goal = np.array([0.0, 0.01 + beyond])
    assert limiter.apply(command, goal, np.zeros(2), np.zeros(2), DT_S) is counts
