"""Multi-Task DiT of LeRobot: CLIP's images and prompt, and a transformer that denoises actions.

One family was trained to take noise away, the other on a flow.
"""

from __future__ import annotations

from vla_runtime.families.multi_task_dit.dimensions import (
    LIMITS,
    OF_SCHEDULER,
    USUAL,
    USUAL_FLOW,
    DitDims,
    MultiTaskDitDims,
    MultiTaskDitFlowDims,
)
from vla_runtime.families.multi_task_dit.time_table import FlowTimes, TransformerTimes
from vla_runtime.family.declaration import (
    Family,
    RowInput,
    no_inputs,
    prompt_inputs,
    states_input,
)
from vla_runtime.processing.prompt_layout import PromptLayout


def _prefix_inputs(dims: DitDims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | states_input(dims)


_TEMPLATES = {'clip': PromptLayout('{task}', closing='<|endoftext|>')}

FAMILIES = (
    Family(
        name='multi_task_dit',
        title='Multi-Task DiT (LeRobot)',
        head='diffusion',
        dims=MultiTaskDitDims,
        presets={'multi_task_dit': USUAL},
        limits={**LIMITS, **OF_SCHEDULER},
        templates=_TEMPLATES,
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=TransformerTimes,
        flow_steps=100,
    ),
    Family(
        name='multi_task_dit_flow',
        title='Multi-Task DiT, flow matching (LeRobot)',
        head='flow',
        dims=MultiTaskDitFlowDims,
        presets={'multi_task_dit_flow': USUAL_FLOW},
        limits=LIMITS,
        templates=_TEMPLATES,
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=FlowTimes,
        flow_steps=100,
    ),
)
