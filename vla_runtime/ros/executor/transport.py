"""Fast DDS profile of the executor's process: one without shared memory.

Fast DDS keeps every thread of a process from sending while one of them waits, for 0.33 s, for a
newcomer's shared memory (config/fastdds_executor.xml has the details).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
_RANGE = 'ROS_AUTOMATIC_DISCOVERY_RANGE'


def keep_to_udp(environment: MutableMapping[str, str], config: Path) -> None:
    """Set the executor's profile; call before `rclpy.init`.

    A profile of the user's own stays in force, and so does another middleware. On a graph that
    stays on this machine (`LOCALHOST`) nothing is changed: ROS 2 adds shared memory there by
    itself, and without it participants see one another so late that a service's answer can be
    lost.

    Args:
        environment: of this process.
        config: folder with fastdds.xml and the executor's profile.
    """
    middleware = environment.get('RMW_IMPLEMENTATION') or 'rmw_fastrtps_cpp'
    if not middleware.startswith('rmw_fastrtps') or environment.get(_RANGE) == 'LOCALHOST':
        return
    shipped = (config / 'fastdds.xml').read_bytes()
    for given in filter(None, map(environment.get, PROFILE_VARIABLES)):
        if not Path(given).is_file() or Path(given).read_bytes() != shipped:
            return
    environment.update(dict.fromkeys(PROFILE_VARIABLES, str(config / 'fastdds_executor.xml')))
