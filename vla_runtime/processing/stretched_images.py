"""Camera images resized to the network's size without keeping their aspect.

Or padded to a square before, as Prismatic's image transform does by default: its
`letterbox_pad_transform` and torchvision's `Resize` and `CenterCrop` on Pillow images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np

from vla_runtime.processing.words import check_word
from vla_runtime.types import CroppedResample, LastResample, StretchedResample

# Keys' cubic kernel (1981) with the coefficient of Pillow and of antialiased PyTorch.
_SHARPNESS = -0.5
# Pixels to each side that a kernel reads of an image which does not shrink.
_REACH: Mapping[str, float] = {'bicubic': 2.0, 'bilinear': 1.0, 'lanczos': 3.0}
# Weights as whole numbers fit int16 after they are multiplied by at most this power of two.
_MOST_BITS = 22
_LARGEST = 1 << 15


def stretched(
    image: np.ndarray,
    size: tuple[int, int],
    resample: StretchedResample | CroppedResample | LastResample,
) -> np.ndarray:
    """Resize an image with an antialiased filter, columns first, then rows.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: height and width of the result.
        resample: `bicubic` sums in float, and clamps and rounds to grey levels once, at the end, as
            torchvision's first transforms do. Sums are float64 here, so a level may differ where
            their float32 lies on the edge of two. `bicubic_uint8` has weights of 16 bits, and
            clamps and rounds after the columns and after the rows, as torchvision's transforms v2
            do with uint8 images on a CPU; no level differs. `bilinear_uint8` is the same with the
            two nearest lines. `bicubic_pillow` has weights of 22 bits, as Pillow; no level differs.
            `lanczos` is as `bicubic` with six lines, as TensorFlow's `lanczos3`.

    Returns:
        (height, width, 3) uint8; `image` itself where it has that size

    Raises:
        ValueError: an unknown word for resample.
    """
    if resample not in _FILTERS:
        check_word('image resample', resample, StretchedResample)
    height, width = size
    if image.shape[:2] == size:
        return image
    filtered = _FILTERS[resample]
    across = filtered(image.transpose(1, 0, 2), width)
    return _levels(filtered(across.transpose(1, 0, 2), height))


def _levels(values: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(values, 0.0, 255.0)).astype(np.uint8)


def _filtered(lines: np.ndarray, target: int, kernel: str = 'bicubic') -> np.ndarray:
    """(n, m, 3) to (target, m, 3) float64: each line a weighted mean of neighbours."""
    if len(lines) == target:
        return lines.astype(np.float64)
    return _sums(lines, *_taps(len(lines), target, kernel))


def _filtered_levels(
    lines: np.ndarray, target: int, kernel: str = 'bicubic', bits: int | None = None
) -> np.ndarray:
    """(n, m, 3) uint8 to (target, m, 3) uint8, with whole-number weights; halves round up."""
    if len(lines) == target:
        return lines
    places, weights, unit = _whole_taps(len(lines), target, kernel, bits)
    # Exact in float64: 22 bits of weight times 8 of pixel, a few hundred times.
    return _levels(np.floor(_sums(lines, places, weights) / unit + 0.5))


_FILTERS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    'bicubic': _filtered,
    'bicubic_uint8': _filtered_levels,
    'bicubic_pillow': partial(_filtered_levels, bits=_MOST_BITS),
    'bilinear_uint8': partial(_filtered_levels, kernel='bilinear'),
    'lanczos': partial(_filtered, kernel='lanczos'),
}


def _sums(lines: np.ndarray, places: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.zeros((len(places), *lines.shape[1:]))
    for place, weight in zip(places.T, weights.T, strict=True):
        out += weight[:, None, None] * lines[place]
    return out


@lru_cache(maxsize=32)
def _whole_taps(
    source: int, target: int, kernel: str, bits: int | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Neighbours, weights as whole numbers, and the whole number that stands for 1.

    `bits` are those of that number; None: as many as let the weights fit int16.
    """
    places, exact = _taps(source, target, kernel)
    unit = 2.0 ** (_bits(float(exact.max())) if bits is None else bits)
    return places, np.trunc(exact * unit + np.copysign(0.5, exact)), unit


def _bits(largest: float) -> int:
    """Largest shift with which the largest weight fits int16."""
    bits = 0
    while bits < _MOST_BITS and math.floor(0.5 + largest * 2 ** (bits + 1)) < _LARGEST:
        bits += 1
    return bits


@lru_cache(maxsize=32)
def _taps(source: int, target: int, kernel: str = 'bicubic') -> tuple[np.ndarray, np.ndarray]:
    """Neighbours of each line of the result and their weights, (target, taps) each.

    When an image shrinks, the kernel is as much wider.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    reach = _REACH[kernel] * stretch
    centres = (np.arange(target) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    stop = np.minimum((centres + reach + 0.5).astype(np.int64), source)
    places = first[:, None] + np.arange((stop - first).max())
    distances = (places + 0.5 - centres[:, None]) / stretch
    weights = _KERNELS[kernel](distances)
    weights = np.where(places < stop[:, None], weights, 0.0)
    return np.minimum(places, source - 1), weights / weights.sum(axis=1, keepdims=True)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel at distances x."""
    x, a = np.abs(x), _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    """Lanczos' kernel of three lobes at distances x."""
    return np.where(np.abs(x) < _REACH['lanczos'], np.sinc(x) * np.sinc(x / _REACH['lanczos']), 0.0)


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


_KERNELS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    'bicubic': _cubic,
    'bilinear': _triangle,
    'lanczos': _lanczos,
}


def letterboxed(image: np.ndarray, size: int, fill: tuple[int, int, int]) -> np.ndarray:
    """Pad an image to a square, resize it and cut out its middle.

    Half of the difference of the sides, rounded down, is put on both sides of the shorter one: an
    odd difference leaves the image a pixel off square. The shorter side then becomes `size`, and
    the longer one is cut.

    Args:
        image: (h, w, 3) uint8, RGB, any strides; never written to.
        size: S, side of the square in pixels.
        fill: grey levels of the border, by colour channel.

    Returns:
        (S, S, 3) uint8
    """
    height, width = image.shape[:2]
    longer = max(height, width)
    above, left = (longer - height) // 2, (longer - width) // 2
    square = np.empty((height + 2 * above, width + 2 * left, 3), dtype=np.uint8)
    square[:] = fill
    square[above : above + height, left : left + width] = image
    shorter = min(square.shape[:2])
    high, wide = (
        size if side == shorter else int(size * side / shorter) for side in square.shape[:2]
    )
    resized = stretched(square, (high, wide), 'bicubic_pillow')
    # Python's own rounding, half to even, as torchvision's.
    top, start = round((high - size) / 2), round((wide - size) / 2)
    return resized[top : top + size, start : start + size]
