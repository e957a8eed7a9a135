"""BitVLA (arXiv 2506.07530): SigLIP and BitNet b1.58 2B in ternary weights."""

from __future__ import annotations

from vla_runtime.families.bitvla.dimensions import BITVLA, LIMITS, BitVlaDims
from vla_runtime.family.declaration import (
    Family,
    NoTimes,
    RowInput,
    no_inputs,
    prompt_inputs,
    state_input,
)
from vla_runtime.processing.prompt_layout import PromptLayout

_BEGIN, _END, _STATE = '<|begin_of_text|>', '<|eot_id|>', '<proprio_pad>'
# Token behind the places of the actions.
STOP = '<|end_of_text|>'
# The chat template that BitVLA's `convert_ckpt.py` writes into the tokenizer's settings.
PROMPT = PromptLayout(
    f'{_BEGIN}System: A chat between a curious human and an artificial intelligence assistant. The '
    "assistant gives helpful, detailed, and polite answers to the human's questions."
    f'{_END}User: {{images}}{_STATE}What action should the robot take to {{task}}?{_END}'
    'Assistant: ',
    image='{tokens}',
    bos=False,
    special=(_BEGIN, _END, _STATE, STOP),
)


def _prefix_inputs(dims: BitVlaDims) -> dict[str, RowInput]:
    return prompt_inputs(dims) | state_input(dims)


FAMILIES = (
    Family(
        name='bitvla',
        title='BitVLA (arXiv 2506.07530)',
        head='single',
        dims=BitVlaDims,
        presets={'bitvla': BITVLA},
        limits=LIMITS,
        templates={'bitvla': PROMPT},
        prefix_inputs=_prefix_inputs,
        head_inputs=no_inputs,
        time_table=NoTimes,
        rounds_activations=True,
    ),
)
