"""Repeatable noise of a chunk: counter-based, keyed by (seed, inference number)."""

from __future__ import annotations

import numpy as np

from vla_runtime.family.declaration import Noise


def chunk_noise(
    seed: int,
    number: int,
    shape: tuple[int, int],
    draw: int = 0,
    kind: Noise = 'normal',
) -> np.ndarray:
    """Noise of one inference: standard normal, or uniform in [-1, 1).

    A Philox generator (Salmon et al., SC 2011) keyed by the seed and the inference number, so the
    noise of inference n does not depend on the inferences before it.

    Args:
        seed: 0 to 2**64 - 1.
        number: inference number, from 0.
        shape: (H, A) of the float32 result.
        draw: index within the inference, for whoever needs several, as the training of a student.
    """
    # The counter has 256 bits, lowest word first: no draw reaches the next one's range.
    bits = np.random.Philox(key=[seed, number], counter=[0, 0, 0, draw])
    generator = np.random.Generator(bits)
    if kind == 'uniform':
        return np.float32(2.0) * generator.random(shape, dtype=np.float32) - np.float32(1.0)
    return generator.standard_normal(shape, dtype=np.float32)


def step_noise(seed: int, number: int, steps: int, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal noise that the steps of one inference add, (steps, H, A) float32.

    A range of the counter of its own, beside that of `chunk_noise`, whose arguments these are; the
    noise of a step does not depend on how many follow. `steps` are those that add noise.
    """
    bits = np.random.Philox(key=[seed, number], counter=[0, 0, 1, 0])
    return np.random.Generator(bits).standard_normal((steps, *shape), dtype=np.float32)
