"""SmolVLA (arXiv 2506.01844): half of SmolVLM2 and an action expert that reads its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vla_runtime.family.declaration import Family, no_inputs, prompt_and_state
from vla_runtime.family.dimensions import (
    DecoderDims,
    Part,
    ShuffledImages,
    VisionDims,
    check_positive,
    check_stacks,
    size,
    squares_joined,
)
from vla_runtime.family.flow_time import ActionTimeTable
from vla_runtime.family.performance_figures import Kernels, PerformanceFigures, vla_cpp_runs
from vla_runtime.processing.prompts import PromptLayout

# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmolVlaDims(ShuffledImages):
    """All that fixes the shapes of a SmolVLA policy.

    The expert shares depth, heads and head_dim with the language model, whose keys and values it
    reads.

    Attributes:
        pixel_shuffle: edge of the square of patches that becomes one image token.
        self_attention_every: expert layers 0, n, 2n, … attend to the prefix and themselves, the
            others to the prefix alone; 0: all to the prefix alone.
    """

    vision: VisionDims
    pixel_shuffle: Annotated[int, squares_joined('vision.projector.weight', tower='vision.')]
    language: DecoderDims
    expert: Annotated[DecoderDims, Part('expert.', kv_heads_of='language')]
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: Annotated[int, size('action_in.weight', axis=1, stated='action dimensions')]
    state_dim: Annotated[int, size('state_projection.weight', axis=1, stated='state dimensions')]
    self_attention_every: int = 0
    rms_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        self.check_images()
        check_stacks(self.language, self.expert)
        check_positive(self, 'rms_epsilon')

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, prompt tokens, the state token."""
        return self.cameras * self.image_tokens + self.prompt_length + 1

    @property
    def self_layers(self) -> tuple[int, ...]:
        """Expert layers that attend to their own tokens too."""
        every = self.self_attention_every
        return tuple(layer for layer in range(self.expert.depth) if every and layer % every == 0)

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """Expert layers that attend to the prefix alone."""
        own = self.self_layers
        return tuple(layer for layer in range(self.expert.depth) if layer not in own)


# SmolVLM2-500M's vision tower and the first half of its language model.
SMOLVLA = SmolVlaDims(
    vision=VisionDims(
        width=768, depth=12, num_heads=12, mlp_dim=3072, patch_size=16, image_size=512
    ),
    pixel_shuffle=4,
    language=DecoderDims(
        width=960, depth=16, mlp_dim=2560, num_heads=15, num_kv_heads=5, head_dim=64
    ),
    expert=DecoderDims(
        width=720, depth=16, mlp_dim=2048, num_heads=15, num_kv_heads=5, head_dim=64
    ),
    self_attention_every=2,
    vocabulary=49280,
    cameras=3,
    prompt_length=48,
    horizon=50,
    action_dim=32,
    state_dim=32,
)


# --------------------------------------------------------------------------------------------------


_SMOLVLA_FIGURES = PerformanceFigures(
    kernels={
        'torch': Kernels(vision=142, prefix=381, step=362, inputs=8),
        'triton': Kernels(vision=142, prefix=399, step=140, inputs=8),
    },
    runs=vla_cpp_runs(
        {
            'agx-orin': (205.95, 109.44),
            'orin-nano': (509.60, 284.03),
            'rtx-3060': (99.31, 42.94),
            'rtx-5090': (49.6, 16.1),
        }
    ),
)

FAMILIES = (
    Family(
        name='smolvla',
        title='SmolVLA (arXiv 2506.01844)',
        head='flow',
        dims=SmolVlaDims,
        presets={'smolvla': SMOLVLA},
        templates={'task_line': PromptLayout('{task}\n', bos=False)},
        prefix_inputs=prompt_and_state,
        head_inputs=no_inputs,
        time_table=ActionTimeTable,
        cuts_padding=True,
        figures={'smolvla': _SMOLVLA_FIGURES},
    ),
)
