"""Repeatable noise of one or several chunks, and the choice of the one to execute.

The noise is counter-based, keyed by (seed, inference number). The chunk that continues the
committed plan best is chosen: backward coherence, as in bidirectional decoding (arXiv 2408.17355),
over the overlap of chunk and plan.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.family.declaration import Noise


def chunk_noise(
    seed: int,
    number: int,
    shape: tuple[int, int],
    sample: int = 0,
    kind: Noise = 'normal',
) -> np.ndarray:
    """Noise of one sample of one inference: standard normal, or uniform in [-1, 1).

    A Philox generator (Salmon et al., SC 2011) keyed by the seed and the inference number, so the
    noise of inference n does not depend on the inferences before it.

    Args:
        seed: 0 to 2**64 - 1.
        number: inference number, from 0.
        shape: (H, A).
        sample: index within the inference, from 0; each has its own range of the counter.
        kind: distribution, of the family.

    Returns:
        float32 array of that shape
    """
    # The counter has 256 bits, lowest word first: no sample reaches the next one's range.
    bits = np.random.Philox(key=[seed, number], counter=[0, 0, 0, sample])
    generator = np.random.Generator(bits)
    if kind == 'uniform':
        return np.float32(2.0) * generator.random(shape, dtype=np.float32) - np.float32(1.0)
    return generator.standard_normal(shape, dtype=np.float32)


def step_noise(
    seed: int, number: int, steps: int, shape: tuple[int, int], sample: int = 0
) -> np.ndarray:
    """Standard normal noise that the steps of one sample of one inference add.

    A range of the counter of its own, beside that of `chunk_noise`; the noise of a step does not
    depend on how many follow.

    Args:
        seed, number, shape, sample: as of `chunk_noise`.
        steps: steps that add noise, from the first on.

    Returns:
        (steps, H, A) float32
    """
    bits = np.random.Philox(key=[seed, number], counter=[0, 0, 1, sample])
    return np.random.Generator(bits).standard_normal((steps, *shape), dtype=np.float32)


def sample_noise(
    seed: int,
    number: int,
    samples: int,
    shape: tuple[int, int],
    kind: Noise = 'normal',
    draws: int = 1,
) -> np.ndarray:
    """Return the noise of one inference: (H, A) for one sample, (N, H, A) for more; float32.

    Sample 0 has the noise of an inference with one sample.

    Args:
        seed, number, shape, kind: as of `chunk_noise`.
        samples: N.
        draws: noises of a sample: with more than one it has (draws, H, A), the first to begin
            with and the others for the steps.
    """

    def of_sample(sample: int) -> np.ndarray:
        first = chunk_noise(seed, number, shape, sample, kind)
        if draws == 1:
            return first
        return np.concatenate([first[None], step_noise(seed, number, draws - 1, shape, sample)])

    if samples == 1:
        return of_sample(0)
    return np.stack([of_sample(sample) for sample in range(samples)])


def plan_distances(chunks: np.ndarray, plan: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Distance of each chunk from the plan over their overlap.

    Args:
        chunks: (N, H, A) in normalised action space.
        plan: (H, A) in normalised action space.
        weight: (H, W) weight of each action, see `ChunkRequest.overlap`; the same in a row.

    Returns:
        (N,) float64: root of the weighted mean square difference, in normalised units
    """
    width, weight = weight.shape[1], weight[:, 0]
    difference = chunks[..., :width].astype(np.float64) - plan[:, :width]
    square = np.square(difference).mean(axis=2)
    return np.sqrt(square @ weight / weight.sum())
