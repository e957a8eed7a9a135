"""Weights and pictures made of a name and a shape, equal in every environment.

A folder of a release keeps the names and shapes of its tensors alone; what made it and what tests
it fill them with the same numbers. numpy alone, and no generator whose stream may change.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np


def uniform(name: str, count: int) -> np.ndarray:
    """Return numbers from -1 to 1 (splitmix64)."""
    with np.errstate(over='ignore'):
        z = np.arange(count, dtype=np.uint64) + (
            np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
        )
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / 2**52 - 1.0


def made_tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return the weights of a tensor, of a size that its place in a network asks for."""
    values = uniform(name, math.prod(shape)).reshape(shape)
    if name.endswith('running_var'):
        values = 1.0 + 0.5 * values
    elif 'embed' in name.rpartition('.')[0] and 'patch' not in name:
        pass
    elif len(shape) > 1:
        values *= 1.7 / math.sqrt(math.prod(shape[1:]))
    elif 'norm' in name.lower() or '.bn' in name or 'downsample.1' in name:
        values = (1.0 if name.endswith('weight') else 0.0) + 0.1 * values
    else:
        values *= 0.1
    return values.astype(np.float32)


def made_picture(name: str, height: int, width: int) -> np.ndarray:
    """Return a picture (height, width, 3) uint8 of smooth colours and some noise."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7 + k) + np.cos(y / 5 + 2 * k) for k in range(3)], axis=-1)
    noise = uniform(name, height * width * 3).reshape(height, width, 3)
    return np.clip(127.5 + 40 * waves + 30 * noise, 0, 255).astype(np.uint8)
