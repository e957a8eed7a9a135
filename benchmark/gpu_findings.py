"""Finding of a check on the GPU, and the bounds that numbers are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Largest difference allowed, as a share of the reference's largest number. float32: sums in another
# order, ten steps deep. bfloat16: eight bits of mantissa in every product.
FLOAT32_BOUND = 1e-4
BFLOAT16_BOUND = 3e-2
# Two different inputs must move the chunk by more than this share of its largest number.
DISTINCT = 1e-2
BOUNDS = {'float32': FLOAT32_BOUND, 'bfloat16': BFLOAT16_BOUND}


@dataclass(frozen=True)
class Finding:
    """Outcome of one check.

    Attributes:
        passed: every bound was kept.
        note: one line for people.
        figures: all numbers behind it.
    """

    passed: bool
    note: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference as a share of the reference's largest number; infinite for NaN."""
    if not np.isfinite(value).all():
        return float('inf')
    return float(np.abs(value - reference).max() / np.abs(reference).max())


def keeps_bounds(worst: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS) -> bool:
    """Return whether the largest error of each precision is within its bound."""
    return all(error <= bounds[precision] for precision, error in worst.items())


def worst_in_words(worst: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS) -> str:
    """Return the largest error of each precision beside its bound."""
    return ', '.join(
        f'{precision} {error:.1e} (bound {bounds[precision]:.0e})'
        for precision, error in worst.items()
    )
