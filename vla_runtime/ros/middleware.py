"""Set reach and profile of the middleware before a process joins a graph.

Nothing here imports ROS 2: the environment is read by `rclpy.init` and by child processes.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'
# How far discovery reaches: of Iron and later, and of Humble.
REACH_VARIABLES = (_RANGE, 'ROS_LOCALHOST_ONLY')


def stay_on_this_machine(environment: MutableMapping[str, str]) -> None:
    """Keep the graph on this machine, unless the environment has another reach."""
    environment.setdefault(_RANGE, 'LOCALHOST')
    # Humble knows only its predecessor, which later ones warn about.
    if environment.get('ROS_DISTRO') == 'humble':
        environment.setdefault('ROS_LOCALHOST_ONLY', '1')


def lossless_images(environment: Mapping[str, str], config: Path) -> dict[str, str]:
    """Return the variables that choose the profile for large images.

    Args:
        environment: environment variables of the processes.
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
        environment: environment variables of this process.
        config: folder with fastdds.xml and the executor's profile.
    """
    if not _is_fast_dds(environment) or environment.get(_RANGE) == 'LOCALHOST':
        return
    shipped = (config / 'fastdds.xml').read_bytes()
    for given in filter(None, map(environment.get, PROFILE_VARIABLES)):
        if not Path(given).is_file() or Path(given).read_bytes() != shipped:
            return
    environment.update(dict.fromkeys(PROFILE_VARIABLES, str(config / 'fastdds_executor.xml')))


def _is_fast_dds(environment: Mapping[str, str]) -> bool:
    middleware = environment.get('RMW_IMPLEMENTATION') or 'rmw_fastrtps_cpp'
    return middleware.startswith('rmw_fastrtps')
