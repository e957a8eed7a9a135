"""OpenVLA (arXiv 2406.09246): Llama 2 7B and two vision towers, 7.5 billion parameters."""

from __future__ import annotations

from vla_runtime.families.openvla.dimensions import LIMITS, OPENVLA, OpenVlaDims
from vla_runtime.family.declaration import Family, NoTimes, no_inputs, prompt_inputs
from vla_runtime.processing.action_bins import ActionBins
from vla_runtime.processing.prompt_layout import PromptLayout

# The space behind `Out:` that Llama's tokenizer leaves out, and the policy was trained with.
PROMPT = PromptLayout(
    'In: What action should the robot take to {task}?\nOut:', closing='\N{LOWER ONE EIGHTH BLOCK}'
)

FAMILIES = (
    Family(
        name='openvla',
        title='OpenVLA (arXiv 2406.09246)',
        head='tokens',
        dims=OpenVlaDims,
        presets={'openvla': OPENVLA},
        limits=LIMITS,
        templates={'openvla': PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=no_inputs,
        time_table=NoTimes,
        answer_decoder=lambda dims, *files: ActionBins(dims.used_vocabulary, dims.action_bins),
    ),
)
