"""The denoise loop: steps from noise to a chunk, on any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vla_runtime.engines.protocol import PolicyEngine, PrefixSlot, StepInputs
from vla_runtime.engines.recorded_cases import Case
from vla_runtime.family.declaration import Family, PolicyDims
from vla_runtime.family.noise_schedule import advance
from vla_runtime.family.step_schedule import SchedulerChoice, StepSchedule, scheduler_steps
from vla_runtime.types import FlowTimes

StepObserver = Callable[[int, np.ndarray, np.ndarray], None]


def flow_times(steps: int, kind: FlowTimes | None = None) -> np.ndarray:
    """Flow times of the Euler steps: 1, 1 - 1/N, ... 1/N as (N,) float64.

    `summed` adds step upon step in float32, whose roundings the flow's time code magnifies.
    """
    if kind == 'summed':
        step = np.float32(-1.0 / steps)
        terms = np.array([1.0, *[step] * (steps - 1)], dtype=np.float32)
        # Adds one by one: each sum is rounded.
        return np.cumsum(terms, dtype=np.float32).astype(np.float64)
    return 1.0 + np.arange(steps) * (-1.0 / steps)


def usual_schedule(
    family: Family,
    dims: PolicyDims,
    steps: int,
    kind: FlowTimes | None = None,
    scheduler: SchedulerChoice = 'bundle',
) -> StepSchedule:
    """Return the schedule of N steps of a family's policy.

    More steps than a `diffusion` head was trained with are a ValueError.
    """
    if family.has_scheduler:
        return scheduler_steps(dims, steps, scheduler)
    return StepSchedule(flow_times(steps, kind), -1.0 / steps)


def case_schedule(case: Case, dims: PolicyDims) -> StepSchedule:
    """Return the schedule of a case; a `diffusion` head's has the noise of its steps."""
    steps = len(case.plan_weight)
    if case.step_noise.size:
        return scheduler_steps(dims, steps)
    return StepSchedule(flow_times(steps), -1.0 / steps)


def denoise(
    engine: PolicyEngine, inputs: StepInputs, on_step: StepObserver | None = None
) -> np.ndarray:
    """Denoise one chunk over the prefix that the engine holds.

    Args:
        engine: with its schedule set and its prefix encoded.
        on_step: called after each step with (index, x (H, A), velocity (R, H, A)). With it the
            engine runs step by step, without it all steps in one call (one graph launch on CUDA).

    Returns:
        (H, A) float32 chunk in normalised action space
    """
    engine.load_step_inputs(inputs)
    if on_step is None:
        engine.run_steps()
    else:
        for index in range(len(inputs.plan_weight)):
            engine.step(index)
            on_step(index, engine.read_x(), engine.read_velocity())
    return engine.read_x()


def denoise_by_step(
    engine: PolicyEngine,
    inputs: StepInputs,
    schedule: StepSchedule,
    places: Sequence[PrefixSlot],
    on_step: StepObserver | None = None,
    share: np.ndarray | None = None,
) -> np.ndarray:
    """Denoise one chunk step by step, each update made here, in float32, as the expert step does.

    For guidance on an engine with one prompt row, whose rows run one after the other from the same
    x, and for actions that move by a share of their velocity.

    Args:
        engine: with the schedule set and all R rows encoded.
        inputs: as of `denoise`, with R rows; no Jacobian. Over several slots the head inputs of all
            rows are equal.
        places: one slot of R rows, or R of one row in the order of `inputs.row_weight`.
        share: (H, 1) share of its velocity that each action moves by; None: the whole.

    `on_step` and the result are as for `denoise`.
    """
    count = places[0][0]
    alone = replace(
        inputs,
        row_weight=np.full(count, 1 / count, dtype=np.float32),
        plan_weight=np.zeros_like(inputs.plan_weight),
        rows={name: array[:count] for name, array in inputs.rows.items()},
    )
    engine.use_prefix(*places[0])
    engine.load_step_inputs(alone)
    x = inputs.x
    for index in range(len(schedule.times)):
        rows = []
        for place in places:
            engine.use_prefix(*place)
            engine.write_x(x)
            engine.step(index)
            rows.append(engine.read_velocity())
        velocity = np.concatenate(rows)
        x = _moved(x, velocity, inputs, schedule, index, share)
        if on_step is not None:
            on_step(index, x.copy(), velocity)
    return x


def _moved(
    x: np.ndarray,
    velocity: np.ndarray,
    inputs: StepInputs,
    schedule: StepSchedule,
    index: int,
    share: np.ndarray | None,
) -> np.ndarray:
    """Return x after a step with the predictions (R, H, A) of all rows, in float32."""
    mixed = np.tensordot(inputs.row_weight, velocity, axes=1)
    tie = inputs.plan_weight[index][:, None]
    if schedule.updates is not None:
        assert inputs.step_noise is not None
        noise = inputs.step_noise[index]
        return advance(x, mixed, schedule.updates[index], noise, inputs.plan, tie)
    t, dt = np.float32(schedule.times[index]), np.float32(schedule.dt)
    tied = mixed - tie * (inputs.plan - (x - t * mixed))
    moved: np.ndarray = x + dt * (tied if share is None else share * tied)
    return moved
