"""The sizes of pi0 and pi0.5: one dataclass, presets for the published models.

Pure numbers. A machine that only serves TensorRT engines reads them without loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_runtime.families.blocks.dimensions import (
    DecoderDims,
    VisionDims,
    check_stacks,
    check_vision,
)


@dataclass(frozen=True)
class PiDims:
    """All that fixes the shapes of a pi0 or pi0.5 policy.

    The expert shares depth, heads and head_dim with the language model, because one attention
    runs over the keys and values of both. `state_dim` is the padded state of pi0's state token;
    0 for pi0.5, whose state is in the prompt.
    """

    vision: VisionDims
    language: DecoderDims
    expert: DecoderDims
    vocabulary: int
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: int
    state_dim: int = 0

    def __post_init__(self) -> None:
        check_vision(self.vision)
        check_stacks(self.language, self.expert)

    @property
    def image_size(self) -> int:
        """S, edge of the square images in pixels."""
        return self.vision.image_size

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, then prompt tokens."""
        return self.cameras * self.vision.tokens + self.prompt_length


_SO400M = VisionDims(
    width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
)
_GEMMA_2B = DecoderDims(
    width=2048, depth=18, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256
)
_GEMMA_300M = replace(_GEMMA_2B, width=1024, mlp_dim=4096)

PI05 = PiDims(
    vision=_SO400M,
    language=_GEMMA_2B,
    expert=_GEMMA_300M,
    vocabulary=257152,
    cameras=3,
    prompt_length=200,
    horizon=50,
    action_dim=32,
)
PI0 = replace(PI05, prompt_length=48, state_dim=32)
