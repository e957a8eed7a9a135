"""The sizes of GR00T N1.5: one dataclass, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vla_runtime.families.blocks.dimensions import LIMITS as STACK_LIMITS
from vla_runtime.families.blocks.dimensions import (
    DecoderDims,
    ShuffledImages,
    VisionDims,
    check_language,
    check_places,
    check_positive,
)

# Euler steps of the published base models.
DENOISE_STEPS = 4
# Text tokens of a prompt: the layout of several cameras and a long task.
USUAL_PROMPT_LENGTH = 128


@dataclass(frozen=True)
class StackDims:
    """A stack of attention blocks with plain MLPs, without grouped keys."""

    depth: int
    num_heads: int
    head_dim: int
    mlp_dim: int

    @property
    def heads_width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class HeadDims:
    """Sizes of GR00T's action head and of what it stands on, for one embodiment.

    Attributes:
        language: Qwen3 decoder layers that the checkpoint keeps.
        dit: cross- and self-attention over state, future and action tokens. Even blocks attend to
            the context, odd ones to the tokens themselves.
        head_width: output of the DiT, and hidden numbers of the embodiment's encoder and decoder.
        positions: rows of the table of action positions.
        cameras: images of an observation; an earlier frame of a camera is an image of its own.
        image_places: text tokens before each image, padding before the prompt among them, in the
            order of the cameras.
        prompt_length: text tokens of the padded prompt, without image tokens.
        action_dim, state_dim: padded; the state's of all its time steps together.
    """

    language: DecoderDims
    dit: StackDims
    head_width: int
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
    # Time steps of the state, a token each.
    state_steps = 1

    if TYPE_CHECKING:
        # Fields or constants of each version.
        @property
        def context(self) -> StackDims | None: ...
        @property
        def future_tokens(self) -> int: ...

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        raise NotImplementedError

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

    def check_head(self) -> None:
        if self.dit.depth < 1:
            raise ValueError('dit: depth 0 where at least one block is expected')
        if self.dit_width % 2:
            raise ValueError(
                f'dit: width {self.dit_width} (num_heads * head_dim) is odd; the flow time enters '
                'as as many sines as cosines'
            )
        if self.horizon > self.positions:
            raise ValueError(
                f'horizon {self.horizon} is more than the {self.positions} action positions'
            )
        if self.state_steps < 1 or self.state_dim % self.state_steps:
            raise ValueError(
                f'state_dim {self.state_dim} is not a multiple of state_steps {self.state_steps}'
            )
        check_positive(self, 'rope_base', 'rms_epsilon')


class SquaredVision(Protocol):
    """Sizes of a vision tower that joins squares of patches to image tokens."""

    @property
    def patch_size(self) -> int: ...

    @property
    def merge(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class AlternatingDims(HeadDims):
    """Sizes of a head whose cross-attention blocks read either the text or the images.

    Attributes:
        image: height and width of every camera's image in pixels.
        text_every: every so many cross-attention blocks the first attends to the text, the others
            to the images.
        real_horizon: first actions of the chunk that the embodiment has.
    """

    image: tuple[int, int]
    text_every: int
    real_horizon: int
    future_tokens = 0

    if TYPE_CHECKING:

        @property
        def vision(self) -> SquaredVision: ...

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        return (self.image,) * self.cameras

    @property
    def patches(self) -> tuple[int, int]:
        """Rows and columns of an image's patches."""
        height, width = self.image
        return height // self.vision.patch_size, width // self.vision.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of an image's tokens."""
        rows, columns = self.patches
        return rows // self.vision.merge, columns // self.vision.merge

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        rows, columns = self.grid
        return rows * columns

    @property
    def text_blocks(self) -> tuple[int, ...]:
        return self.cross_blocks[:: self.text_every]

    @property
    def image_blocks(self) -> tuple[int, ...]:
        return tuple(block for block in self.cross_blocks if block not in self.text_blocks)

    def check_alternation(self) -> None:
        """Raise ValueError if the sizes of images, prompt and head do not fit each other."""
        block = self.vision.patch_size * self.vision.merge
        if any(edge < 1 or edge % block for edge in self.image):
            raise ValueError(
                f'image {list(self.image)} where multiples of {block} pixels (patch_size * merge) '
                'are expected'
            )
        check_language(self.language)
        self.check_head()
        if self.text_every < 1:
            raise ValueError('text_every 0 where at least 1 is expected')
        if not 1 <= self.real_horizon <= self.horizon:
            raise ValueError(
                f'real_horizon {self.real_horizon} where 1 to horizon {self.horizon} is expected'
            )
        check_places(self.image_places, self.cameras, self.prompt_length)


@dataclass(frozen=True, kw_only=True)
class GrootDims(ShuffledImages, HeadDims):
    """All that fixes the shapes of a GR00T N1.5 policy for one embodiment.

    Attributes:
        pixel_shuffle: edge of the square of patches that becomes one image token; 1: each patch.
        connector_layers: linear layers from patches to the language model: 1, or 2 with a norm.
        context: self-attention over the language model's features; its blocks are as wide as those.
        future_tokens: learned tokens between state and actions.
    """

    vision: VisionDims
    pixel_shuffle: int
    connector_layers: int
    context: StackDims
    future_tokens: int

    def __post_init__(self) -> None:
        self.check_images()
        if self.connector_layers not in (1, 2):
            raise ValueError(f'connector_layers {self.connector_layers} where 1 or 2 is expected')
        check_language(self.language)
        self.check_head()
        check_places(self.image_places, self.cameras, self.prompt_length)


HEAD_LIMITS = {
    **{
        f'{stack}.{name}': STACK_LIMITS[f'language.{name}']
        for stack in ('context', 'dit')
        for name in ('depth', 'num_heads', 'head_dim', 'mlp_dim')
    },
    'head_width': 16384,
    'positions': 65536,
}
ALTERNATING_LIMITS = {
    **{
        name: limit
        for name, limit in STACK_LIMITS.items()
        if name != 'vision.image_size' and not name.startswith('expert.')
    },
    'vision.merge': 64,
    'vision.positions': 4096,
    'image': 4096,
    **HEAD_LIMITS,
    'text_every': 512,
    'real_horizon': 1024,
}
LIMITS = {
    **{name: limit for name, limit in STACK_LIMITS.items() if not name.startswith('expert.')},
    'pixel_shuffle': 64,
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
