"""Dimensions of shared blocks. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


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
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2


class ShuffledImages:
    """Image sizes of a family whose vision tower joins squares of patches to image tokens."""

    vision: VisionDims
    pixel_shuffle: int

    @property
    def image_size(self) -> int:
        """S, edge of the square images in pixels."""
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
    """Raise ValueError if one of these numbers is not above 0."""
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
