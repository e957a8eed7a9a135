"""Silences of a stream of messages that are long against its usual intervals."""

from __future__ import annotations

from dataclasses import dataclass

# A shorter silence is a busy machine's; one is long after so many usual intervals.
_SHORTEST_S = 0.03
_INTERVALS = 3
_SMOOTHING = 0.1


@dataclass(frozen=True)
class Silence:
    """A silence that ended at a steady time and lasted so many seconds."""

    ended_s: float
    lasted_s: float


class StreamSilences:
    """Tells silences of one stream from its usual intervals; `newest` is None before the first."""

    def __init__(self) -> None:
        self._heard_s: float | None = None
        self._interval_s = 0.0
        self.newest: Silence | None = None

    @property
    def longest_usual_s(self) -> float:
        """Time without a message up to which the stream is not silent."""
        return max(_SHORTEST_S, _INTERVALS * self._interval_s)

    def hear(self, now_s: float) -> None:
        if self._heard_s is not None:
            elapsed_s = now_s - self._heard_s
            if elapsed_s > self.longest_usual_s:
                self.newest = Silence(now_s, elapsed_s)
            self._interval_s += _SMOOTHING * (elapsed_s - self._interval_s)
        self._heard_s = now_s

    def pause(self) -> None:
        """Note that the stream has a reason to be silent: what comes next ends no silence."""
        self._heard_s = None
