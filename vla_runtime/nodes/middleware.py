"""Set reach and profile of the middleware before a process joins a graph.

Nothing here imports ROS 2: the environment is read by `rclpy.init` and by child processes.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
# How far discovery reaches: of Iron and later, and of Humble.
_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'
_LOCAL = 'ROS_LOCALHOST_ONLY'
REACH_VARIABLES = (_RANGE, _LOCAL)
_STATIC_PEERS = 'ROS_STATIC_PEERS'


def stay_on_this_machine(environment: MutableMapping[str, str]) -> None:
    """Keep the graph on this machine, unless the environment has another reach."""
    environment.setdefault(_RANGE, 'LOCALHOST')
    # Humble knows only its predecessor, which later ones warn about.
    if _is_humble(environment):
        environment.setdefault(_LOCAL, '1')


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
    machine ROS 2 adds shared memory to any profile, so the reach too is left to a profile, which
    has the loopback device alone. Static peers, which ROS 2 adds itself, need the reach as it is.

    Args:
        environment: environment variables of this process.
        config: folder with fastdds.xml and the executor's profile.
    """
    on_this_machine = _stays_on_this_machine(environment)
    if not _is_fast_dds(environment) or (on_this_machine and environment.get(_STATIC_PEERS)):
        return
    shipped = (config / 'fastdds.xml').read_bytes()
    for given in filter(None, map(environment.get, PROFILE_VARIABLES)):
        if not Path(given).is_file() or Path(given).read_bytes() != shipped:
            return
    profile = 'fastdds_executor.xml'
    if on_this_machine:
        profile = 'fastdds_executor_localhost.xml'
        environment[_RANGE] = 'SYSTEM_DEFAULT'
        # A '0' would be a reach of its own to Jazzy, the network's.
        environment.pop(_LOCAL, None)
    environment.update(dict.fromkeys(PROFILE_VARIABLES, str(config / profile)))


def describe_reach(environment: Mapping[str, str]) -> str:
    """Describe the graph that this process is in, by the variables that choose it."""
    reach = environment.get(_RANGE)
    profiles = {Path(environment.get(name, '')).name for name in PROFILE_VARIABLES}
    # `keep_to_udp` has left the reach to the profile.
    if 'fastdds_executor_localhost.xml' in profiles:
        reach = 'LOCALHOST'
    domain = environment.get('ROS_DOMAIN_ID') or '0'
    return f'ROS_DOMAIN_ID {domain}, {_RANGE} {reach or "SUBNET"}'


def _is_fast_dds(environment: Mapping[str, str]) -> bool:
    middleware = environment.get('RMW_IMPLEMENTATION') or 'rmw_fastrtps_cpp'
    return middleware.startswith('rmw_fastrtps')


def _stays_on_this_machine(environment: Mapping[str, str]) -> bool:
    """Return whether ROS 2 keeps the graph on this machine; Humble does not know the range."""
    by_range = environment.get(_RANGE) == 'LOCALHOST' and not _is_humble(environment)
    return by_range or environment.get(_LOCAL) == '1'


def _is_humble(environment: Mapping[str, str]) -> bool:
    return environment.get('ROS_DISTRO') == 'humble'
