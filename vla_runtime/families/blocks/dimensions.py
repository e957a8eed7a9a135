"""Dimensions of shared blocks. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

# --------------------------------------------------------------------------------------------------
# Sizes of policies that see several steps of an observation. Pure numbers.


class HistoryDims:
    """What follows from cameras, steps and images; a subclass is a dataclass with these fields.

    Attributes:
        image: (height, width) of the cameras' images in pixels.
        resize: (height, width) that they are resized to; None: they are not.
        crop: (height, width) of the middle that the network sees; None: all.
        cameras: images of an observation; an earlier frame of a camera is an image of its own. The
            newest frames of all cameras come first, then those of a step before, and so on.
        observation_steps: steps of the observation that the policy sees, the newest included.
        horizon: actions that are denoised; the first is that of the oldest step.
        real_horizon: actions that the robot has, from that of the newest step on.
    """

    image: tuple[int, int]
    resize: tuple[int, int] | None
    crop: tuple[int, int] | None
    cameras: int
    observation_steps: int
    horizon: int
    real_horizon: int

    def check_history(self) -> None:
        if self.observation_steps < 1 or self.cameras % self.observation_steps:
            raise ValueError(
                f'cameras {self.cameras} is not a multiple of the {self.observation_steps} '
                'observation_steps; every camera has a frame of each step'
            )
        most = self.horizon - self.first_action
        if not 1 <= self.real_horizon <= most:
            raise ValueError(
                f'real_horizon {self.real_horizon} where 1 to {most} is expected: horizon '
                f'{self.horizon} without the {self.first_action} actions of earlier steps'
            )
        if self.crop is not None:
            high, wide = self.resize or self.image
            if self.crop[0] > high or self.crop[1] > wide or min(self.crop) < 1:
                raise ValueError(f'crop {self.crop} does not lie in images of {(high, wide)}')

    @property
    def own_cameras(self) -> int:
        return self.cameras // self.observation_steps

    @property
    def first_action(self) -> int:
        """Row of a chunk that is due at the observation's time."""
        return self.observation_steps - 1

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        return (self.image,) * self.cameras

    @property
    def seen(self) -> tuple[int, int]:
        """(height, width) that the vision network sees."""
        return self.crop or self.resize or self.image


# --------------------------------------------------------------------------------------------------
# The sizes of a residual network. Pure numbers.

# Channels of a bottleneck's output for each of its inner ones (arXiv 1512.03385, table 1).
_EXPANSION = 4
_STEM_SHRINKS = 2
# Channels of a group of a group norm, at least.
_GROUP = 16


