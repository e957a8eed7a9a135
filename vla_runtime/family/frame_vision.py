"""Sizes of policies whose vision tower joins squares of patches, images inside the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Protocol

from vla_runtime.family.dimensions import (
    DecoderDims,
    Shown,
    TensorShapes,
    depth_of,
    size,
    squares_joined,
)


def table_side(shape: TensorShapes) -> int:
    """Edge of the square table of positions."""
    positions = shape('position_embedding', 2)[0]
    side = math.isqrt(positions)
    if side**2 != positions:
        raise ValueError(f'the vision tower has {positions} positions, which are no square')
    return side


# Frames that a patch embedding takes: a single image stands for both.
FRAMES = 2


def _patch_of_frames(shape: TensorShapes) -> int:
    _, channels, frames, patch, across = shape('patch_embedding.weight', 5)
    if (channels, frames, across) != (3, FRAMES, patch):
        raise ValueError(
            f'the vision tower has {channels} channels, {frames} frames and patches of '
            f'{patch}x{across}; expected 3 channels, {FRAMES} frames and square patches'
        )
    return patch


@dataclass(frozen=True)
class FrameVisionDims:
    """A vision transformer over patches of an image in two frames (arXiv 2511.21631).

    Attributes:
        patch_size: edge of a patch in pixels.
        merge: edge of the square of patches that becomes one image token.
        positions: edge of the square table of patch positions.
        deepstack: numbers of the blocks, counted from 1 and ascending, whose outputs also go to the
            language model.
    """

    width: Annotated[int, size('patch_embedding.weight', axes=5)]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    patch_size: Annotated[int, Shown(_patch_of_frames)]
    merge: Annotated[int, squares_joined('merger.fc1.weight')]
    positions: Annotated[int, Shown(table_side)]
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


def check_sections(sections: tuple[int, int, int], language: DecoderDims) -> None:
    """Raise ValueError if rotary sections are not those of the language model's heads."""
    if 2 * sum(sections) != language.head_dim:
        raise ValueError(
            f'rope_sections {list(sections)} do not add up to half of the '
            f"language's head_dim {language.head_dim}"
        )


class SquaredVision(Protocol):
    """Sizes of a vision tower that joins squares of patches to image tokens."""

    @property
    def patch_size(self) -> int: ...

    @property
    def merge(self) -> int: ...


class SquaredImages:
    """What follows from the size of all cameras' images and such a tower.

    Attributes:
        image: height and width of every camera's image in pixels.
    """

    image: tuple[int, int]
    cameras: int

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

    def check_squares(self) -> None:
        """Raise ValueError if the images do not divide into squares of patches."""
        block = self.vision.patch_size * self.vision.merge
        if any(edge < 1 or edge % block for edge in self.image):
            raise ValueError(
                f'image {list(self.image)} where multiples of {block} pixels (patch_size * merge) '
                'are expected'
            )
