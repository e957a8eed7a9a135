"""Use of the prefix cache in an episode, counted from the inference reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

# One camera's or one prompt row's part of a report: what happened, in brackets why.
_PART = re.compile(r'\b(hit|reused|miss|off)(?: \(([^)]*)\))?(?:, |$)')


@dataclass(frozen=True)
class CacheUse:
    """Counts of image tokens of a camera, and of prefixes, that were found, reused or made.

    Attributes:
        images_hit: the same pixels as last time.
        images_reused: of pixels that have changed, within the limits of `bounded`.
        images_run: by the vision network; with the cache off all.
        prefixes_hit: everything in it the same as last time.
        prefixes_reused: of another state, or on reused image tokens.
        prefixes_run: by the prefix network, likewise.
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
        return _share(self.images_hit + self.images_reused, self.images_run)

    @property
    def prefixes_saved(self) -> float:
        """Fraction of prefixes that needed no run, likewise."""
        return _share(self.prefixes_hit + self.prefixes_reused, self.prefixes_run)


def cache_use_of(cache: Mapping[str, str]) -> CacheUse:
    """One inference's part, from `InferenceReport.cache`."""
    return CacheUse(*_count(cache['vision']), *_count(cache['prefix']))


def _count(text: str) -> tuple[int, int, int]:
    """Hit, reused, run."""
    parts = _PART.findall(text)
    # Nothing in such a prefix has changed since it was made, but its images have.
    hits = sum(what == 'hit' and 'on reused images' not in why for what, why in parts)
    runs = sum(what in ('miss', 'off') for what, _ in parts)
    return hits, len(parts) - hits - runs, runs


def _share(saved: int, run: int) -> float:
    return saved / (saved + run) if saved + run else float('nan')
