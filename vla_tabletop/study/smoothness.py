"""Smoothness of a motion: jerk where chunks meet and elsewhere.

The RMS over a motion of the joints' Euclidean norm of the third difference of commanded positions,
at the policy's step rate: it depends on neither interpolation nor ticks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Jerk:
    """RMS over a motion, joint units per s³; NaN without data.

    `seams`: windows across a seam; `elsewhere`: windows across none; `overall`: all, starts from
    standstill included.
    """

    seams: float
    elsewhere: float
    overall: float


def jerk_of(
    positions: np.ndarray,
    step_time_s: float,
    seams: Collection[int],
    starts: Collection[int] = (),
) -> Jerk:
    """Jerk of (n, joints) commanded positions, one a step.

    `seams`: k where row k ends one chunk and row k + 1 begins the next; `starts`: likewise of
    starts from standstill, neither seam nor elsewhere.
    """
    if len(positions) < 4:
        return Jerk(np.nan, np.nan, np.nan)
    jerk = np.linalg.norm(np.diff(positions, n=3, axis=0), axis=1) / step_time_s**3
    # Window i is made of rows i to i + 3; it reaches across k where it has both k and k + 1.
    at_seam = _reaching_across(seams, len(jerk))
    at_start = _reaching_across(starts, len(jerk))
    return Jerk(_rms(jerk[at_seam & ~at_start]), _rms(jerk[~at_seam & ~at_start]), _rms(jerk))


def _reaching_across(places: Collection[int], windows: int) -> np.ndarray:
    mask = np.zeros(windows, dtype=bool)
    for k in places:
        mask[max(k - 2, 0) : max(k + 1, 0)] = True
    return mask


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else float('nan')
