"""Evo-1 (arXiv 2511.04555): InternVL3 and a cross-attention head, 0.78 billion parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from vla_runtime.family.declaration import MOST_FLOW_STEPS, Family, no_inputs, prompt_and_state
from vla_runtime.family.dimensions import (
    DecoderDims,
    Part,
    ShuffledImages,
    VisionDims,
    check_language,
    check_places,
    check_positive,
    depth_of,
    size,
    squares_joined,
)
from vla_runtime.family.performance_figures import PerformanceFigures, vla_cpp_runs
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------
# The sizes of Evo-1: one dataclass, a preset for the published model. Pure numbers.


@dataclass(frozen=True)
class HeadDims:
    """The head: action tokens of the language model's width that attend to the context.

    `velocity_hidden` is of the layer pair that emits the whole chunk's velocity.
    """

    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    state_hidden: Annotated[int, size('state_encoder.fc1.bias', axes=1)]
    velocity_hidden: Annotated[int, size('velocity_head.fc1.bias', axes=1)]


@dataclass(frozen=True)
class Evo1Dims(ShuffledImages):
    """All that fixes the shapes of an Evo-1 policy.

    Attributes:
        pixel_shuffle: edge of the square of patches that becomes one image token.
        image_places: text tokens before each camera's image.
        prompt_length: tokens of the text, padded, those around the images among them.
        real_actions: action dimensions that are not padding; they come first.
        input_major: the projections of state, actions and velocity are stored (inputs, outputs), as
            checkpoints for several embodiments have them; else (outputs, inputs).
    """

    vision: VisionDims
    pixel_shuffle: Annotated[
        int, squares_joined('vision.projector.norm.weight', axes=1, tower='vision.')
    ]
    language: DecoderDims
    head: Annotated[HeadDims, Part('')]
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    image_places: tuple[int, ...]
    prompt_length: int
    horizon: Annotated[int, size('action_positions', axis=1, axes=3, stated='chunk_size')]
    action_dim: int
    real_actions: int
    state_dim: int
    rope_base: float = 1e6
    rms_epsilon: float = 1e-6
    input_major: bool = False

    def __post_init__(self) -> None:
        self.check_images()
        check_language(self.language)
        check_positive(self, 'rope_base', 'rms_epsilon')
        if self.language.width % self.head.num_heads:
            raise ValueError(
                f'head: num_heads {self.head.num_heads} does not divide the width '
                f'{self.language.width} (language.width)'
            )
        check_places(self.image_places, self.cameras, self.prompt_length)
        if not self.image_places[0]:
            raise ValueError(
                'image_places begins with 0; the prompt must begin with a token that is always seen'
            )
        if self.horizon < 2:
            raise ValueError(
                f'horizon {self.horizon}: a policy with one action a chunk has another head, which '
                'is not supported'
            )
        if not 0 < self.real_actions <= self.action_dim:
            raise ValueError(
                f'real_actions {self.real_actions} where 1 to {self.action_dim} (action_dim) is '
                'expected'
            )

    @property
    def language_length(self) -> int:
        """Tokens that the language model reads: image tokens of all cameras, and text."""
        return self.cameras * self.image_tokens + self.prompt_length

    @property
    def prefix_length(self) -> int:
        """P: all tokens of the language model, and the state token."""
        return self.language_length + 1


# InternVL3-1B's vision tower and the first 14 layers of its language model. Four text tokens and
# `<img>` before the first image, two more between two, 49 behind the last.
EVO1 = Evo1Dims(
    vision=VisionDims(
        width=1024, depth=24, num_heads=16, mlp_dim=4096, patch_size=14, image_size=448
    ),
    pixel_shuffle=2,
    language=DecoderDims(
        width=896, depth=14, mlp_dim=4864, num_heads=14, num_kv_heads=2, head_dim=64
    ),
    head=HeadDims(depth=8, num_heads=8, mlp_dim=3584, state_hidden=1024, velocity_hidden=1024),
    vocabulary=151674,
    cameras=3,
    image_places=(5, 12, 19),
    prompt_length=68,
    horizon=50,
    action_dim=24,
    real_actions=7,
    state_dim=24,
)


# --------------------------------------------------------------------------------------------------
# Rows of Evo-1's time table: the flow time as a whole number from 0 to 999.
# Step i of N takes row int(999 * (i / N)), in float64. The runtime's t = 1 - i / N is rounded to
# float32, which moves some products across a whole number, so i / N is recovered first.

ROWS = 1000
# Rounding a time to float32 moves it by 3e-8 at most; the fractions are 1e-4 apart.
TOLERANCE = 1e-7
TABLE = 'time_rows'


def time_rows(times: np.ndarray) -> np.ndarray:
    """Return the row, int64, of each flow time (N,), 1 (noise) to 0 (actions)."""
    passed = 1.0 - np.asarray(times, np.float32).astype(np.float64)
    steps = np.arange(1.0, MOST_FLOW_STEPS + 1.0)
    fractions = np.round(passed[:, None] * steps) / steps
    near = np.abs(fractions - passed[:, None]) <= TOLERANCE
    nearest = fractions[np.arange(len(passed)), near.argmax(axis=1)]
    exact = np.where(near.any(axis=1), nearest, passed)
    return np.clip((exact * (ROWS - 1)).astype(np.int64), 0, ROWS - 1)


class TimeRows:
    """The table's rows, from the bundle's weights."""

    def __init__(self, dims: Evo1Dims, weights: SafetensorsReader) -> None:
        self.width = dims.language.width
        self._weights = weights

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """(N,) flow times to rows (N, W) float32."""
        table = np.asarray(self._weights.read(TABLE), np.float32)
        return np.ascontiguousarray(table[0, time_rows(times)])


# --------------------------------------------------------------------------------------------------

# InternVL3's text around a user's images.
PROMPT = PromptLayout(
    '{images}{task}',
    image='Image-{number}: <img>{tokens}</img>\n',
    bos=False,
    special=('<img>', '</img>'),
    lerobot_task='stripped',
)


_EVO1_FIGURES = PerformanceFigures(
    runs=vla_cpp_runs(
        {
            'agx-orin': (996.05, 696.21),
            'orin-nano': (3551.56, 2667.63),
            'rtx-3060': (486.74, 348.75),
            'rtx-5090': (55.2, 17.8),
        }
    )
)

FAMILIES = (
    Family(
        name='evo1',
        title='Evo-1 (arXiv 2511.04555)',
        head='flow',
        dims=Evo1Dims,
        presets={'evo1': EVO1},
        templates={'after_images': PROMPT},
        prefix_inputs=prompt_and_state,
        head_inputs=no_inputs,
        time_table=TimeRows,
        noise='uniform',
        figures={'evo1': _EVO1_FIGURES},
    ),
)
