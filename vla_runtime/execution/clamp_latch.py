"""Latch closed by too many clamped chunks in a row; only the operator opens it."""

from __future__ import annotations


class ClampLatch:
    """Counts clamped chunks in a row.

    It may outlive the executor that counts with it: the next one, of a node that was deactivated
    and activated again, finds it as the last one left it.

    Args:
        allowed: number of clamped chunks in a row that closes it; 0 never does.
        cause: what closed it in the process before this one; empty: it is open.
        reset_call: what a person types to open it.

    Attributes:
        cause: what was clamped in the chunk that closed it: joint, value and limit; empty while it
            is open.
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
        """True until the operator's reset."""
        return bool(self.cause)

    def count(self, clamped: str) -> None:
        """Count a usable chunk; close the latch after too many clamped ones in a row.

        Args:
            clamped: what was clamped, in words; empty when nothing was.
        """
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
