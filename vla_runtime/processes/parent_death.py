"""Children that end with the process that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

# Set by the launch files: process id of the launch that a node is to end with.
LAUNCH_VARIABLE = 'VLA_RUNTIME_LAUNCH_PID'

_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec only what needs no lock is safe.
_LIBC = ctypes.CDLL(None) if sys.platform == 'linux' else None


def dies_with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` for `subprocess.Popen` that ties the child to the starting thread."""
    parent = os.getpid()
    return lambda: die_with(parent)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends; prctl(2).

    Does nothing on other systems than Linux.
    """
    if _tie(signal.SIGKILL) and os.getppid() != parent:
        # It died before.
        os._exit(1)


def end_with_launch() -> None:
    """Have the kernel send this process a SIGTERM when the launch that started it ends.

    A launch that is killed ends without a word to its nodes, which would go on to move the robot.
    Does nothing for a process that something else started, and on other systems than Linux.
    """
    launch = os.environ.get(LAUNCH_VARIABLE)
    if _LIBC is None or launch is None:
        return
    if launch == str(os.getppid()):
        _tie(signal.SIGTERM)
    # It may have died before, since it started this process or while Python did.
    if launch != str(os.getppid()) and _has_ended(launch):
        os.write(2, f'ends at once: its launch, process {launch}, has ended\n'.encode())
        signal.raise_signal(signal.SIGTERM)


def _has_ended(process: str) -> bool:
    """Return whether no process of this id (decimal) runs."""
    try:
        with open(f'/proc/{process}/stat', encoding='utf-8', errors='replace') as file:
            # Ended, but its own parent has not asked for its exit code yet.
            return file.read().rpartition(') ')[2][:1] in ('Z', 'X')
    except (FileNotFoundError, ProcessLookupError):
        return True


def _tie(number: signal.Signals) -> bool:
    """Have a signal sent at the parent's end; False where the system cannot."""
    if _LIBC is None:
        return False
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return True
