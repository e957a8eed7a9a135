"""Ctrl-C, SIGTERM and SIGHUP as a flag to poll, instead of an exception at any line.

Imports nothing that takes time, so that it can be there before whatever does.

Invariants:
- in `interruptible`, SIGINT, SIGTERM and SIGHUP do not end the process, however many come;
- the first one is the wish; all others are ignored to the very end of the process;
- none is lost while another program takes the place of this one (`keep_signals`);
- Ctrl-\\ (SIGQUIT) is left as it is: it ends the process at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HOW = {
    signal.SIGINT: 'ended with Ctrl-C',
    signal.SIGTERM: 'ended by SIGTERM',
    signal.SIGHUP: 'ended by SIGHUP: its terminal was closed',
}

# Descriptor of the pipe with the signals that `keep_signals` kept.
_KEPT = 'VLA_RUNTIME_SIGNALS'


class Interrupt:
    """Request to end, made by a signal; `how` is words for the first signal, '' without one.

    A plain attribute: the lock of a `threading.Event` may be held by the very thread that the
    handler interrupts.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.how = ''

    def want(self, number: int, _: object = None) -> None:
        self.wanted = True
        self.how = self.how or _HOW[signal.Signals(number)]


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Handle SIGINT, SIGTERM and SIGHUP as a request to end.

    Former handlers are restored, unless there was a request: then the process is about to end.
    """
    interrupt = Interrupt()
    before = take_signals(interrupt.want)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if interrupt.wanted else handler)


def take_signals(handler: Callable[[int, Any], Any]) -> dict[signal.Signals, Any]:
    """Let a function handle the signals; return each signal's handler before.

    A SIGHUP that is ignored stays ignored, as `nohup` asks. What was kept for this program comes
    now.
    """
    before = {
        number: signal.signal(number, handler)
        for number in _HOW
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    kept = _kept_signals()
    for number in before:
        if number in kept:
            signal.raise_signal(number)
    return before


def keep_signals() -> None:
    """Keep the signals from now on for the program that takes the place of this one by `exec`.

    The main thread blocks them: mask and pending signals outlive `exec`. Another thread that gets
    one leaves its number in a pipe, which outlives it too.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_inheritable(reader, True)
    os.environ[_KEPT] = str(reader)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HOW)


def _kept_signals() -> bytes:
    """Let the signals through again; returns the numbers in the pipe, none at a first start."""
    reader = os.environ.pop(_KEPT, None)
    if reader is None:
        return b''
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HOW)
    with open(int(reader), 'rb', buffering=0) as pipe:
        # None where nothing is in it, and a child of the program before still holds the other end.
        return pipe.read() or b''
