"""Processes behind publishers: how a driver on this machine was started.

Fast DDS writes its vendor's number and the low half of the process's number into the first bytes
of an endpoint's identity (GuidPrefix). What the processes of other users were started with, and
those of other containers or machines, is not readable here.
"""

from __future__ import annotations

import struct
from pathlib import Path

from rclpy.topic_endpoint_info import TopicEndpointInfo

from vla_runtime.nodes.middleware import PROFILE_VARIABLES

# eProsima's number of the RTPS vendors.
_FAST_DDS = (1, 15)
_PROCESSES = Path('/proc')


def environment_of(info: TopicEndpointInfo, domain: int) -> dict[str, str] | None:
    """Return the variables that a publisher's process was started with; None where unknown.

    Of several processes whose numbers end alike it is none.
    """
    identity = bytes(info.endpoint_gid)
    if tuple(identity[:2]) != _FAST_DDS:
        return None
    (number,) = struct.unpack_from('<H', identity, 4)
    found = []
    for folder in _PROCESSES.glob('[0-9]*'):
        if int(folder.name) & 0xFFFF != number:
            continue
        try:
            written = (folder / 'environ').read_bytes()
        except OSError:
            continue
        pairs = (one.partition('=') for one in written.decode(errors='replace').split('\0'))
        variables = {name: value for name, _, value in pairs if name}
        if (variables.get('ROS_DOMAIN_ID') or '0') == str(domain):
            found.append(variables)
    return found[0] if len(found) == 1 else None


def lacks_profile(variables: dict[str, str]) -> bool:
    """Return whether Fast DDS has its own 512 KiB of shared memory in such a process."""
    return not any(
        (path := variables.get(name)) and Path(path).is_file() for name in PROFILE_VARIABLES
    )
