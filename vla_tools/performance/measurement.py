"""Percentiles of measured times; numpy alone, for scripts on a bare machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentiles(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return median, p95, p99, maximum and count."""
    values = np.asarray(samples, dtype=float)
    return {
        'median': float(np.median(values)),
        'p95': float(np.percentile(values, 95)),
        'p99': float(np.percentile(values, 99)),
        'max': float(values.max()),
        'count': len(values),
    }
