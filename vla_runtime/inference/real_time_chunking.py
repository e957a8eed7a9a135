"""Real-time chunking (arXiv 2506.07339): tie a new chunk to the plan that is being executed.

With an identity Jacobian, as LeRobot computes it, the correction is elementwise and lives inside
the expert step: `v' = v - w * (plan - (x - t v))`. This file gives w per denoise step and action.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

PlanSchedule = Literal['linear', 'exp']


def prefix_weights(
    schedule: PlanSchedule, delay: int, execution_horizon: int, horizon: int
) -> np.ndarray:
    """How firmly each action is tied to the plan (paper, equation 5).

    Args:
        schedule: decay after the delay; `exp` is the paper's, `linear` LeRobot's default.
        delay: first actions that will be executed before the chunk can take over: weight 1.
        execution_horizon: actions from here on are free: weight 0 (H - s in the paper).
        horizon: H.

    Returns:
        (H,) float64

    Raises:
        ValueError: negative numbers, or an execution horizon beyond H.
    """
    if not 0 <= execution_horizon <= horizon:
        raise ValueError(f'execution_horizon is {execution_horizon}; it must be 0 to H = {horizon}')
    if delay < 0:
        raise ValueError(f'delay is {delay} steps; it must not be negative')
    delay = min(delay, execution_horizon)
    weights = np.zeros(horizon)
    weights[:delay] = 1.0
    i = np.arange(delay, execution_horizon)
    c = (execution_horizon - i) / (execution_horizon - delay + 1)
    weights[delay:execution_horizon] = (
        c if schedule == 'linear' else c * np.expm1(c) / math.expm1(1.0)
    )
    return weights


def guidance_weights(times: np.ndarray, maximum: float) -> np.ndarray:
    """Strength of the tie at each flow time (paper, equation 2 with tau = 1 - t).

    Args:
        times: (N,) flow times from 1 towards 0.
        maximum: upper bound, reached at the first step.

    Returns:
        (N,) float64, min(maximum, (1 - tau) / (tau r^2)), r^2 = (1-tau)^2 / (tau^2 + (1-tau)^2)
    """
    tau = 1.0 - np.asarray(times, dtype=np.float64)
    with np.errstate(divide='ignore'):
        weight = (tau**2 + (1.0 - tau) ** 2) / (tau * (1.0 - tau))
    return np.minimum(weight, maximum)


def plan_weights(
    times: np.ndarray,
    *,
    schedule: PlanSchedule,
    delay: int,
    execution_horizon: int,
    horizon: int,
    maximum: float,
) -> np.ndarray:
    """Weight of the plan per denoise step and action, (N, H) float32."""
    per_action = prefix_weights(schedule, delay, execution_horizon, horizon)
    return np.outer(guidance_weights(times, maximum), per_action).astype(np.float32)
