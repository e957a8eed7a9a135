"""The sizes of pi0 and pi0.5: one dataclass, presets for the published models.

Pure numbers. A machine that only serves TensorRT engines reads them without loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_runtime.families.blocks.dimensions import GemmaDims, VisionDims


@dataclass(frozen=True)
class PiDims:
    """All that fixes the shapes of a pi0 or pi0.5 policy.

    The expert shares depth, heads and head_dim with the language model, because one attention
    runs over the keys and values of both. `state_dim` is the padded state of pi0's state token;
    0 for pi0.5, whose state is in the prompt.
    """

    vision: VisionDims
    language: GemmaDims
    expert: GemmaDims
    vocabulary: int
    cameras: int
    prompt_length: int
    horizon: int
    action_dim: int
    state_dim: int = 0

    def __post_init__(self) -> None:
        if self.vision.image_size % self.vision.patch_size:
            raise ValueError(
                f'vision: image_size {self.vision.image_size} is not a multiple of patch_size '
                f'{self.vision.patch_size}'
            )
        for name in ('depth', 'num_heads', 'num_kv_heads', 'head_dim'):
            language, expert = getattr(self.language, name), getattr(self.expert, name)
            if language != expert:
                raise ValueError(
                    f'language.{name} is {language} but expert.{name} is {expert}: both feed one '
                    'attention, so they must be equal'
                )
        if self.language.num_heads % self.language.num_kv_heads:
            raise ValueError(
                f'language: num_heads {self.language.num_heads} is not a multiple of '
                f'num_kv_heads {self.language.num_kv_heads}'
            )
        if self.vision.width % self.vision.num_heads:
            raise ValueError(
                f'vision: width {self.vision.width} is not a multiple of num_heads '
                f'{self.vision.num_heads}'
            )
        if self.language.head_dim % 2:
            raise ValueError(
                f'language: head_dim {self.language.head_dim} is odd; the rotary embedding turns '
                'pairs of numbers'
            )
        if self.expert.width % 2:
            raise ValueError(
                f'expert: width {self.expert.width} is odd; the flow time enters as as many sines '
                'as cosines'
            )

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
_GEMMA_2B = GemmaDims(
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

_STACK = {
    'width': 16384,
    'depth': 512,
    'mlp_dim': 131072,
    'num_heads': 1024,
    'num_kv_heads': 1024,
    'head_dim': 1024,
}
LIMITS = {
    'vision.width': 16384,
    'vision.depth': 512,
    'vision.num_heads': 1024,
    'vision.mlp_dim': 131072,
    'vision.image_size': 4096,
    'vision.patch_size': 1024,
    **{f'language.{name}': limit for name, limit in _STACK.items()},
    **{f'expert.{name}': limit for name, limit in _STACK.items()},
}
