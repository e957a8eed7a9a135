"""The sizes of GR00T N1.5: one dataclass, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims, check_vision


@dataclass(frozen=True)
class StackDims:
    """A stack of attention blocks with plain MLPs, without grouped keys.

    Attributes:
        depth: blocks.
        num_heads, head_dim: of the attention of each block.
        mlp_dim: hidden numbers of the MLP of each block.
    """

    depth: int
    num_heads: int
    head_dim: int
    mlp_dim: int

    @property
    def heads_width(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class GrootDims:
    """All that fixes the shapes of a GR00T N1.5 policy for one embodiment.

    Attributes:
        vision: SigLIP tower.
        pixel_shuffle: edge of the square of patches that becomes one image token; 1: each patch.
        connector_layers: linear layers from patches to the language model: 1, or 2 with a norm.
        language: Qwen3 decoder layers that the checkpoint keeps.
        context: self-attention over the language model's features; its blocks are as wide as those.
        dit: cross- and self-attention over state, future and action tokens. Even blocks attend to
            the context, odd ones to the tokens themselves.
        head_width: output of the DiT, and hidden numbers of the embodiment's encoder and decoder.
        future_tokens: learned tokens between state and actions.
        positions: rows of the table of action positions.
        image_places: text tokens before each camera's image, in the order of the cameras.
        prompt_length: text tokens of the padded prompt, without image tokens.
        action_dim, state_dim: padded.
        rope_base: base of the language model's rotary positions.
        rms_epsilon: epsilon of its norms.
    """

    vision: VisionDims
    pixel_shuffle: int
    connector_layers: int
    language: DecoderDims
    context: StackDims
    dit: StackDims
    head_width: int
    future_tokens: int
    positions: int
    vocabulary: int
    cameras: int
    image_places: tuple[int, ...]
    prompt_length: int
    horizon: int
    action_dim: int
    state_dim: int
    rope_base: float = 1e6
    rms_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_vision(self.vision)
        side = self.vision.image_size // self.vision.patch_size
        if side % self.pixel_shuffle:
            raise ValueError(
                f'pixel_shuffle {self.pixel_shuffle} does not divide the {side} patches of an '
                "image's edge"
            )
        if self.connector_layers not in (1, 2):
            raise ValueError(f'connector_layers {self.connector_layers} where 1 or 2 is expected')
        check_language(self.language)
        check_head(self)
        check_places(self.image_places, self.cameras, self.prompt_length)

    @property
    def image_size(self) -> int:
        """S, edge of the square images in pixels."""
        return self.vision.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        return self.vision.tokens // self.pixel_shuffle**2

    @property
    def prefix_length(self) -> int:
        """P: image tokens of all cameras, and text tokens."""
        return self.cameras * self.image_tokens + self.prompt_length

    @property
    def dit_width(self) -> int:
        """W, numbers of a DiT token."""
        return self.dit.heads_width

    @property
    def cross_blocks(self) -> tuple[int, ...]:
        """DiT blocks that attend to the context; the others attend to their own tokens."""
        return tuple(range(0, self.dit.depth, 2))


class HeadDims(Protocol):
    """Sizes of GR00T's action head and of what it stands on."""

    @property
    def dit(self) -> StackDims: ...

    @property
    def dit_width(self) -> int: ...

    @property
    def horizon(self) -> int: ...

    @property
    def positions(self) -> int: ...

    @property
    def rope_base(self) -> float: ...

    @property
    def rms_epsilon(self) -> float: ...


def check_head(dims: HeadDims) -> None:
    """Raise ValueError if the head's sizes do not fit each other."""
    if dims.dit.depth < 1:
        raise ValueError('dit: depth 0 where at least one block is expected')
    if dims.dit_width % 2:
        raise ValueError(
            f'dit: width {dims.dit_width} (num_heads * head_dim) is odd; the flow time enters '
            'as as many sines as cosines'
        )
    if dims.horizon > dims.positions:
        raise ValueError(
            f'horizon {dims.horizon} is more than the {dims.positions} action positions'
        )
    for name in ('rope_base', 'rms_epsilon'):
        if getattr(dims, name) <= 0:
            raise ValueError(f'{name} {getattr(dims, name)} where a number above 0 is expected')


def check_places(places: tuple[int, ...], cameras: int, prompt_length: int) -> None:
    """Raise ValueError if there is not one place for each image, in order, inside the prompt."""
    if len(places) != cameras:
        raise ValueError(
            f'image_places has {len(places)} entries where one for each of the '
            f'{cameras} cameras is expected'
        )
    if any(a > b for a, b in pairwise((0, *places, prompt_length))):
        raise ValueError(
            f'image_places {list(places)} must ascend from 0 to prompt_length {prompt_length}'
        )


def check_language(dims: DecoderDims) -> None:
    """Raise ValueError if the language model's heads do not divide."""
    if dims.num_heads % dims.num_kv_heads:
        raise ValueError(
            f'language: num_heads {dims.num_heads} is not a multiple of num_kv_heads '
            f'{dims.num_kv_heads}'
        )
    if dims.head_dim % 2:
        raise ValueError(
            f'language: head_dim {dims.head_dim} is odd; the rotary embedding turns pairs of '
            'numbers'
        )


_STACK_LIMITS = {'depth': 512, 'mlp_dim': 131072, 'num_heads': 1024, 'head_dim': 1024}
LANGUAGE_LIMITS = {
    'language.width': 16384,
    'language.num_kv_heads': 1024,
    **{f'language.{name}': limit for name, limit in _STACK_LIMITS.items()},
}
HEAD_LIMITS = {
    **{
        f'{stack}.{name}': limit
        for stack in ('context', 'dit')
        for name, limit in _STACK_LIMITS.items()
    },
    'head_width': 16384,
    'positions': 65536,
}
LIMITS = {
    'vision.width': 16384,
    'vision.depth': 512,
    'vision.num_heads': 1024,
    'vision.mlp_dim': 131072,
    'vision.image_size': 4096,
    'vision.patch_size': 1024,
    'pixel_shuffle': 64,
    **LANGUAGE_LIMITS,
    **HEAD_LIMITS,
    'future_tokens': 4096,
}

# nvidia/GR00T-N1.5-3B: SigLIP 2 at 224 pixels, twelve layers of Qwen3 1.7B, sixteen DiT blocks.
# Two cameras and LeRobot's chat template: 20 text tokens before the first image, 7 between two.
GROOT_N15 = GrootDims(
    vision=VisionDims(
        width=1152, depth=27, num_heads=16, mlp_dim=4304, patch_size=14, image_size=224
    ),
    pixel_shuffle=1,
    connector_layers=1,
    language=DecoderDims(
        width=2048, depth=12, mlp_dim=6144, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    context=StackDims(depth=4, num_heads=32, head_dim=64, mlp_dim=8192),
    dit=StackDims(depth=16, num_heads=32, head_dim=48, mlp_dim=6144),
    head_width=1024,
    future_tokens=32,
    positions=1024,
    vocabulary=151680,
    cameras=2,
    image_places=(20, 27),
    prompt_length=64,
    horizon=16,
    action_dim=32,
    state_dim=64,
)
