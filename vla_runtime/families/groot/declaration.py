"""GR00T N1.5, N1.6 and N1.7 (arXiv 2503.14734): a language model's features and a DiT."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vla_runtime.families.blocks.flow_time import layer_rows, linear_rows, silu
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
from vla_runtime.family.declaration import Family, prompt_inputs, state_input
from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptLayout

# --- Flow times of GR00T: buckets, their codes, and the rows of the time table in numpy


BUCKETS = 1000
# A flow time in whole 2^-24: every float32 from 0.5 to 1 is a whole number of them.
UNIT = 2**24
# Half a unit of rounding in t, half in `bucket` itself, times the buckets; 6e-5 of a bucket.
SLACK = BUCKETS
# Numbers of the DiT's code of a bucket, and the ratio of its largest to its smallest period.
DIT_CODE, PERIODS = 256, 10000.0


def bucket(times: np.ndarray) -> np.ndarray:
    """Buckets (N,) int64 of flow times (N,), from 1 (noise) to 0 (actions).

    floor(1000 k / N) of 1 - k / N in float32, for every N up to 8000; 1000 at t = 0.
    """
    passed = UNIT - np.rint(np.asarray(times, np.float64) * UNIT).astype(np.int64)
    return (passed * BUCKETS + SLACK) // UNIT


def frequencies(half: int, divisor: int) -> np.ndarray:
    """Frequencies of a sine code, (half,) float32: 10000^(-i / divisor)."""
    exponent = np.arange(half, dtype=np.float32) * np.float32(-math.log(PERIODS))
    return np.exp(exponent / np.float32(divisor))


def dit_code(buckets: np.ndarray) -> np.ndarray:
    """Code of buckets for the DiT, (N,) to (N, 256) float32: cosines, then sines."""
    half = DIT_CODE // 2
    angle = buckets.astype(np.float32)[:, None] * frequencies(half, half - 1)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def action_code(buckets: np.ndarray, width: int) -> np.ndarray:
    """Code of buckets for the action encoder, (N,) to (N, width) float32: sines, then cosines."""
    half = width // 2
    angle = buckets.astype(np.float32)[:, None] * frequencies(half, half)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


class GrootTimeTable:
    """Rows of `GrootHead.time_conditioning`: the action encoder's share, then all modulations."""

    def __init__(self, dims: HeadDims, weights: SafetensorsReader) -> None:
        self._dims, self._weights = dims, weights
        self._modulations = [f'dit.{block}.modulation' for block in range(dims.dit.depth)]
        self._modulations.append('out_modulation')

    @property
    def width(self) -> int:
        return self._dims.dit_width * (1 + 2 * len(self._modulations))

    def __call__(self, times: np.ndarray) -> np.ndarray:
        buckets, width = bucket(times), self._dims.dit_width
        mix = self._weights.read('action_encoder.mix.weight')[width:]
        share = linear_rows(
            action_code(buckets, width), mix.T, self._weights.read('action_encoder.mix.bias')
        )
        embedded = silu(layer_rows(dit_code(buckets), self._weights, 'time_in'))
        embedded = silu(layer_rows(embedded, self._weights, 'time_out'))
        rows = [layer_rows(embedded, self._weights, name) for name in self._modulations]
        return np.concatenate([share, *rows], axis=1)


# --------------------------------------------------------------------------------------------------

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
