"""Bicubic resizing of uint8 images with antialiasing, as torchvision's processors do it.

Cubic convolution (Keys 1981) with a = -0.5, as wide as the shrinking needs. The rows are resized
first, rounded to uint8, then the columns. Weights are whole numbers of 16 bits, so the result is
equal on every machine.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_A = -0.5
# Taps of the cubic on either side, before it is widened.
_REACH = 2.0
# Weights fit int16 after they are multiplied by at most this power of two.
_MOST_BITS = 22
_LARGEST = 1 << 15


def bicubic(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (h, w, 3) uint8 into (height, width, 3) uint8, without keeping the aspect."""
    narrow = _along_rows(image, width)
    return _along_rows(narrow.transpose(1, 0, 2), height).transpose(1, 0, 2)


def _along_rows(image: np.ndarray, target: int) -> np.ndarray:
    """(h, w, 3) uint8 to (h, target, 3) uint8."""
    height, width, channels = image.shape
    if width == target:
        return image
    weights, bits = _weights(width, target)
    lines = image.transpose(1, 0, 2).reshape(width, -1).astype(np.float64)
    # Exact in float64: 16 bits of weight times 8 of pixel, a few hundred times.
    sums = weights @ lines + 2.0 ** (bits - 1)
    levels = np.clip(np.floor(sums / 2.0**bits), 0, 255).astype(np.uint8)
    return levels.reshape(target, height, channels).transpose(1, 0, 2)


@lru_cache(maxsize=32)
def _weights(source: int, target: int) -> tuple[np.ndarray, int]:
    """Whole-number weights (target, source) float64, and the bits that they are shifted by."""
    scale = source / target
    widened = max(scale, 1.0)
    exact = np.zeros((target, source))
    for index in range(target):
        centre = (index + 0.5) * scale
        start = max(int(centre - _REACH * widened + 0.5), 0)
        stop = min(int(centre + _REACH * widened + 0.5), source)
        places = range(start, stop)
        taps = [_cubic((place - centre + 0.5) / widened) for place in places]
        exact[index, start:stop] = np.array(taps) / sum(taps)
    bits = _bits(float(exact.max()))
    return np.trunc(exact * 2**bits + np.copysign(0.5, exact)), bits


def _bits(largest: float) -> int:
    """Largest shift with which the largest weight fits int16."""
    bits = 0
    while bits < _MOST_BITS and math.floor(0.5 + largest * 2 ** (bits + 1)) < _LARGEST:
        bits += 1
    return bits


def _cubic(x: float) -> float:
    """Keys' kernel; 0 from 2 on."""
    x = abs(x)
    if x < 1.0:
        return ((_A + 2.0) * x - (_A + 3.0)) * x * x + 1.0
    if x < _REACH:
        return (((x - 5.0) * x + 8.0) * x - 4.0) * _A
    return 0.0
