"""Ctrl-C and its relatives as a wish that is looked at, instead of an exception anywhere.

Invariant: from entering `interruptible` to leaving it, SIGINT, SIGTERM and SIGHUP do not end the
process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_HOW = {
    signal.SIGINT: 'ended with Ctrl-C',
    signal.SIGTERM: 'ended by SIGTERM',
    signal.SIGHUP: 'ended by SIGHUP: its terminal was closed',
}


class Interrupt:
    """Whether somebody wants the end.

    Attributes:
        wanted: since `acknowledge`.
        how: what came first, for a person; '' when nothing did.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.how = ''

    def want(self, number: int, _: object = None) -> None:
        """The signal handler."""
        self.wanted = True
        self.how = self.how or _HOW[signal.Signals(number)]

    def acknowledge(self) -> None:
        """The end has begun; the next signal is a new wish."""
        self.wanted = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take the signals; what handled them before does so again afterwards.

    A SIGHUP that is ignored stays so: that is what `nohup` is for.
    """
    interrupt = Interrupt()
    before = {
        number: signal.signal(number, interrupt.want)
        for number in _HOW
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
