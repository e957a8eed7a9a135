"""An image in small, and tiles of it that share their margins, as some policies see it.

Resized without antialiasing, in float32, and rounded to grey levels: PyTorch's `interpolate`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Tiling(NamedTuple):
    """Tiles of an image.

    Attributes:
        overlap: pixels that neighbours share.
        most: tiles that an image may have; rows and columns follow from its size.
    """

    rows: int
    columns: int
    overlap: int
    most: int


@lru_cache(maxsize=32)
def bilinear_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper source index, (target,) int64, and the float32 weight of the upper one."""
    # torch computes `scale * (i + 0.5) - 0.5` in float32 with one fused multiply-add: the product
    # is exact in float64, so rounding once at the end gives the same bits.
    scale = np.float64(np.float32(source) / np.float32(target))
    position = (scale * (np.arange(target) + 0.5) - 0.5).astype(np.float32)
    position = np.maximum(position, np.float32(0.0))
    lower = np.minimum(position.astype(np.int64), source - 1)
    upper = np.minimum(lower + 1, source - 1)
    return lower, upper, position - lower.astype(np.float32)


# Sums in another order than PyTorch's differ by less than this, in grey levels.
_DOUBT = 2e-4


def resized_levels(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (h, w, 3) uint8 to (height, width, 3) uint8, between the two nearest lines."""
    if image.shape[:2] == size:
        return image
    above, below, down = bilinear_taps(image.shape[0], size[0])
    before, after, across = bilinear_taps(image.shape[1], size[1])
    wide = image.astype(np.float32)
    left, right = np.take(wide, before, axis=1), np.take(wide, after, axis=1)
    share = across[:, None]
    mixed = left * (np.float32(1.0) - share) + right * share
    share = down[:, None, None]
    found = mixed[above] * (np.float32(1.0) - share) + mixed[below] * share
    levels = np.rint(found)
    # On the edge of two levels the order of the sum decides.
    row, column, channel = np.nonzero(np.abs(np.abs(found - levels) - np.float32(0.5)) < _DOUBT)
    rows, columns = (above[row], below[row]), (before[column], after[column])
    high = np.float32(1.0) - down[row], down[row]
    near = np.float32(1.0) - across[column], across[column]
    total = np.zeros(len(row))
    # PyTorch's order, each product added with one rounding.
    for i, j in ((0, 1), (0, 0), (1, 0), (1, 1)):
        product = (high[i] * near[j]).astype(np.float64) * wide[rows[i], columns[j], channel]
        total = (total + product).astype(np.float32).astype(np.float64)
    levels[row, column, channel] = np.rint(total)
    return levels.astype(np.uint8)


def choose_tiling(size: tuple[int, int], window: int, overlap: int, most: int) -> tuple[int, int]:
    """Return rows and columns of at most so many tiles that change an image's size least.

    Args:
        size: height and width of the image.
        window: edge of a tile without the `overlap`, in pixels.
    """
    counts = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most]
    counts.sort(key=lambda one: (one[0] * one[1], one[0]))
    sides = np.array(size, np.float32) - np.float32(overlap)
    with np.errstate(divide='ignore'):
        scales = (np.array(counts, np.float32) * np.float32(window) / sides).min(axis=1)
    if (scales < 1).all():
        return counts[int(scales.argmax())]
    return counts[int(np.where(scales < 1, np.inf, scales).argmin())]


def check_tiling(image: np.ndarray, size: tuple[int, int], tiling: Tiling) -> None:
    """Refuse an image that is cut in other tiles (ValueError); `size` as of `tiled`."""
    window = size[0] // tiling.rows - tiling.overlap
    high, wide, _ = image.shape
    found = choose_tiling((high, wide), window, tiling.overlap, tiling.most)
    if found != tiling[:2]:
        raise ValueError(
            f'image of {high}x{wide} (height x width) is cut in {found[0]}x{found[1]} tiles, and '
            f'the network has {tiling.rows}x{tiling.columns}: set the camera driver to the size of '
            'the training data'
        )


def tiled(image: np.ndarray, size: tuple[int, int], tiling: Tiling | None) -> np.ndarray:
    """Put an image in small and its tiles side by side.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: height and width of the result: (rows * S, (1 + columns) * S) of tiles with edge S.
        tiling: None: the small image alone, of that size.

    Returns:
        (*size, 3) uint8, black below the small image.
    """
    if tiling is None:
        return resized_levels(image, size)
    rows, columns, overlap, _ = tiling
    edge = size[0] // rows
    step = edge - overlap
    small = resized_levels(image, (edge, edge))
    large = resized_levels(image, (rows * step + overlap, columns * step + overlap))
    out = np.zeros((*size, 3), np.uint8)
    out[:edge, :edge] = small
    for row in range(rows):
        for column in range(columns):
            top, left = row * step, column * step
            tile = large[top : top + edge, left : left + edge]
            out[row * edge : (row + 1) * edge, (column + 1) * edge : (column + 2) * edge] = tile
    return out
