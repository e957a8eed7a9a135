"""Ctrl-C and its relatives as a wish that is looked at, instead of an exception anywhere.

Imports nothing that takes time, so that it can be there before whatever does.

Invariants:
- from entering `interruptible` to leaving it, SIGINT, SIGTERM and SIGHUP do not end the process,
  however many come: `ros2 launch` sends a SIGINT of its own after the terminal's;
- the first one is the wish; from then on all of them are ignored to the very end of the process,
  the interpreter's own finalisation included;
- Ctrl-\\ (SIGQUIT) is left as it is: it ends the process at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HOW = {
    signal.SIGINT: 'ended with Ctrl-C',
    signal.SIGTERM: 'ended by SIGTERM',
    signal.SIGHUP: 'ended by SIGHUP: its terminal was closed',
}


class Interrupt:
    """The end that a signal asks for.

    A plain attribute: the lock of a `threading.Event` may be held by the very thread that the
    handler interrupts.

    Attributes:
        wanted: since the first signal.
        how: what came first, for a person; '' when nothing did.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.how = ''

    def want(self, number: int, _: object = None) -> None:
        """Note a signal; this is its handler."""
        self.wanted = True
        self.how = self.how or _HOW[signal.Signals(number)]


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take the signals.

    What handled them before does so again afterwards, unless there was one: then the process is
    about to end, and no more of them is wanted.
    """
    interrupt = Interrupt()
    before = take_signals(interrupt.want)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if interrupt.wanted else handler)


def take_signals(handler: Callable[[int, Any], Any]) -> dict[signal.Signals, Any]:
    """Let a function handle the signals.

    A SIGHUP that is ignored stays ignored: `nohup` asks for that.

    Returns:
        signal to the handler before
    """
    return {
        number: signal.signal(number, handler)
        for number in _HOW
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
