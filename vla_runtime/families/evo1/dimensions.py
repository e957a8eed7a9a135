"""The sizes of Evo-1: one dataclass, a preset for the published model. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from vla_runtime.families.blocks.dimensions import LIMITS as STACK_LIMITS
from vla_runtime.families.blocks.dimensions import (
    DecoderDims,
    VisionDims,
    check_language,
    check_vision,
)


@dataclass(frozen=True)
class HeadDims:
    """The head: action tokens of the language model's width that attend to the context.

    Attributes:
        depth: cross-attention blocks.
        num_heads: attention heads of a block.
        mlp_dim: hidden width of a block's MLP.
        state_hidden: hidden width of the state's encoder.
        velocity_hidden: hidden width of the layer pair that emits the whole chunk's velocity.
    """

    depth: int
    num_heads: int
    mlp_dim: int
    state_hidden: int
    velocity_hidden: int


LIMITS = {
    **{name: limit for name, limit in STACK_LIMITS.items() if not name.startswith('expert.')},
    'head.depth': 512,
    'head.num_heads': 1024,
    'head.mlp_dim': 131072,
    'head.state_hidden': 131072,
    'head.velocity_hidden': 131072,
    'pixel_shuffle': 64,
    'image_frames': 4_194_304,
}


@dataclass(frozen=True)
class Evo1Dims:
    """All that fixes the shapes of an Evo-1 policy.

    Attributes:
        pixel_shuffle: edge of the square of patches that becomes one image token.
        image_frames: token ids of the text around the images: one tuple in front of each image
            (`Image-1: <img>`), and one behind the last (`</img>`).
        prompt_length: tokens of the text behind the last frame, padded.
        action_dim: padded action dimensions.
        real_actions: action dimensions that are not padding; they come first.
        state_dim: padded state dimensions.
        rope_base: base of the language model's rotary positions.
        rms_epsilon: epsilon of the language model's norms.
        input_major: the projections of state, actions and velocity are stored (inputs, outputs), as
            checkpoints for several embodiments have them; else (outputs, inputs).
    """

    vision: VisionDims
    pixel_shuffle: int
    language: DecoderDims
    head: HeadDims
    vocabulary: int
    cameras: int
    image_frames: tuple[tuple[int, ...], ...]
    prompt_length: int
    horizon: int
    action_dim: int
    real_actions: int
    state_dim: int
    rope_base: float = 1e6
    rms_epsilon: float = 1e-6
    input_major: bool = False

    def __post_init__(self) -> None:
        check_vision(self.vision)
        check_language(self.language)
        for name in ('rope_base', 'rms_epsilon'):
            if getattr(self, name) <= 0:
                raise ValueError(f'{name} {getattr(self, name)} where a number above 0 is expected')
        side = self.vision.image_size // self.vision.patch_size
        if side % self.pixel_shuffle:
            raise ValueError(
                f'pixel_shuffle {self.pixel_shuffle} does not divide the {side} patches of an '
                "image's edge"
            )
        if self.language.width % self.head.num_heads:
            raise ValueError(
                f'head: num_heads {self.head.num_heads} does not divide the width '
                f'{self.language.width} (language.width)'
            )
        if len(self.image_frames) != self.cameras + 1:
            raise ValueError(
                f'image_frames has {len(self.image_frames)} entries where {self.cameras + 1} are '
                'expected: one in front of the image of each camera and one behind the last'
            )
        if not self.image_frames[0]:
            raise ValueError(
                'image_frames[0] is empty; the text must begin with a token that is always seen'
            )
        for frame in self.image_frames:
            for token in frame:
                if not 0 <= token < self.vocabulary:
                    raise ValueError(
                        f'image_frames: token {token} is not in the vocabulary of {self.vocabulary}'
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
    def image_size(self) -> int:
        """S, edge of the square images in pixels."""
        return self.vision.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        return self.vision.tokens // self.pixel_shuffle**2

    @property
    def language_length(self) -> int:
        """Tokens that the language model reads: frames, image tokens of all cameras, text."""
        frames = sum(len(frame) for frame in self.image_frames)
        return frames + self.cameras * self.image_tokens + self.prompt_length

    @property
    def prefix_length(self) -> int:
        """P: what the language model reads, and the state token."""
        return self.language_length + 1


# InternVL3-1B's vision tower and the first 14 layers of its language model. The token ids around
# the images are stand-ins: `roofline` counts them and never reads them.
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
    image_frames=((0,) * 5, (0,) * 7, (0,) * 7, (0,)),
    prompt_length=48,
    horizon=50,
    action_dim=24,
    real_actions=7,
    state_dim=24,
)
