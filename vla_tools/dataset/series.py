"""Time series of measured or commanded numbers, and the values in force at a given time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# Age of what is not there yet.
NEVER_NS = np.iinfo(np.int64).max
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class JointSeries:
    """Rows of numbers over time.

    Attributes:
        names: names of the columns.
        times_ns: times of the rows, rising.
        rows: each of them one number a name.
    """

    names: tuple[str, ...]
    times_ns: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)

    def add(self, time_ns: int, row: list[float]) -> None:
        """Add a row; one that is not newer than the last, or not finite, is left out."""
        newer = not self.times_ns or time_ns > self.times_ns[-1]
        # Neither NaN nor infinity, nor what float32 cannot hold.
        if newer and len(row) == len(self.names) and all(abs(value) < _LARGEST for value in row):
            self.times_ns.append(time_ns)
            self.rows.append(row)

    def at(self, times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest rows at or before these times.

        Args:
            times_ns: (n,) int64.

        Returns:
            rows (n, names) float32, and their ages (n,) int64, ns; `NEVER_NS` before the first.
        """
        values = np.array(self.rows, dtype=np.float32).reshape(-1, len(self.names))
        index, ages = newest(np.array(self.times_ns, dtype=np.int64), times_ns)
        if not len(values):
            return np.zeros((len(times_ns), len(self.names)), np.float32), ages
        return values[index], ages


def newest(known_ns: np.ndarray, times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the newest known time at or before each time, and its age.

    Args:
        known_ns: (k,) int64, rising.
        times_ns: (n,) int64.

    Returns:
        indices (n,), 0 where there is none, and ages (n,) int64, `NEVER_NS` where there is none.
    """
    after = np.searchsorted(known_ns, times_ns, side='right')
    index = np.maximum(after - 1, 0)
    ages = np.full(len(times_ns), NEVER_NS, dtype=np.int64)
    there = after > 0
    ages[there] = times_ns[there] - known_ns[index[there]]
    return index, ages
