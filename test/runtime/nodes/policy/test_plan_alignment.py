"""Row 0 of an aligned plan is the step that was current at the observation."""

import numpy as np
import pytest

from vla_runtime.nodes.policy.robot_policy import AlignmentError, align_plan, step_of_row_0
from vla_runtime.types import PlanRequest

S = 1_000_000_000
MS = 1_000_000
ROWS = np.arange(12.0).reshape(6, 2)


def a_plan(rows=ROWS, certain=4, **changes):
    values = {
        'rows': rows,
        'names': ('a', 'b'),
        'kinds': ('position', 'velocity'),
        'step_time_s': 0.1,
        'stamp_ns': 10 * S,
        'episode': 0,
        'certain': certain,
    }
    return PlanRequest(**{**values, **changes})


def align(plan, offset_ms=0, names=('a', 'b'), kinds=('position', 'velocity'), horizon=8):
    return align_plan(
        plan,
        stamp_ns=10 * S + offset_ms * MS,
        names=names,
        kinds=kinds,
        step_time_s=0.1,
        horizon=horizon,
    )


@pytest.mark.parametrize(
    ('offset_ms', 'first_row', 'delay'),
    [(0, 0, 4), (99, 0, 4), (100, 1, 3), (250, 2, 2), (500, 5, 0)],
)
def test_steps_that_were_over_are_dropped(offset_ms, first_row, delay):
    plan = align(a_plan(), offset_ms)
    np.testing.assert_array_equal(plan.actions, ROWS[first_row:])
    assert plan.delay_steps == delay
    assert plan.execution_horizon == 6 - first_row


@pytest.mark.parametrize(('offset_ms', 'added'), [(-1, 1), (-100, 1), (-101, 2)])
def test_plan_that_begins_later_is_continued_backwards(offset_ms, added):
    plan = align(a_plan(), offset_ms)
    np.testing.assert_array_equal(plan.actions[: added + 1], np.tile(ROWS[0], (added + 1, 1)))
    np.testing.assert_array_equal(plan.actions[added:], ROWS[: 8 - added])
    assert plan.delay_steps == 4 + added


@pytest.mark.parametrize('offset_ms', [600, 10**6, -800, -(10**9)])
def test_nothing_is_left_of_a_plan_that_lies_elsewhere(offset_ms):
    assert align(a_plan(), offset_ms) is None


def test_empty_plan_is_none():
    assert align(a_plan(np.zeros((0, 2)))) is None


def test_plan_is_cut_to_the_horizon():
    plan = align(a_plan(certain=6), horizon=3)
    assert (len(plan.actions), plan.delay_steps, plan.execution_horizon) == (3, 3, 3)


def test_columns_are_mapped_by_name():
    plan = align(a_plan(), names=('b', 'a'), kinds=('velocity', 'position'))
    np.testing.assert_array_equal(plan.actions, ROWS[:, ::-1])


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({'names': ('a', 'c')}, 'missing: b; unknown: c'),
        ({'names': ('a', 'b', 'c'), 'rows': np.zeros((2, 3))}, 'missing: none; unknown: c'),
        ({'kinds': ('position', 'position')}, "'b'"),
        ({'step_time_s': 0.05}, 'rows are 0.05 s apart, but a step of the policy is 0.1 s'),
    ],
)
def test_plan_of_another_robot_or_policy_is_refused(changes, reason):
    with pytest.raises(AlignmentError, match=reason):
        align(a_plan(**changes))


def test_single_row_does_not_tell_its_step_time_and_needs_not():
    assert len(align(a_plan(ROWS[:1], certain=1, step_time_s=None)).actions) == 1


@pytest.mark.parametrize(
    ('offset_ms', 'step'), [(0, 20), (99, 20), (100, 21), (-1, 19), (-100, 19), (-101, 18)]
)
def test_row_0_stands_at_the_step_that_its_plan_row_has(offset_ms, step):
    plan = a_plan(step=20)
    stamp_ns = 10 * S + offset_ms * MS
    assert step_of_row_0(plan, stamp_ns=stamp_ns, step_time_s=0.1) == step
    aligned = align(plan, offset_ms)
    np.testing.assert_array_equal(
        aligned.actions[20 - step if step < 20 else 0], plan.rows[max(0, step - 20)]
    )
    assert step_of_row_0(a_plan(), stamp_ns=stamp_ns, step_time_s=0.1) is None
