"""The flow's update: guidance mix of the rows' velocities, plan term and Euler step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# As `plan_term`.
PlanTerm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def plan_term(x: Tensor, t: Tensor, mixed: Tensor, plan: Tensor, plan_weight: Tensor) -> Tensor:
    """Return the plan term (N, H, A) of the mixed velocity, with the identity as Jacobian."""
    return plan_weight * (plan - (x - t * mixed))


def advance(
    x: Tensor,
    velocity: Tensor,
    t: Tensor,
    dt: Tensor,
    row_weight: Tensor,
    plan: Tensor,
    plan_weight: Tensor,
    *,
    term: PlanTerm = plan_term,
) -> Tensor:
    """Move x (N, H, A) one step along the flow, in its own dtype.

    Args:
        velocity: (R * N, H, A), row by row.
        t, dt: (), flow time and step (negative).
        row_weight: (R,), as of `guidance`: [1], or [beta, 1 - beta].
        plan: (1, H, A); plan_weight: (1, H, 1), zero without a plan.
        term: plan term of the mixed velocity, which is taken off.
    """
    if x.shape[0] == 1:
        mixed = (row_weight[:, None, None] * velocity).sum(dim=0, keepdim=True)
    else:
        by_row = velocity.view(row_weight.shape[0], *x.shape)
        mixed = (row_weight[:, None, None, None] * by_row).sum(dim=0)
    mixed = mixed - term(x, t, mixed, plan, plan_weight)
    return x + dt * mixed
