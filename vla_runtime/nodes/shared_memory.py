"""Fast DDS's shared memory: remove what killed processes left, and detect lost ports.

Each participant listens on ports: files `fastrtps_portN` of /dev/shm, each with a lock file
`fastrtps_portN_el` that the listener holds; `fastdds_portN` since Fast DDS 3 (Kilted). Every sender
maps the file that has the name when it looks.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path('/dev/shm')
_SEGMENTS = ('fastrtps_', 'fastdds_')
_LOCK = '_el'
# Fast DDS makes a lock file and locks it a moment later.
_MIN_AGE_S = 60.0
_PORT_LOCK = re.compile(r'.*/(fast(?:rtps|dds)_port\d+)_el( \(deleted\))?')
_PORT_MAPPING = re.compile(
    r'\S+ \S+ \S+ \S+ (\d+) +\S*/(fast(?:rtps|dds)_port\d+)(?: \(deleted\))?\n'
)
_LOOK_S = 2.0
# While a port may have been lost.
_LOOK_AGAIN_S = 0.5
# A process that stood still so long may lose its port on waking, or a moment later.
_STOP_S = 0.5
_WAKES_S = 5.0


class PortWatch:
    """Detects that this process can no longer be reached through shared memory.

    A process that stands still for more than a second (SIGSTOP, a debugger, swapping) is taken for
    dead, and whoever sends to it makes its port anew. On waking both sides look for the file. One
    stop in 300 on an idle machine, one in ten on a busy one (Fast DDS 2.14.5), they end with
    different files: senders test the lock outside of the port's mutex, and a lock let go at that
    moment looks like a dead process's. The process then waits at a file without a name, for good.
    """

    def __init__(self) -> None:
        self._due_s = 0.0
        self._asked_s: float | None = None
        self._woke_s = -math.inf
        # A listener that lost its port has lost its lock too, so that both are remembered.
        self._own: set[str] = set()
        self._suspects: frozenset[str] = frozenset()

    def lost(self, now_s: float) -> frozenset[str]:
        """Look every two seconds; every half second after a stop of this process or on suspicion.

        To be called many times a second, with monotonic time.

        Returns:
            Names, such as 'fastrtps_port7411', of ports lost in this look and the one before: a
            port that is being made anew is found by its listener within a moment. Empty on other
            systems than Linux.
        """
        if self._asked_s is not None and now_s - self._asked_s > _STOP_S:
            self._woke_s = self._due_s = now_s
        self._asked_s = now_s
        if now_s < self._due_s:
            return frozenset()
        self._own |= _locked_ports()
        before, self._suspects = self._suspects, _unnamed(self._own)
        soon = self._suspects or now_s - self._woke_s < _WAKES_S
        self._due_s = now_s + (_LOOK_AGAIN_S if soon else _LOOK_S)
        return before & self._suspects


def _locked_ports(*, named: bool = False) -> set[str]:
    """Return the ports that this process listens on; `named`: those whose lock file has a name."""
    found = set()
    with suppress(OSError):
        for link in Path('/proc/self/fd').iterdir():
            # Others close files meanwhile.
            with suppress(OSError):
                match = _PORT_LOCK.fullmatch(os.readlink(link))
                if match and not (named and match[2]):
                    found.add(match[1])
    return found


def _unnamed(ports: set[str]) -> frozenset[str]:
    """Return those that this process maps, though not the file that has their name."""
    mapped: dict[str, set[int]] = {}
    if ports:
        with suppress(OSError), open('/proc/self/maps', errors='replace') as maps:
            for match in filter(None, map(_PORT_MAPPING.fullmatch, maps)):
                mapped.setdefault(match[2], set()).add(int(match[1]))
    return frozenset(
        port
        for port in ports
        if port in mapped and _inode(_SHARED_MEMORY / port) not in mapped[port]
    )


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def remove_locks_of_lost_ports() -> None:
    """Remove the lock files of this process's lost ports; call just before the process ends.

    The senders have made a file of the port's name meanwhile. Whoever opens the port next takes a
    lock file without a lock for a dead listener's, and replaces the senders' file by its own. Each
    sender then ends its nameless file and removes the newcomer's, which nobody can reach then.
    """
    for port in _unnamed(_locked_ports(named=True)):
        (_SHARED_MEMORY / f'{port}{_LOCK}').unlink(missing_ok=True)


def remove_dead_segments(folder: Path = _SHARED_MEMORY) -> int:
    """Remove the shared memory of Fast DDS processes that were killed; `fastdds shm clean` does so.

    A process that is killed (SIGKILL, out of memory) leaves its segment: up to 67 MB each with the
    shipped profile, again with every respawn. A living process holds a lock on a file beside it.

    Returns:
        Segments removed; those of other users, and those that are a minute old or less, stay.
    """
    removed = 0
    for lock in folder.glob(f'*{_LOCK}'):
        segment = lock.with_name(lock.name.removesuffix(_LOCK))
        # Ports have a lock of the same name, and Fast DDS takes over dead ones itself.
        if not segment.name.startswith(_SEGMENTS) or 'port' in segment.name:
            continue
        # Gone meanwhile, another user's, or in use.
        with suppress(OSError):
            removed += _remove_if_dead(lock, segment)
    return removed


def _remove_if_dead(lock: Path, segment: Path) -> bool:
    if time.time() - lock.stat().st_mtime < _MIN_AGE_S:
        return False
    file = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        segment.unlink(missing_ok=True)
        lock.unlink()
        return True
    finally:
        os.close(file)
