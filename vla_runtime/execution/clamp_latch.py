"""Latch closed by too many clamped chunks in a row; only the operator opens it."""

from __future__ import annotations


class ClampLatch:
    """Counts clamped chunks in a row.

    It may outlive the executor that counts with it: the next one, of a node that was deactivated
    and activated again, finds it as the last one left it.

    Args:
        allowed: number of clamped chunks in a row that closes it; 0 never does.
        closed: state in which the process before this one left it.
    """

    def __init__(self, allowed: int, *, closed: bool = False) -> None:
        if allowed < 0:
            raise ValueError(f'clamp_latch is {allowed}, expected 0 (never) or more')
        self._allowed = allowed
        self._in_row = 0
        self.closed = closed

    def count(self, *, clamped: bool) -> None:
        """Count a usable chunk; close the latch after too many clamped ones in a row."""
        self._in_row = self._in_row + 1 if clamped else 0
        if 0 < self._allowed <= self._in_row:
            self.closed = True

    def open(self) -> None:
        """Open the latch and count from zero; only the operator may ask for it."""
        self._in_row = 0
        self.closed = False

    @property
    def text(self) -> str:
        """Reason of the closed latch, and what opens it."""
        return (
            f'{self._allowed} chunks in a row were outside the limits; find out why, then reset '
            'the executor'
        )
