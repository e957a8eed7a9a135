"""Several chunks over one prefix, and the choice of the one to execute.

The chunk that continues the committed plan best is chosen: backward coherence, as in bidirectional
decoding (arXiv 2408.17355), over the overlap of chunk and plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_runtime.family.declaration import Noise
from vla_runtime.inference.noise import chunk_noise


@dataclass(frozen=True)
class Overlap:
    """Committed plan that samples are compared with.

    Attributes:
        plan: (H, A) float32 committed plan in normalised action space.
        weight: (H,) at least 0, weight of each action: 1 for those executed for certain, falling
            off after them, 0 beyond the plan; not all 0.
        width: real action dimensions; the further ones are padding and do not count.
    """

    plan: np.ndarray
    weight: np.ndarray
    width: int


def sample_noise(
    seed: int, number: int, samples: int, shape: tuple[int, int], kind: Noise = 'normal'
) -> np.ndarray:
    """Return the noise of one inference: (H, A) for one sample, (N, H, A) for more; float32.

    Sample 0 has the noise of an inference with one sample.
    """
    if samples == 1:
        return chunk_noise(seed, number, shape, kind=kind)
    return np.stack([chunk_noise(seed, number, shape, sample, kind) for sample in range(samples)])


def plan_distances(chunks: np.ndarray, overlap: Overlap) -> np.ndarray:
    """Distance of each chunk from the plan over their overlap.

    Args:
        chunks: (N, H, A) in normalised action space.
        overlap: plan and weights.

    Returns:
        (N,) float64: root of the weighted mean square difference, in normalised units
    """
    width = overlap.width
    difference = chunks[..., :width].astype(np.float64) - overlap.plan[:, :width]
    square = np.square(difference).mean(axis=2)
    return np.sqrt(square @ overlap.weight / overlap.weight.sum())
