"""Smoothness of a motion: jerk where chunks meet and elsewhere.

The RMS over a motion of the joints' Euclidean norm of the third difference of commanded positions,
at the policy's step rate: it depends on neither interpolation nor ticks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

import numpy as np

from vla_runtime.types import CacheOutcome, CacheReport, Reuse

# --- Use of the prefix cache in an episode, counted from the inference reports


@dataclass(frozen=True)
class CacheUse:
    """Counts of a camera's image tokens, and of prefixes, by origin.

    `hit`: unchanged input; `reused`: changed within the limits of `bounded` (prefixes: or on
    reused image tokens); `run`: by the network.
    """

    images_hit: int = 0
    images_reused: int = 0
    images_run: int = 0
    prefixes_hit: int = 0
    prefixes_reused: int = 0
    prefixes_run: int = 0

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def images_saved(self) -> float:
        """Fraction of image tokens that needed no run, 0 to 1; NaN where none were needed."""
        return _fraction(self.images_hit + self.images_reused, self.images_run)

    @property
    def prefixes_saved(self) -> float:
        """Fraction of prefixes that needed no run, likewise."""
        return _fraction(self.prefixes_hit + self.prefixes_reused, self.prefixes_run)


def cache_use_of(report: CacheReport) -> CacheUse:
    """Count one inference's part."""
    return CacheUse(*_count(report.images.values()), *_count(report.prefixes))


def _count(outcomes: Collection[CacheOutcome]) -> tuple[int, int, int]:
    """Hit, reused, run."""
    # Nothing in a prefix on reused images has changed since it was made, but its images have.
    hits = sum(one.reuse is Reuse.HIT and not one.on_reused_images for one in outcomes)
    runs = sum(not one.found for one in outcomes)
    return hits, len(outcomes) - hits - runs, runs


def _fraction(saved: int, run: int) -> float:
    return saved / (saved + run) if saved + run else float('nan')


# --------------------------------------------------------------------------------------------------


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
