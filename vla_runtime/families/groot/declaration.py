"""GR00T N1.5, N1.6 and N1.7 (arXiv 2503.14734): a language model's features and a DiT."""

from __future__ import annotations

from collections.abc import Mapping

from vla_runtime.families.groot import n16_dimensions as n16
from vla_runtime.families.groot.dimensions import (
    ALTERNATING_LIMITS,
    DENOISE_STEPS,
    GROOT_N15,
    LIMITS,
    GrootDims,
    HeadDims,
)
from vla_runtime.families.groot.n17_dimensions import GROOT_N17, GrootN17Dims
from vla_runtime.families.groot.time_table import GrootTimeTable
from vla_runtime.family.declaration import Family, prompt_inputs, state_input
from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs
from vla_runtime.processing.prompts import PromptLayout

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
# Eagle's chat template with a user's task and images, as its processor writes it for N1.6.
N16_PROMPT = PromptLayout(
    '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
    '<|im_start|>user\n{task}{images}<|im_end|>\n',
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

_N15_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (409.57, 129.22),
            'orin-nano': (1182.67, 299.38),
            'rtx-3060': (203.73, 51.09),
            'rtx-5090': (29.4, 5.9),
        }
    )
)
_N17_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (367.43, 145.29),
            'rtx-3060': (139.89, 44.63),
            'rtx-5090': (33.4, 6.2),
        }
    )
)


def _version(
    number: str,
    dims: type,
    published: HeadDims,
    limits: Mapping[str, int],
    prompt: PromptLayout,
    figures: PerformanceFigures | None,
) -> Family:
    """Declare one version; what differs are its sizes, its prompt and its figures."""
    name = f'groot_n{number.replace(".", "")}'
    return Family(
        name=name,
        title=f'GR00T N{number} (arXiv 2503.14734, NVIDIA Isaac-GR00T)',
        head='flow',
        dims=dims,
        presets={name: published},
        limits=limits,
        templates={'chat': prompt},
        prefix_inputs=prompt_inputs,
        head_inputs=state_input,
        time_table=GrootTimeTable,
        freezes_actions=number != '1.5',
        flow_steps=DENOISE_STEPS,
        figures={} if figures is None else {name: figures},
    )


FAMILIES = (
    _version('1.5', GrootDims, GROOT_N15, LIMITS, N15_PROMPT, _N15_FIGURES),
    _version('1.6', n16.GrootN16Dims, n16.GROOT_N16, n16.LIMITS, N16_PROMPT, None),
    _version('1.7', GrootN17Dims, GROOT_N17, ALTERNATING_LIMITS, N17_PROMPT, _N17_FIGURES),
)
