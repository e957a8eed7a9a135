"""Children that end with the process that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec only what needs no lock is safe.
_LIBC = ctypes.CDLL(None) if sys.platform == 'linux' else None


def dies_with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` for `subprocess.Popen` that ties the child to this process.

    The thread that starts the child must live as long as the child shall.
    """
    parent = os.getpid()
    return lambda: die_with(parent)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; prctl(2).

    Does nothing on other systems than Linux.

    Args:
        parent: process id of who started this one.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The parent may have died before.
        if os.getppid() != parent:
            os._exit(1)
