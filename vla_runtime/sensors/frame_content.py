"""What the pixels of one camera show of its faults: a frame that repeats, and black frames.

A driver that hangs, or a bridge that replays its buffer, sends one frame under ever new stamps. A
real sensor's noise makes each frame another one, so frames that are equal to the last bit for
seconds are one frame, or come from a simulated scene at rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Equal frames for so long, by the stamps, are no chance; so far apart two are compared.
_REPEATS_NS, _COMPARED_NS = 5_000_000_000, 500_000_000
# Of a black frame less than this share of the numbers, on a grid of pixels, is above this grey
# level: a dark sensor has noise and bright pixels.
_GREY_LEVEL, _SHARE, _GRID = 24, 0.01, 8
# So long, by the stamps, a status tells of a black frame.
_TOLD_NS = 10_000_000_000


class FrameContent:
    """Compares a camera's frames with one another, a few a second."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        # The first message of those that are equal, its stamp, and the stamp of the last.
        self._first: Any = None
        self._first_ns = self._last_ns = 0
        self._black = 0
        self._black_ns = 0

    def compare(self, stamp_ns: int, message: Any) -> None:
        """Compare the newest message, and its stamp, with the last one that was another."""
        first = self._first
        if first is not None and abs(stamp_ns - self._last_ns) < _COMPARED_NS:
            return
        self._last_ns = stamp_ns
        if first is None or not _equal(first.data, message.data):
            self._first, self._first_ns = message, stamp_ns

    def note_pixels(self, stamp_ns: int, pixels: np.ndarray) -> None:
        """Take the pixels that an inference uses, (height, width, 3) uint8."""
        grid = pixels[::_GRID, ::_GRID]
        if np.count_nonzero(grid > _GREY_LEVEL) < _SHARE * grid.size:
            self._black += 1
            self._black_ns = stamp_ns

    def warning(self, now_ns: int) -> str | None:
        """Describe what is wrong with the pixels at the newest frame's stamp; None for nothing."""
        if self._black and now_ns - self._black_ns < _TOLD_NS:
            return (
                f'{self._black} of the frames that were used are black, the last '
                f'{max(0, now_ns - self._black_ns) * 1e-9:.1f} s ago: the policy acts on what it '
                'does not see. Wait after a start of the camera until its exposure has settled, '
                'before ~/start; else look at its lens cap, its exposure and the light'
            )
        if self._last_ns - self._first_ns >= _REPEATS_NS:
            return (
                'one frame comes again and again: all pixels have been equal for '
                f'{(self._last_ns - self._first_ns) * 1e-9:.0f} s, under new stamps. Start the '
                "camera's driver again and look at its cable; only a simulated scene at rest has "
                'equal frames'
            )
        return None


def _equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and bool(
        np.array_equal(np.frombuffer(one, dtype=np.uint8), np.frombuffer(other, dtype=np.uint8))
    )
