"""Rows of Evo-1's time table: the flow time as a whole number from 0 to 999.

Evo-1's flow runs from 0 (noise) to 1 (actions). Step i of N takes row int(999 * (i / N)), computed
in float64. The runtime's flow time is t = 1 - i / N, rounded to float32. That rounding moves some
products across a whole number, so i / N is recovered first, for every N that a schedule may have.
"""

from __future__ import annotations

import numpy as np

from vla_runtime.families.evo1.dimensions import Evo1Dims
from vla_runtime.family.declaration import MOST_FLOW_STEPS
from vla_runtime.files.safetensors_reader import SafetensorsReader

ROWS = 1000
# Rounding a time to float32 moves it by 3e-8 at most; the fractions are 1e-4 apart.
TOLERANCE = 1e-7
TABLE = 'time_rows'


def time_rows(times: np.ndarray) -> np.ndarray:
    """Return the row of the table for each flow time.

    Args:
        times: (N,) float, 1 (noise) to 0 (actions).

    Returns:
        (N,) int64, 0 to 999
    """
    passed = 1.0 - np.asarray(times, np.float32).astype(np.float64)
    steps = np.arange(1.0, MOST_FLOW_STEPS + 1.0)
    fractions = np.round(passed[:, None] * steps) / steps
    near = np.abs(fractions - passed[:, None]) <= TOLERANCE
    nearest = fractions[np.arange(len(passed)), near.argmax(axis=1)]
    exact = np.where(near.any(axis=1), nearest, passed)
    return np.clip((exact * (ROWS - 1)).astype(np.int64), 0, ROWS - 1)


class TimeRows:
    """The table's rows, from the bundle's weights.

    Args:
        dims: dimensions of the policy.
        weights: the bundle's weights.
    """

    def __init__(self, dims: Evo1Dims, weights: SafetensorsReader) -> None:
        self.width = dims.language.width
        self._weights = weights

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """(N,) flow times to rows (N, W) float32."""
        table = np.asarray(self._weights.read(TABLE), np.float32)
        return np.ascontiguousarray(table[0, time_rows(times)])
