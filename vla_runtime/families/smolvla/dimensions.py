"""The sizes of SmolVLA: one dataclass, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.families.blocks.dimensions import (
    LIMITS,
    DecoderDims,
    ShuffledImages,
    VisionDims,
    check_positive,
    check_stacks,
)

LIMITS = {**LIMITS, 'pixel_shuffle': 64, 'self_attention_every': 512}


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
    pixel_shuffle: int
    language: DecoderDims
    expert: DecoderDims
    vocabulary: int
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: int
    state_dim: int
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
