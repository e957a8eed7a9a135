"""The executor's committed plan, seen from an observation's time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_runtime.types import CommittedPlan, PlanRequest, same_step_time


class AlignmentError(ValueError):
    """A plan that is not for this policy; the message names what differs."""


def align_plan(
    plan: PlanRequest,
    *,
    stamp_ns: int,
    names: Sequence[str],
    kinds: Sequence[str],
    step_time_s: float,
    horizon: int,
) -> CommittedPlan | None:
    """Cut and order a plan so that row 0 is the step that was current at the observation.

    Steps already over at that time are dropped. A plan that begins later is continued backwards
    by its first row, because the executor keeps no setpoints older than that. Row i of the answer
    then stands where row i of the new chunk will.

    Args:
        plan: plan as it was received.
        stamp_ns: ROS time of the observation.
        names: the policy's action names, in order.
        kinds: kind of each action, `position` or `velocity`.
        step_time_s: seconds between two actions of the policy.
        horizon: rows of a chunk; the plan is cut to it.

    Returns:
        the plan, or None when nothing of it is left at the observation's time

    Raises:
        AlignmentError: other names, kinds or step time than the policy's.
    """
    if not len(plan.rows):
        return None
    order = _column_order(plan, names, kinds)
    if plan.step_time_s is not None and not same_step_time(plan.step_time_s, step_time_s):
        raise AlignmentError(
            f'committed_plan: rows are {plan.step_time_s:g} s apart, but a step of the policy is '
            f'{step_time_s:g} s'
        )
    over = _steps_over(plan, stamp_ns, step_time_s)
    rows = plan.rows[max(0, over) :, order]
    missing_rows = max(0, -over)
    # Nothing of the plan falls within the chunk.
    if not len(rows) or missing_rows >= horizon:
        return None
    rows = np.concatenate([np.repeat(rows[:1], missing_rows, axis=0), rows])[:horizon]
    return CommittedPlan(
        actions=rows,
        delay_steps=min(max(0, plan.certain - over), len(rows)),
        execution_horizon=len(rows),
    )


def _column_order(plan: PlanRequest, names: Sequence[str], kinds: Sequence[str]) -> list[int]:
    """Return the plan's column of each action; refuse other names or kinds (AlignmentError)."""
    if set(plan.names) != set(names) or len(plan.names) != len(names):
        missing = ', '.join(name for name in names if name not in plan.names) or 'none'
        unknown = ', '.join(name for name in plan.names if name not in names) or 'none'
        raise AlignmentError(
            f"committed_plan: joint_names are not the policy's actions (missing: {missing}; "
            f'unknown: {unknown}); give executor and policy the same robot file and bundle'
        )
    order = [plan.names.index(name) for name in names]
    for name, kind, column in zip(names, kinds, order, strict=True):
        if plan.kinds[column] != kind:
            raise AlignmentError(
                f"committed_plan: '{name}' is given as {plan.kinds[column]}, but the policy "
                f'commands it as {kind}'
            )
    return order


def step_of_row_0(plan: PlanRequest, *, stamp_ns: int, step_time_s: float) -> int | None:
    """The plan step at which row 0 of a chunk stands that was aligned by `align_plan`.

    Args:
        plan: plan as it was received.
        stamp_ns: ROS time of the observation.
        step_time_s: seconds between two actions of the policy.

    Returns:
        number of the step; before the plan's first where the plan was continued backwards, None
        where the plan does not say
    """
    if plan.step is None:
        return None
    return plan.step + _steps_over(plan, stamp_ns, step_time_s)


def _steps_over(plan: PlanRequest, stamp_ns: int, step_time_s: float) -> int:
    """Steps of the plan that were over at the observation; negative where it begins later."""
    return (stamp_ns - plan.stamp_ns) // round(step_time_s * 1e9)
