"""Real-time chunking (arXiv 2506.07339): condition a chunk on the plan that is being executed.

Three modes through the plan term of the expert step, `v' = v - w * (plan - (x - t v))`:
- `guided`: w falls off over the overlap and is bounded. The correction is elementwise: the
  paper's with an identity Jacobian, as in LeRobot;
- `jacobian`: the same w, and the engine multiplies the correction by the Jacobian of the denoised
  chunk, as in the paper;
- `hard_prefix`: the first actions follow the plan at every step and equal it in the end.
This module computes w per denoise step and action; `clamp_weights` does so for `hard_prefix`.

A fourth is that of families whose training code has a way of its own: under `frozen` the plan's
actions stand where noise would, those of the delay do not move, and the ones behind them move the
less, the nearer they are (`moving_shares`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

PlanSchedule = Literal['linear', 'exp']
RtcMode = Literal['off', 'guided', 'jacobian', 'hard_prefix', 'frozen']

# Actions that a mode conditions by default; other modes condition the whole plan. With a weight of
# 0.2 to 0.4 a chunk of `guided` ends 60 to 75% of the way to the plan: a long overlap repeats what
# was seen long ago. LeRobot takes 10 actions too.
USUAL_HORIZONS: Mapping[RtcMode, int] = {'guided': 10}
# How fast actions behind the frozen ones are let go; the default of that code.
_RAMP_RATE = 6.0


def prefix_weights(
    schedule: PlanSchedule, delay: int, execution_horizon: int, horizon: int
) -> np.ndarray:
    """Weight of the plan for each action, (H,) float64 (paper, equation 5).

    Args:
        schedule: decay after the delay; `exp` is the paper's, `linear` LeRobot's default.
        delay: first actions that will be executed before the chunk can take over: weight 1.
        execution_horizon: actions from here on are free: weight 0 (H - s in the paper).
        horizon: H.

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
    """Guidance weight at each flow time (paper, equation 2 with tau = 1 - t).

    Args:
        times: (N,) flow times from 1 towards 0.
        maximum: upper bound, reached at the first step.

    Returns:
        (N,) float64, min(maximum, (1 - tau) / (tau r^2)), r^2 = (1-tau)^2 / (tau^2 + (1-tau)^2).
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


def scheduler_plan_weights(
    steps: int,
    *,
    schedule: PlanSchedule,
    delay: int,
    execution_horizon: int,
    horizon: int,
    maximum: float,
) -> np.ndarray:
    """Weight of the plan per step of a scheduler and action, (N, H) float32.

    It is the plan's share of the clean actions (`family.noise_schedule`), the same at every step.
    """
    share = prefix_weights(schedule, delay, execution_horizon, horizon) * min(maximum, 1.0)
    return np.tile(share, (steps, 1)).astype(np.float32)


def clamp_weights(times: np.ndarray, steps: int, horizon: int) -> np.ndarray:
    """Plan weights that hold the first actions on the straight path from their noise to the plan.

    With w = 1/t the plan term is `v' = (x - plan) / t`, whatever the network returns. An action at
    `t * noise + (1 - t) * plan` stays on that path (the inpainting of RePaint, arXiv 2201.09865,
    for a flow). An action at the plan stays at the plan.

    Args:
        times: (N,) flow times from 1 towards 0, all above 0.
        steps: first actions that are clamped, 0 to H.
        horizon: H.

    Returns:
        (N, H) float32.
    """
    weights = np.zeros((len(times), horizon))
    weights[:, :steps] = 1.0 / times[:, None]
    return weights.astype(np.float32)


def moving_shares(frozen: int, overlap: int, horizon: int) -> np.ndarray:
    """Share of its velocity that each action moves by under `frozen`, (H, 1) float32.

    Args:
        frozen: first actions that stay where they are: share 0.
        overlap: first actions that begin at the plan, `frozen` or more; behind them the share is 1.
        horizon: H.
    """
    shares = np.ones((horizon, 1))
    shares[:frozen] = 0.0
    ramp = -np.expm1(-_RAMP_RATE * np.linspace(0.0, 1.0, overlap - frozen + 2))
    shares[frozen:overlap, 0] = (ramp / ramp[-1])[1:-1]
    return shares.astype(np.float32)