@dataclass(frozen=True)
class ResNetDims:
    """A residual network up to its last feature map (arXiv 1512.03385), as torchvision builds it.

    Attributes:
        stem: channels after the first convolution.
        channels: inner channels of the blocks of each of the four stages.
        bottleneck: blocks of three convolutions (ResNet 50 and more), not of two.
        dilated: the last stage keeps the size of its input, its later blocks dilated by two.
        norm: `batch`, with frozen statistics, or `group` (arXiv 1803.08494), a group for every 16
            channels.
    """

    stem: int
    channels: tuple[int, int, int, int]
    blocks: tuple[int, int, int, int]
    bottleneck: bool = False
    dilated: bool = False
    norm: Literal['batch', 'group'] = 'batch'

    def __post_init__(self) -> None:
        if self.dilated and not self.bottleneck:
            raise ValueError('dilated is for bottleneck blocks; others have no dilated form')
        for n in (self.stem, *self.channels) if self.norm == 'group' else ():
            if n < _GROUP or n % self.groups(n):
                raise ValueError(
                    f'norm group: {n} channels do not part into the {n // _GROUP} groups of a norm '
                    f'(one for every {_GROUP})'
                )

    @property
    def expansion(self) -> int:
        """Channels of a block's output for each of its inner ones."""
        return _EXPANSION if self.bottleneck else 1

    def groups(self, channels: int) -> int:
        """Return the groups of a norm of so many channels; 0 for frozen statistics."""
        return channels // _GROUP if self.norm == 'group' else 0

    @property
    def width(self) -> int:
        return self.channels[-1] * self.expansion

    @property
    def depth(self) -> int:
        """Layers, as in the name: 18 for ResNet-18."""
        return sum(self.blocks) * (3 if self.bottleneck else 2) + 2

    def map_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the feature map of an image of this height and width."""
        halvings = _STEM_SHRINKS + len(self.blocks) - (2 if self.dilated else 1)
        for _ in range(halvings):
            image = ((image[0] + 1) // 2, (image[1] + 1) // 2)
        return image


# --------------------------------------------------------------------------------------------------


class VisionBlockDims(Protocol):
    """Sizes of one block of a vision transformer."""

    @property
    def width(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def mlp_dim(self) -> int: ...


@dataclass(frozen=True)
class VisionDims:
    """A SigLIP vision transformer (arXiv 2303.15343)."""

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    image_size: int

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class ShuffledImages:
    """Image sizes of a family whose vision tower joins squares of patches to image tokens."""

    vision: VisionDims
    pixel_shuffle: int

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    @property
    def image_tokens(self) -> int:
        """N, tokens of one image."""
        return self.vision.tokens // self.pixel_shuffle**2

    def check_images(self) -> None:
        """Raise ValueError if the image does not divide into patches, or they into squares."""
        check_vision(self.vision)
        side = self.vision.image_size // self.vision.patch_size
        if side % self.pixel_shuffle:
            raise ValueError(
                f'pixel_shuffle {self.pixel_shuffle} does not divide the {side} patches of an '
                "image's edge"
            )


@dataclass(frozen=True)
class DecoderDims:
    """A decoder stack with grouped-query attention and gated MLPs: Gemma, Llama."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def check_vision(dims: VisionDims) -> None:
    """Raise ValueError if the image does not divide into patches, or the width into heads."""
    if dims.image_size % dims.patch_size:
        raise ValueError(
            f'vision: image_size {dims.image_size} is not a multiple of patch_size '
            f'{dims.patch_size}'
        )
    if dims.width % dims.num_heads:
        raise ValueError(
            f'vision: width {dims.width} is not a multiple of num_heads {dims.num_heads}'
        )


def check_language(dims: DecoderDims) -> None:
    """Raise ValueError if the heads do not divide, or are of an odd width."""
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


def check_positive(dims: object, *names: str) -> None:
    for name in names:
        if getattr(dims, name) <= 0:
            raise ValueError(f'{name} {getattr(dims, name)} where a number above 0 is expected')


def check_stacks(language: DecoderDims, expert: DecoderDims) -> None:
    """Raise ValueError if the stacks do not fit one attention, or heads do not divide."""
    for name in ('depth', 'num_heads', 'num_kv_heads', 'head_dim'):
        ours, others = getattr(language, name), getattr(expert, name)
        if ours != others:
            raise ValueError(
                f'language.{name} is {ours} but expert.{name} is {others}: both feed one '
                'attention, so they must be equal'
            )
    check_language(language)
    if expert.width % 2:
        raise ValueError(
            f'expert: width {expert.width} is odd; the flow time enters as as many sines as cosines'
        )


_STACK_LIMITS = {
    'width': 16384,
    'depth': 512,
    'mlp_dim': 131072,
    'num_heads': 1024,
    'num_kv_heads': 1024,
    'head_dim': 1024,
}
# Largest accepted sizes of a vision tower, a language model and an expert.
LIMITS = {
    'vision.width': 16384,
    'vision.depth': 512,
    'vision.num_heads': 1024,
    'vision.mlp_dim': 131072,
    'vision.image_size': 4096,
    'vision.patch_size': 1024,
    **{f'language.{name}': limit for name, limit in _STACK_LIMITS.items()},
    **{f'expert.{name}': limit for name, limit in _STACK_LIMITS.items()},
}


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
