"""Multi-Task DiT of LeRobot: CLIP's images and prompt, and a transformer that denoises actions."""

from __future__ import annotations

from vla_runtime.families.multi_task_dit.dimensions import LIMITS, USUAL, MultiTaskDitDims
from vla_runtime.families.multi_task_dit.time_table import TransformerTimes
from vla_runtime.family.declaration import (
    Family,
    RowInput,
    no_inputs,
    prompt_inputs,
    states_input,
)
from vla_runtime.processing.prompt_layout import PromptLayout


def _prefix_inputs(dims: MultiTaskDitDims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | states_input(dims)


FAMILIES = (
    Family(
        name='multi_task_dit',
        title='Multi-Task DiT (LeRobot)',
        head='diffusion',
        dims=MultiTaskDitDims,
        presets={'multi_task_dit': USUAL},
        limits=LIMITS,
        templates={'clip': PromptLayout('{task}', closing='<|endoftext|>')},
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=TransformerTimes,
        flow_steps=100,
    ),
)
