"""The sizes of GR00T N1.6: dataclasses, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from vla_runtime.families.blocks.dimensions import DecoderDims, check_positive
from vla_runtime.families.groot.dimensions import ALTERNATING_LIMITS, AlternatingDims, StackDims


@dataclass(frozen=True)
class Siglip2Dims:
    """Eagle's SigLIP 2 tower (arXiv 2502.14786) for images of any grid of patches.

    Attributes:
        patch_size: edge of a patch in pixels.
        merge: edge of the square of patches that becomes one image token.
        positions: edge of the square table of patch positions.
        rope_base: base of rotary positions by row and column; None: there are none.
        window: edge of the squares of patches that attend to themselves; None: all blocks attend
            to the whole image.
        full_attention: numbers of the blocks, counted from 1 and ascending, that attend to the
            whole image where there are windows.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    merge: int
    positions: int
    rope_base: float | None = None
    window: int | None = None
    full_attention: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f'vision: width {self.width} is not a multiple of num_heads {self.num_heads}'
            )
        if self.rope_base is not None:
            check_positive(self, 'rope_base')
            if self.head_dim % 4:
                raise ValueError(
                    f'vision: width {self.width} is not a multiple of 4 * num_heads '
                    f'{self.num_heads}; the rotary embedding turns pairs of numbers by row and '
                    'column'
                )
        if self.window is not None:
            check_positive(self, 'window')
        if any(a >= b for a, b in pairwise((0, *self.full_attention, self.depth + 1))):
            raise ValueError(
                f'vision: full_attention {list(self.full_attention)} must ascend from 1 to depth '
                f'{self.depth}'
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class GrootN16Dims(AlternatingDims):
    """All that fixes the shapes of a GR00T N1.6 policy; each of its state steps is a token."""

    vision: Siglip2Dims
    state_steps: int = 1

    # No self-attention over the features.
    context = None

    def __post_init__(self) -> None:
        self.check_alternation()


LIMITS = {
    **ALTERNATING_LIMITS,
    'vision.window': 4096,
    'state_steps': 1024,
}

# nvidia/GR00T-N1.6-3B: SigLIP 2 of Eagle-Block2A-2B-v2, sixteen layers of Qwen3 1.7B, 32 DiT
# blocks. Two cameras of 256 by 256 pixels, which are 252 in whole image tokens.
GROOT_N16 = GrootN16Dims(
    vision=Siglip2Dims(
        width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, merge=2, positions=16
    ),
    image=(252, 252),
    language=DecoderDims(
        width=2048, depth=16, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    dit=StackDims(depth=32, num_heads=32, head_dim=48, mlp_dim=6144),
    text_every=2,
    head_width=1024,
    positions=1024,
    vocabulary=151680,
    cameras=2,
    image_places=(54, 61),
    prompt_length=64,
    horizon=50,
    real_horizon=50,
    action_dim=128,
    state_dim=128,
)
