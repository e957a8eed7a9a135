"""Set reach and profile of the middleware before a process joins a graph.

Nothing here imports ROS 2: the environment is read by `rclpy.init` and by child processes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
# How far discovery reaches: of Iron and later, and of Humble.
_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'
_LOCAL = 'ROS_LOCALHOST_ONLY'
REACH_VARIABLES = (_RANGE, _LOCAL)
# Of more the ports would be beyond the last.
HIGHEST_DOMAIN = 232
_MB = 1 << 20
_STATIC_PEERS = 'ROS_STATIC_PEERS'


def stay_on_this_machine(environment: MutableMapping[str, str]) -> None:
    environment.setdefault(_RANGE, 'LOCALHOST')
    # Humble knows only its predecessor, which later ones warn about.
    if _is_humble(environment):
        environment.setdefault(_LOCAL, '1')


def lossless_images(environment: Mapping[str, str], config: Path) -> dict[str, str]:
    """Return the variables that choose the profile for large images, from `config`/fastdds.xml.

    Empty where the user has a profile, or another middleware than Fast DDS.
    """
    if not is_fast_dds(environment) or any(map(environment.get, PROFILE_VARIABLES)):
        return {}
    return dict.fromkeys(PROFILE_VARIABLES, str(config / 'fastdds.xml'))


def keep_to_udp(environment: MutableMapping[str, str], config: Path) -> None:
    """Set the executor's profile, one without shared memory; call before `rclpy.init`.

    Fast DDS keeps every thread of a process from sending while one of them waits, for 0.33 s, for
    a newcomer's shared memory (config/fastdds_executor.xml has the details). A user's own profile
    or another middleware stays in force. On a graph that stays on this machine ROS 2 adds shared
    memory to any profile, so the reach is left to a profile with the loopback device alone. Static
    peers, which ROS 2 adds itself, need the reach as it is.
    """
    on_this_machine = _stays_on_this_machine(environment)
    if not is_fast_dds(environment) or (on_this_machine and environment.get(_STATIC_PEERS)):
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


def why_no_shared_memory(environment: Mapping[str, str], folder: Path = Path('/dev/shm')) -> str:
    """Return why Fast DDS has no shared memory in `folder`, beside its own words; empty if it has.

    `environment` is the process's before `rclpy.init`.
    """
    if not is_fast_dds(environment) or not folder.is_dir():
        return ''
    wanted = _segment_bytes(environment)
    usage = shutil.disk_usage(folder)
    if usage.free >= wanted:
        return ''
    return (
        f'{folder} has {usage.free / _MB:.0f} MB free of {usage.total / _MB:.0f}, and Fast DDS '
        f'wants {wanted / _MB:.0f} for this process: messages go by UDP and large images are lost. '
        f'Remove what fills it (du -a {folder}; fastdds shm clean), or give the container more '
        '(--shm-size=1g)'
    )


def _segment_bytes(environment: Mapping[str, str]) -> int:
    """Return the shared memory that a participant takes; 0 where its profile has none."""
    for given in filter(None, map(environment.get, PROFILE_VARIABLES)):
        with suppress(OSError):
            profile = Path(given).read_text(errors='replace')
            if found := re.search(r'<segment_size>\s*(\d+)', profile):
                return int(found[1]) + _MB
            if '<useBuiltinTransports>false' in profile and '<type>SHM' not in profile:
                return 0
    return 2 * _MB


def describe_reach(environment: Mapping[str, str]) -> str:
    """Describe the graph that this process is in, by the variables that choose it."""
    reach = environment.get(_RANGE)
    profiles = {Path(environment.get(name, '')).name for name in PROFILE_VARIABLES}
    # `keep_to_udp` has left the reach to the profile.
    if 'fastdds_executor_localhost.xml' in profiles:
        reach = 'LOCALHOST'
    domain = environment.get('ROS_DOMAIN_ID') or '0'
    return f'ROS_DOMAIN_ID {domain}, {_RANGE} {reach or "SUBNET"}'


def is_fast_dds(environment: Mapping[str, str]) -> bool:
    """Return whether these variables choose Fast DDS, which ROS 2 takes where none is named."""
    middleware = environment.get('RMW_IMPLEMENTATION') or 'rmw_fastrtps_cpp'
    return middleware.startswith('rmw_fastrtps')


def _stays_on_this_machine(environment: Mapping[str, str]) -> bool:
    """Return whether ROS 2 keeps the graph on this machine; Humble does not know the range."""
    by_range = environment.get(_RANGE) == 'LOCALHOST' and not _is_humble(environment)
    return by_range or environment.get(_LOCAL) == '1'


def _is_humble(environment: Mapping[str, str]) -> bool:
    return environment.get('ROS_DISTRO') == 'humble'
