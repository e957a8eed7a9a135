"""Times of the denoise steps, and how each step moves the actions."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from vla_runtime.family.declaration import PolicyDims, TimeTable, scheduler_of, stages
from vla_runtime.family.noise_schedule import Scheduler

# `bundle`: the scheduler that the policy was trained with.
SchedulerChoice = Literal['bundle', 'ddpm', 'ddim']


class StepSchedule(NamedTuple):
    """Arguments of `PolicyEngine.set_schedule`.

    Attributes:
        times: (N,) float64 flow times, or those of a `diffusion` head's scheduler.
        dt: Euler step of a flow, negative.
        updates: (N, UPDATE_WIDTH) float32 of a `diffusion` head.
    """

    times: np.ndarray
    dt: float
    updates: np.ndarray | None = None


def stage_times(dims: PolicyDims, times: np.ndarray, dt: float) -> np.ndarray:
    """Return the times that the head sees in steps from these times (N,), (N, S)."""
    return np.asarray(times)[:, None] + np.multiply(stages(dims), dt)


def step_rows(table: TimeTable, dims: PolicyDims, times: np.ndarray, dt: float) -> np.ndarray:
    """Return the rows that the head takes, (N, S * C) float32, S times of a step side by side."""
    return table(stage_times(dims, times, dt).reshape(-1)).reshape(len(times), -1)


def chosen_scheduler(dims: PolicyDims, choice: SchedulerChoice = 'bundle') -> Scheduler:
    """Return the scheduler of a `diffusion` head, of the chosen kind.

    Raises:
        ValueError: a kind that the noise of the training does not go with.
    """
    scheduler = scheduler_of(dims)
    return scheduler if choice == 'bundle' else scheduler.of_kind(choice)


def scheduler_steps(
    dims: PolicyDims, steps: int, choice: SchedulerChoice = 'bundle'
) -> StepSchedule:
    """Return the schedule of so many steps of a `diffusion` head.

    Raises:
        ValueError: more steps than the training had, or a kind that does not go with its noise.
    """
    chosen = chosen_scheduler(dims, choice)
    return StepSchedule(chosen.timesteps(steps).astype(np.float64), -1.0, chosen.updates(steps))
