"""The flow's update: guidance mix of the rows' velocities, plan term and Euler step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# As `plan_term`.
PlanTerm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def plan_term(x: Tensor, t: Tensor, mixed: Tensor, plan: Tensor, plan_weight: Tensor) -> Tensor:
    """Return the plan term (Q, H, A) of the mixed velocity, with the identity as Jacobian."""
    return plan_weight * (plan - (x - t * mixed))


def mix_rows(velocity: Tensor, row_weight: Tensor) -> Tensor:
    """Weigh and add the rows of each request.

    Velocities (R, H, A) with weights (R,) to (1, H, A); (Q * R, H, A) with (Q, R) to (Q, H, A).
    """
    if row_weight.ndim == 1:
        return (row_weight[:, None, None] * velocity).sum(dim=0, keepdim=True)
    by_request = velocity.view(*row_weight.shape, *velocity.shape[1:])
    return (row_weight[:, :, None, None] * by_request).sum(dim=1)


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
    """Move x (Q, H, A), one a request, one step along the flow, in its own dtype.

    Args:
        velocity: (Q * R, H, A), request by request.
        t, dt: (), flow time and step (negative).
        row_weight: (R,) or (Q, R), as of `inference.settings.row_weights`.
        plan: (Q, H, A); plan_weight: (Q, H, 1), zero without a plan.
        term: plan term of the mixed velocity, which is taken off.
    """
    mixed = mix_rows(velocity, row_weight)
    mixed = mixed - term(x, t, mixed, plan, plan_weight)
    return x + dt * mixed
