"""Largest errors that are accepted where networks are compared with PyTorch's eager ones.

Errors are absolute, in units of the reference's largest number where that is above one. A chunk's
bound is that of the precision times the gain of its case where that is above one: how many times
PyTorch itself makes a small change of the noise larger. It ends at a ceiling, since a bound that
follows any gain would pass any chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

# Precisions in which less is rounded than in int8.
_FINER = ('float32', 'float16', 'bfloat16')
# What decided a chunk's bound: the precision alone, its gain too, or the ceiling.
BoundBy = Literal['precision', 'gain', 'ceiling']


@dataclass(frozen=True)
class Bounds:
    """Largest errors that are accepted.

    Attributes:
        tensor: bound of one network's outputs.
        chunk: bound of a whole chunk, for a gain of at most one.
        ceiling: bound of a whole chunk, whatever its gain.
    """

    tensor: float
    chunk: float
    ceiling: float


# Ceilings are ten times the chunk's own bound, and never above 0.1, a twentieth of the range of
# normalised actions: a chunk that is off by more is another motion.
BOUNDS: dict[str, Bounds] = {
    'float32': Bounds(tensor=5e-5, chunk=5e-5, ceiling=5e-4),
    'float16': Bounds(tensor=1e-2, chunk=1e-2, ceiling=1e-1),
    'bfloat16': Bounds(tensor=8e-2, chunk=8e-2, ceiling=1e-1),
    'int8': Bounds(tensor=1e-1, chunk=1e-1, ceiling=1e-1),
    # Four significant bits and two: a number is off by up to 6 and 25% of itself, so single numbers
    # are off by more (0.14 of the demo policy's velocities in fp8), which the steps of a chunk even
    # out. Wrong scales and matrices are found in the files themselves.
    'fp8': Bounds(tensor=2e-1, chunk=1e-1, ceiling=1e-1),
    'nvfp4': Bounds(tensor=3e-1, chunk=1e-1, ceiling=1e-1),
}


def judged_as(precision: str, rounds_activations: bool) -> str:
    """The precision by whose bounds chunks are judged: int8's where that is what limits them."""
    return 'int8' if rounds_activations and precision in _FINER else precision


def chunk_bound(precision: str, gain: float) -> tuple[float, BoundBy]:
    """The bound of a chunk, and what decided it.

    `gain` is the factor by which PyTorch enlarges a small change of the noise.
    """
    bounds = BOUNDS[precision]
    # A NaN gain does not raise the bound.
    if not gain > 1.0:
        return bounds.chunk, 'precision'
    bound = bounds.chunk * gain
    return (bound, 'gain') if bound <= bounds.ceiling else (bounds.ceiling, 'ceiling')


def error_of(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return largest and mean error, as the module defines them; NaN for NaN or a wrong shape."""
    if found.shape != expected.shape:
        return float('nan'), float('nan')
    wide = expected.astype(np.float64)
    difference = np.abs(found.astype(np.float64) - wide) / max(1.0, float(np.abs(wide).max()))
    return float(difference.max()), float(difference.mean())
