"""Largest errors that are accepted where networks are compared with PyTorch's eager ones.

Errors are absolute, in units of the reference's largest number where that is above one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bounds:
    """Largest errors that are accepted.

    Attributes:
        tensor: of one network's outputs.
        chunk: of a whole chunk, for a gain of at most one.
        ceiling: of a whole chunk, whatever its gain.
    """

    tensor: float
    chunk: float
    ceiling: float


# Ceilings are ten times the chunk's own bound, and never above 0.1: a twentieth of the range from
# -1 to 1 that normalised actions fill. A chunk that is off by more is another motion.
BOUNDS: dict[str, Bounds] = {
    'float32': Bounds(tensor=5e-5, chunk=5e-5, ceiling=5e-4),
    'float16': Bounds(tensor=1e-2, chunk=1e-2, ceiling=1e-1),
    'bfloat16': Bounds(tensor=8e-2, chunk=8e-2, ceiling=1e-1),
    'int8': Bounds(tensor=1e-1, chunk=1e-1, ceiling=1e-1),
    'fp8': Bounds(tensor=1e-1, chunk=1e-1, ceiling=1e-1),
}


def error_of(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return largest and mean error, as the module defines them; NaN for NaN or a wrong shape."""
    if found.shape != expected.shape:
        return float('nan'), float('nan')
    wide = expected.astype(np.float64)
    difference = np.abs(found.astype(np.float64) - wide) / max(1.0, float(np.abs(wide).max()))
    return float(difference.max()), float(difference.mean())
