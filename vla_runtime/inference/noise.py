"""Noise that can be fixed, recorded and repeated: counter-based, keyed by (seed, number)."""

from __future__ import annotations

import numpy as np


def chunk_noise(seed: int, number: int, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal noise of one inference.

    A Philox generator (Salmon et al., SC 2011) keyed by the seed and the inference number, so the
    noise of inference n needs nothing of the n - 1 before it.

    Args:
        seed: 0 to 2**64 - 1.
        number: inference number, from 0.
        shape: (H, A).

    Returns:
        float32 array of that shape
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, number]))
    return generator.standard_normal(shape, dtype=np.float32)
