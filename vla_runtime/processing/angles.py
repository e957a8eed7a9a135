"""Angles of a state as their sines and cosines, group by group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def with_angles(
    normalised: np.ndarray, state: np.ndarray, groups: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Put the sines of each group, then its cosines, where its normalised numbers stand.

    Args:
        normalised: (S,) float32.
        state: (S,) float32, as it was before.
        groups: first dimension and number of each, ascending.

    Returns:
        (S + numbers of all groups,) float32
    """
    parts, end = [], 0
    for first, count in groups:
        angles = state[first : first + count]
        parts += [normalised[end:first], np.sin(angles), np.cos(angles)]
        end = first + count
    return np.concatenate([*parts, normalised[end:]]).astype(np.float32, copy=False)
