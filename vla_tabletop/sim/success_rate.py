"""Success rate with its confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SuccessRate:
    """Successes out of episodes."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        return self.successes / self.episodes

    def interval(self) -> tuple[float, float]:
        """Wilson's score interval of 95% (Wilson 1927)."""
        n, p, z = self.episodes, self.rate, 1.959964
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(centre - half, 0.0), min(centre + half, 1.0)

    def __str__(self) -> str:
        low, high = self.interval()
        return f'{self.successes}/{self.episodes} [{100 * low:.0f}, {100 * high:.0f}]%'
