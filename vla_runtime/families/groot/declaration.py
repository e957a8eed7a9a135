"""GR00T N1.5 and N1.7 (arXiv 2503.14734): a language model's features and a DiT."""

from __future__ import annotations

from vla_runtime.families.groot import n17_dimensions as n17
from vla_runtime.families.groot.dimensions import DENOISE_STEPS, GROOT_N15, LIMITS, GrootDims
from vla_runtime.families.groot.performance_figures import N15_FIGURES, N17_FIGURES
from vla_runtime.families.groot.time_table import GrootTimeTable
from vla_runtime.family.declaration import Family, prompt_inputs, state_input
from vla_runtime.processing.prompt_layout import PromptLayout

_CHAT = ('<|im_start|>', '<|im_end|>')
# Eagle's chat template with a user's images and task, as its processor writes it.
N15_PROMPT = PromptLayout(
    '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
    '<|im_start|>user\n{images}{task}<|im_end|>\n'
    '<|im_start|>assistant\n',
    image='<image {number}><img>{tokens}</img>',
    bos=False,
    special=(*_CHAT, '<img>', '</img>'),
)
# Qwen3-VL's chat template with a user's images and task.
N17_PROMPT = PromptLayout(
    '<|im_start|>user\n{images}{task}<|im_end|>\n',
    image='<|vision_start|>{tokens}<|vision_end|>',
    bos=False,
    special=(*_CHAT, '<|vision_start|>', '<|vision_end|>'),
)

FAMILIES = (
    Family(
        name='groot_n15',
        title='GR00T N1.5 (arXiv 2503.14734, NVIDIA Isaac-GR00T)',
        head='flow',
        dims=GrootDims,
        presets={'groot_n15': GROOT_N15},
        limits=LIMITS,
        templates={'chat': N15_PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=state_input,
        time_table=GrootTimeTable,
        flow_steps=DENOISE_STEPS,
        figures={'groot_n15': N15_FIGURES},
    ),
    Family(
        name='groot_n17',
        title='GR00T N1.7 (arXiv 2503.14734, NVIDIA Isaac-GR00T)',
        head='flow',
        dims=n17.GrootN17Dims,
        presets={'groot_n17': n17.GROOT_N17},
        limits=n17.LIMITS,
        templates={'chat': N17_PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=state_input,
        time_table=GrootTimeTable,
        flow_steps=DENOISE_STEPS,
        figures={'groot_n17': N17_FIGURES},
    ),
)
