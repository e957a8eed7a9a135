"""Camera images that go in at their own size: each grey level of a channel to the network's scale.

An image has 256 grey levels a channel, so a table holds the result of every one of them. It is the
training code's own formula on x / 255 in float32, and looking up is faster than computing.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.processing.normalization import Normalizer


def unit_levels() -> np.ndarray:
    """All grey levels as [0, 1], (256,) float32: x / 255."""
    return np.arange(256, dtype=np.float32) / np.float32(255.0)


def signed_table() -> np.ndarray:
    """Table of images in [-1, 1]: (3, 256) float32, x / 255 * 2 - 1."""
    return np.tile(unit_levels() * np.float32(2.0) - np.float32(1.0), (3, 1))


def normalised_table(normalizer: Normalizer) -> np.ndarray:
    """Table of a camera whose images are normalised from [0, 1].

    Args:
        normalizer: normaliser of the three colour channels.

    Returns:
        (3, 256) float32
    """
    levels = np.repeat(unit_levels()[:, None], 3, axis=1)
    return np.ascontiguousarray(normalizer.normalise(levels).T)


def levels_per_unit(table: np.ndarray) -> np.ndarray:
    """Grey levels that one unit of the network's scale spans, (3,) float64, by channel."""
    span = np.abs(table[:, -1].astype(np.float64) - table[:, 0])
    # A channel without any range looks the same at every level.
    return np.where(span > 0, 255.0 / np.where(span > 0, span, 1.0), 0.0)


def check_size(image: np.ndarray, size: tuple[int, int]) -> None:
    """Refuse an image of another size than the network's.

    Args:
        image: (height, width, 3) uint8.
        size: height and width in pixels.

    Raises:
        ValueError: names both sizes.
    """
    if image.shape[:2] != size:
        raise ValueError(
            f'image of {image.shape[0]}x{image.shape[1]} (height x width) where '
            f'{size[0]}x{size[1]} is expected: the policy was trained on images of that size and '
            'nothing resizes them; set the camera driver to it'
        )


def to_plain_pixels(image: np.ndarray, table: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Look every pixel of an image up.

    Args:
        image: (height, width, 3) uint8, RGB, any strides; never written to.
        table: (3, 256) float32.
        out: (3, height, width) float32 to write into.

    Returns:
        `out`
    """
    for channel in range(3):
        np.take(table[channel], image[..., channel], out=out[channel], mode='clip')
    return out
