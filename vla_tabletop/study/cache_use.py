"""Use of the prefix cache in an episode, counted from the inference reports."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from vla_runtime.types import CacheOutcome, CacheReport, Reuse


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
