"""Diffusion Policy (arXiv 2303.04137): a U-Net denoises the actions, without language."""

from __future__ import annotations

from vla_runtime.families.diffusion.dimensions import LIMITS, PUSHT, DiffusionDims
from vla_runtime.families.diffusion.time_table import UNetTimes
from vla_runtime.family.declaration import Family, no_inputs, states_input

FAMILIES = (
    Family(
        name='diffusion',
        title='Diffusion Policy (arXiv 2303.04137)',
        head='diffusion',
        dims=DiffusionDims,
        presets={'diffusion': PUSHT},
        limits=LIMITS,
        templates={},
        prefix_inputs=states_input,
        head_inputs=no_inputs,
        time_table=UNetTimes,
        flow_steps=100,
    ),
)
