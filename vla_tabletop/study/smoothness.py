"""Smoothness of a motion: jerk where chunks meet and elsewhere.

Jerk is the third difference of the commanded positions at the policy's step rate, its Euclidean
norm over the joints, and the root mean square of that over a motion. At the step rate it does not
depend on how the executor interpolates or how often it ticks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Jerk:
    """Root mean square over a motion, joint units per s³; NaN where there is nothing to measure.

    Attributes:
        seams: over the windows that reach across a seam.
        elsewhere: over those that reach across none.
        overall: over all, where the robot sets out from standstill among them.
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
    """Jerk of a motion.

    Args:
        positions: (n, joints) commanded positions, one a step.
        seams: indices k such that row k is the last of one chunk and row k + 1 the first of the
            next.
        starts: likewise, where the robot set out from standstill: neither seam nor elsewhere.
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
