"""The sizes of GR00T N1.7: dataclasses, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from vla_runtime.families.blocks.dimensions import DecoderDims
from vla_runtime.families.groot.dimensions import AlternatingDims, StackDims

# Frames that a patch embedding takes: a single image stands for both.
FRAMES = 2


@dataclass(frozen=True)
class QwenVisionDims:
    """Qwen3-VL's vision transformer (arXiv 2511.21631).

    Attributes:
        patch_size: edge of a patch in pixels.
        merge: edge of the square of patches that becomes one image token.
        positions: edge of the square table of patch positions.
        deepstack: numbers of the blocks, counted from 1 and ascending, whose outputs also go to the
            language model.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    merge: int
    positions: int
    deepstack: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width % (4 * self.num_heads):
            raise ValueError(
                f'vision: width {self.width} is not a multiple of 4 * num_heads '
                f'{self.num_heads}; the rotary embedding turns pairs of numbers by row and column'
            )
        if any(a >= b for a, b in pairwise((0, *self.deepstack, self.depth + 1))):
            raise ValueError(
                f'vision: deepstack {list(self.deepstack)} must ascend from 1 to depth {self.depth}'
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class GrootN17Dims(AlternatingDims):
    """All that fixes the shapes of a GR00T N1.7 policy for one embodiment.

    Attributes:
        rope_sections: pairs of a head's numbers that turn by time, by row and by column.
        context: self-attention over the language model's features, whose blocks are as wide as
            those; None: there is none.
    """

    vision: QwenVisionDims
    rope_sections: tuple[int, int, int]
    context: StackDims | None = None
    rope_base: float = 5e6

    def __post_init__(self) -> None:
        if 2 * sum(self.rope_sections) != self.language.head_dim:
            raise ValueError(
                f'rope_sections {list(self.rope_sections)} do not add up to half of the '
                f"language's head_dim {self.language.head_dim}"
            )
        self.check_alternation()


# nvidia/GR00T-N1.7-3B: sixteen layers of Cosmos-Reason2 2B (Qwen3-VL), 32 DiT blocks. Two cameras
# of 256 by 256 pixels.
GROOT_N17 = GrootN17Dims(
    vision=QwenVisionDims(
        width=1024,
        depth=24,
        num_heads=16,
        mlp_dim=4096,
        patch_size=16,
        merge=2,
        positions=48,
        deepstack=(6, 12, 18),
    ),
    image=(256, 256),
    language=DecoderDims(
        width=2048, depth=16, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    rope_sections=(24, 20, 20),
    context=StackDims(depth=4, num_heads=32, head_dim=64, mlp_dim=8192),
    dit=StackDims(depth=32, num_heads=32, head_dim=48, mlp_dim=6144),
    text_every=2,
    head_width=1024,
    positions=1024,
    vocabulary=151936,
    cameras=2,
    image_places=(4, 6),
    prompt_length=64,
    horizon=40,
    real_horizon=40,
    action_dim=132,
    state_dim=132,
)
