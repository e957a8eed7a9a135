"""An untrained policy for the simulated tabletop robot: it moves, slowly, and knows nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from written_bundle import write_bundle

from vla_runtime.bundle.schema import ActionSpec, CameraSpec, StateSpec
from vla_tabletop.sim.scene import CAMERAS
from vla_tabletop.sim.world import JOINT_NAMES

HORIZON = 16
STEP_TIME_S = 0.05


def write_tabletop_policy(
    target: Path, *, seed: int = 0, reach_rad: float = 0.02, velocities: bool = False
) -> Path:
    """Write a bundle whose chunks wander `reach_rad` around the measured position.

    It has advantage tags, so that guidance can be tried, and takes milliseconds. With `velocities`
    its actions are joint velocities, in rad/s.
    """
    # Seconds of processor time, which a process that only wants the sizes above is spared.
    import torch
    from tiny_policy import TOKENIZER, tiny_spec

    from vla_runtime.models.base.flow_network import build_network

    spec = tiny_spec('pi05', advantage='before_action')
    spec = replace(
        spec,
        name='untrained tabletop',
        dims=replace(spec.dims, cameras=len(CAMERAS), horizon=HORIZON, prompt_length=96),
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        state=tuple(StateSpec(name, 'rad') for name in JOINT_NAMES),
        actions=tuple(_action(name, velocities) for name in JOINT_NAMES),
        step_time_s=STEP_TIME_S,
    )
    generator = torch.Generator().manual_seed(seed)
    network = build_network(spec.family, spec.dims)
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.1).numpy()
        for name, value in network.state_dict().items()
    }
    count = len(JOINT_NAMES)
    mean = np.zeros(count)
    mean[JOINT_NAMES.index('gripper')] = 0.3
    statistics = {
        'state.q01': np.full(count, -2.0),
        'state.q99': np.full(count, 2.0),
        'actions.mean': mean,
        'actions.std': np.full(count, reach_rad),
    }
    write_bundle(target, spec, weights=weights, statistics=statistics, tokenizer=TOKENIZER)
    return target


def _action(name: str, velocities: bool) -> ActionSpec:
    if velocities:
        return ActionSpec(name, 'rad/s', 'velocity')
    if name == 'gripper':
        return ActionSpec(name, 'rad', 'absolute')
    return ActionSpec(name, 'rad', 'delta', relative_to=name)
