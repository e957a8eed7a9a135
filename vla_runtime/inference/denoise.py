"""The denoise loop: Euler steps from noise to a chunk, on any engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_runtime.engines.engine import PolicyEngine, StepInputs

StepObserver = Callable[[int, np.ndarray, np.ndarray], None]


def flow_times(steps: int) -> np.ndarray:
    """Flow times of the Euler steps: 1, 1 - 1/N, ... 1/N as (N,) float64."""
    return 1.0 + np.arange(steps) * (-1.0 / steps)


def denoise(
    engine: PolicyEngine, inputs: StepInputs, on_step: StepObserver | None = None
) -> np.ndarray:
    """Denoise one chunk over the prefix that the engine holds.

    Args:
        engine: with its schedule set and its prefix encoded.
        inputs: noise, row weights, plan and state.
        on_step: called after each step with (index, x (H, A), velocity (R, H, A)); recording runs
            step by step, otherwise all steps are one call (one graph launch on CUDA).

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
