"""Camera images resized to the network's size without keeping their aspect."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from vla_runtime.processing.images import check_image

# Keys' cubic kernel (1981) with the coefficient of Pillow and of antialiased PyTorch.
_SHARPNESS = -0.5
_REACH = 2.0


def stretched(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image with an antialiased cubic filter, columns first, then rows.

    As torchvision resizes uint8 images with `BICUBIC` and `antialias`: sums in float, clamped and
    rounded to grey levels once, at the end. Sums are float64 here, so a level may differ where
    torchvision's float32 lies on the edge of two.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: height and width of the result.

    Returns:
        (height, width, 3) uint8; `image` itself where it has that size

    Raises:
        ValueError: an image of another type or shape.
    """
    check_image(image)
    height, width = size
    if image.shape[:2] == size:
        return image
    across = _filtered(image.transpose(1, 0, 2), width)
    down = _filtered(across.transpose(1, 0, 2), height)
    return np.rint(np.clip(down, 0.0, 255.0)).astype(np.uint8)


def _filtered(lines: np.ndarray, target: int) -> np.ndarray:
    """(n, m, 3) to (target, m, 3) float64: each line a weighted mean of neighbours."""
    if len(lines) == target:
        return lines.astype(np.float64)
    places, weights = _taps(len(lines), target)
    out = np.zeros((target, *lines.shape[1:]))
    for place, weight in zip(places.T, weights.T, strict=True):
        out += weight[:, None, None] * lines[place]
    return out


@lru_cache(maxsize=32)
def _taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of each line of the result and their weights, (target, taps) each.

    When an image shrinks, the kernel is as much wider.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    reach = _REACH * stretch
    centres = (np.arange(target) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    stop = np.minimum((centres + reach + 0.5).astype(np.int64), source)
    places = first[:, None] + np.arange((stop - first).max())
    weights = _cubic((places + 0.5 - centres[:, None]) / stretch)
    weights = np.where(places < stop[:, None], weights, 0.0)
    return np.minimum(places, source - 1), weights / weights.sum(axis=1, keepdims=True)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel at distances x."""
    x, a = np.abs(x), _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
