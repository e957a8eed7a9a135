"""Wall time per phase of one inference."""

from __future__ import annotations

from time import perf_counter


class PhaseClock:
    """Wall time per phase, in milliseconds; belongs to one request."""

    def __init__(self) -> None:
        self._start = self._last = perf_counter()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to `phase`."""
        now = perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + (now - self._last) * 1e3
        self._last = now

    def milliseconds(self) -> dict[str, float]:
        """Return milliseconds per phase, and their sum as `total`."""
        return {**self._phases, 'total': (self._last - self._start) * 1e3}
