"""Latch closed by too many clamped chunks in a row; only the operator opens it."""

from __future__ import annotations


class ClampLatch:
    """Counts clamped chunks in a row; it may outlive the executor that counts with it.

    Args:
        allowed: number of clamped chunks in a row that closes it; 0 never does.
        cause: what closed it in the process before this one; empty: it is open.
        reset_call: what a person types to open it.

    Attributes:
        cause: joint, value and limit that closed it; empty while it is open.
    """

    def __init__(self, allowed: int, *, cause: str = '', reset_call: str = '~/reset') -> None:
        if allowed < 0:
            raise ValueError(f'clamp_latch is {allowed}, expected 0 (never) or more')
        self._allowed = allowed
        self._reset_call = reset_call
        self._in_row = 0
        self.cause = cause

    @property
    def closed(self) -> bool:
        return bool(self.cause)

    def count(self, clamped: str) -> None:
        """Count a usable chunk, and what was clamped of it in words; '' restarts the count."""
        self._in_row = self._in_row + 1 if clamped else 0
        if 0 < self._allowed <= self._in_row and not self.closed:
            self.cause = clamped

    def open(self) -> None:
        """Open the latch and count from zero; only the operator may ask for it."""
        self._in_row = 0
        self.cause = ''

    @property
    def text(self) -> str:
        """Reason of the closed latch, and what opens it."""
        return (
            f'{self._allowed} chunks in a row were outside the limits, the last by {self.cause}. '
            'Look at what the policy wants, or widen that limit if the robot may go there; then '
            f'{self._reset_call} (a stopped robot needs ~/start after it)'
        )
