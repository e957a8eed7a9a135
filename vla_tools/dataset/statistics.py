"""Statistics of a data set as LeRobot writes them: exact, over all frames of vectors.

Pixels are counted in a histogram of their 256 values, of at most about a hundred frames an episode,
so that nothing of them is kept.
"""

from __future__ import annotations

import numpy as np

QUANTILES = {'q01': 0.01, 'q10': 0.1, 'q50': 0.5, 'q90': 0.9, 'q99': 0.99}
_SAMPLED_FRAMES = 100
# Pixels that a camera's frame is thinned to in each direction.
_SAMPLED_PIXELS = 150
_LEVELS = np.arange(256) / 255.0

Statistics = dict[str, np.ndarray]


def vector_statistics(values: np.ndarray) -> Statistics:
    """Return statistics over the rows.

    Args:
        values: (n, columns), n at least 1.

    Returns:
        `min`, `max`, `mean`, `std` and quantiles, (columns,) float64; `count` (1,) int64.
    """
    values = np.asarray(values, dtype=np.float64)
    found = {
        'min': values.min(axis=0),
        'max': values.max(axis=0),
        'mean': values.mean(axis=0),
        'std': values.std(axis=0),
        'count': np.array([len(values)]),
    }
    return found | {name: np.quantile(values, q, axis=0) for name, q in QUANTILES.items()}


def is_sampled(index: int, frames: int) -> bool:
    """Return whether a frame of an episode counts for its cameras' statistics."""
    return index % max(1, frames // _SAMPLED_FRAMES) == 0


class PixelStatistics:
    """Levels of one camera's pixels, by channel."""

    def __init__(self) -> None:
        self.frames = 0
        self._histogram = np.zeros((3, 256), dtype=np.int64)

    def add(self, pixels: np.ndarray) -> None:
        """Count a frame, (height, width, 3) uint8."""
        rows, columns = (max(1, size // _SAMPLED_PIXELS) for size in pixels.shape[:2])
        for channel in range(3):
            thinned = np.ascontiguousarray(pixels[::rows, ::columns, channel])
            self._histogram[channel] += np.bincount(thinned.ravel(), minlength=256)
        self.frames += 1

    def merge(self, other: PixelStatistics) -> None:
        """Count all that another one has counted."""
        self.frames += other.frames
        self._histogram += other._histogram

    def statistics(self) -> Statistics:
        """Return the same as `vector_statistics`, each (3, 1, 1), of levels from 0 to 1."""
        shares = self._histogram / self._histogram.sum(axis=1, keepdims=True)
        mean = shares @ _LEVELS
        below = shares.cumsum(axis=1)
        found = {
            'min': np.array([_LEVELS[np.flatnonzero(row)[0]] for row in self._histogram]),
            'max': np.array([_LEVELS[np.flatnonzero(row)[-1]] for row in self._histogram]),
            'mean': mean,
            'std': np.sqrt(np.maximum(shares @ _LEVELS**2 - mean**2, 0.0)),
        }
        for name, q in QUANTILES.items():
            found[name] = _LEVELS[np.minimum((below < q - 1e-12).sum(axis=1), 255)]
        shaped = {name: values.reshape(3, 1, 1) for name, values in found.items()}
        return shaped | {'count': np.array([self.frames])}
