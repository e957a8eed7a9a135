"""Set reach, profile and shared memory of the middleware before a process joins a graph.

Nothing here imports ROS 2: the environment is read by `rclpy.init` and by child processes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'
# How far discovery reaches: of Iron and later, and of Humble.
REACH_VARIABLES = (_RANGE, 'ROS_LOCALHOST_ONLY')
_SHARED_MEMORY = Path('/dev/shm')
_SEGMENTS = 'fastrtps_'
_LOCK = '_el'
# Fast DDS makes a lock file and locks it a moment later.
_MIN_AGE_S = 60.0


def stay_on_this_machine(environment: MutableMapping[str, str]) -> None:
    """Keep the graph on this machine, unless the environment has another reach."""
    environment.setdefault(_RANGE, 'LOCALHOST')
    # Humble knows only its predecessor, which later ones warn about.
    if environment.get('ROS_DISTRO') == 'humble':
        environment.setdefault('ROS_LOCALHOST_ONLY', '1')


def lossless_images(environment: Mapping[str, str], config: Path) -> dict[str, str]:
    """Return the variables that choose the profile for large images.

    Args:
        environment: of the processes.
        config: folder with fastdds.xml.

    Returns:
        name to value; empty where the user has a profile, or another middleware than Fast DDS
    """
    if not _is_fast_dds(environment) or any(map(environment.get, PROFILE_VARIABLES)):
        return {}
    return dict.fromkeys(PROFILE_VARIABLES, str(config / 'fastdds.xml'))


def keep_to_udp(environment: MutableMapping[str, str], config: Path) -> None:
    """Set the executor's profile, one without shared memory; call before `rclpy.init`.

    Fast DDS keeps every thread of a process from sending while one of them waits, for 0.33 s, for
    a newcomer's shared memory (config/fastdds_executor.xml has the details). A profile of the
    user's own stays in force, and so does another middleware. On a graph that stays on this
    machine (`LOCALHOST`) nothing is changed: ROS 2 adds shared memory there by itself, and without
    it participants see one another so late that a service's answer can be lost.

    Args:
        environment: of this process.
        config: folder with fastdds.xml and the executor's profile.
    """
    if not _is_fast_dds(environment) or environment.get(_RANGE) == 'LOCALHOST':
        return
    shipped = (config / 'fastdds.xml').read_bytes()
    for given in filter(None, map(environment.get, PROFILE_VARIABLES)):
        if not Path(given).is_file() or Path(given).read_bytes() != shipped:
            return
    environment.update(dict.fromkeys(PROFILE_VARIABLES, str(config / 'fastdds_executor.xml')))


def remove_dead_segments(folder: Path = _SHARED_MEMORY) -> int:
    """Remove the shared memory of Fast DDS processes that were killed; `fastdds shm clean` does so.

    A process that ends by SIGKILL, or by the kernel for want of memory, leaves its segment: up to
    67 MB each with the shipped profile. A node that is respawned again and again would fill the
    memory. A living process holds a lock on a file beside its segment.

    Args:
        folder: of the segments.

    Returns:
        segments removed; those of other users, and those that are a minute old or less, stay
    """
    removed = 0
    for lock in folder.glob(f'{_SEGMENTS}*{_LOCK}'):
        segment = lock.with_name(lock.name.removesuffix(_LOCK))
        # Ports have a lock of the same name, and Fast DDS takes over dead ones itself.
        if segment.name.startswith(f'{_SEGMENTS}port'):
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


def _is_fast_dds(environment: Mapping[str, str]) -> bool:
    middleware = environment.get('RMW_IMPLEMENTATION') or 'rmw_fastrtps_cpp'
    return middleware.startswith('rmw_fastrtps')
