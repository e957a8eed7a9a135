"""OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv 2502.19645): Llama 2 7B, two vision towers."""

from __future__ import annotations

from vla_runtime.families.openvla.action_bins import ActionBins
from vla_runtime.families.openvla.dimensions import (
    LIMITS,
    OFT_LIMITS,
    OPENVLA,
    OPENVLA_OFT,
    OpenVlaDims,
    OpenVlaOftDims,
)
from vla_runtime.family.declaration import (
    Family,
    NoTimes,
    RowInput,
    no_inputs,
    prompt_inputs,
    state_input,
)
from vla_runtime.processing.prompt_layout import PromptLayout

# The space behind `Out:` that Llama's tokenizer leaves out, and the policy was trained with.
PROMPT = PromptLayout(
    'In: What action should the robot take to {task}?\nOut:', closing='\N{LOWER ONE EIGHTH BLOCK}'
)


def _prompt_and_state(dims: OpenVlaOftDims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | state_input(dims)


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
    Family(
        name='openvla_oft',
        title='OpenVLA-OFT (arXiv 2502.19645)',
        head='single',
        dims=OpenVlaOftDims,
        presets={'openvla_oft': OPENVLA_OFT},
        limits=OFT_LIMITS,
        templates={'openvla': PROMPT},
        prefix_inputs=_prompt_and_state,
        head_inputs=no_inputs,
        time_table=NoTimes,
    ),
)
