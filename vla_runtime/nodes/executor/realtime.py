"""Real-time settings of the operating system for a punctual tick, as far as they are permitted."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from threading import Lock, Thread, current_thread
from weakref import WeakSet

# The longest that another thread of this process keeps the tick from the interpreter lock; Python's
# own default is 5 ms.
_SWITCH_INTERVAL_S = 0.0005

# Threads with a priority of their own. One that asks while another lists the process's threads
# would be set back to the priority of the others, hence the lock.
_preferred: WeakSet[Thread] = WeakSet()
_asking = Lock()


def share_interpreter() -> None:
    """Let the thread that ticks get the interpreter lock soon after it asks for it."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPU numbers from a text like `2` or `2,3`; none from an empty one.

    Raises:
        ValueError: anything else, or a CPU that this process cannot run on.
    """
    if not text.strip():
        return ()
    try:
        cpus = tuple(int(part) for part in text.split(','))
    except ValueError:
        raise ValueError(
            f"cpu_affinity is '{text}': expected CPU numbers with commas between them, like 2,3"
        ) from None
    available = os.sched_getaffinity(0)
    wrong = [cpu for cpu in cpus if cpu not in available]
    if wrong:
        raise ValueError(
            f"cpu_affinity is '{text}': CPU {wrong[0]} is not available here, only "
            f'{", ".join(map(str, sorted(available)))}'
        )
    return cpus


def prefer_this_thread(priority: int, cpus: tuple[int, ...]) -> list[str]:
    """Give the calling thread a real-time priority and CPUs of its own.

    The other threads of the process get the priority below it, but for those that asked for one
    themselves: one that holds the interpreter lock, or a lock of the middleware, keeps the tick
    waiting when another process takes its CPU.

    Args:
        priority: 1 to 99 for `SCHED_FIFO`, 0 to leave it.
        cpus: none to leave them.

    Returns:
        One line for whatever is not permitted.
    """
    problems = []
    if priority:
        try:
            with _asking:
                _prefer_others(max(priority - 1, 1))
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
                _preferred.add(current_thread())
        except OSError as error:
            problems.append(
                f'realtime_priority {priority} is not permitted ({error.strerror}): the tick runs '
                "at normal priority. Allow it with 'rtprio 98' for this user in "
                '/etc/security/limits.d, in a container with the capability SYS_NICE, or set '
                'realtime_priority to 0'
            )
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            problems.append(
                f'cpu_affinity {cpus} is not permitted ({error.strerror}): the tick runs on any '
                'CPU; set cpu_affinity to an empty text'
            )
    return problems


def _prefer_others(priority: int) -> None:
    """Give the threads without a priority of their own one; those that they start inherit it."""
    # The number of a thread that has ended may be another's by now.
    own = {thread.native_id for thread in _preferred if thread.is_alive()}
    for thread in map(int, os.listdir('/proc/self/task')):
        # One that has just ended.
        with suppress(ProcessLookupError):
            if thread not in own:
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))


class QuietGarbage:
    """Keeps the garbage collector out of the tick: while on, only `collect` collects."""

    def __init__(self) -> None:
        self.on = False

    def begin(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self.on = True

    def collect(self, *, everything: bool) -> None:
        """Collect what was made since `begin`; with `everything` older objects too."""
        gc.collect(2 if everything else 1)

    def end(self) -> None:
        self.on = False
        gc.unfreeze()
        gc.enable()
