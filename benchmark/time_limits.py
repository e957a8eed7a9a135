"""Limits of time: of one part of a run, and of the whole process."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

# A library that swallowed the first interruption meets the next.
_AGAIN_S = 5.0


class OverTimeError(BaseException):
    """A part took longer than it may.

    No `Exception`: what tries one way after another would take it for a way that does not work.
    """


class Clock:
    """Progress lines with the time since the start, and what is left of a budget.

    Args:
        budget_s: seconds from now.
    """

    def __init__(self, budget_s: float) -> None:
        self._start = perf_counter()
        self.budget_s = budget_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; negative after it."""
        return self.budget_s - (perf_counter() - self._start)

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(f'[{perf_counter() - self._start:5.0f} s] {text}', flush=True)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OverTimeError in the block when it has run for so long; for the main thread.

    Python code is interrupted, and so are its waits; a call into a library that does not return is
    not (`ended_after`).
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OverTimeError(f'cut off after {seconds:.0f} s')

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the process with exit code 1 when the block has run for so long, whatever it waits for.

    The stacks of all threads are printed first. Files that are open are lost.
    """
    # Not sys.stderr: a test's has no descriptor.
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
