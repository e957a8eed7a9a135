"""Serialised messages (CDR): the stamp at their front, and joint states. No ROS 2 here."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from rosbags.typesys import Stores, get_typestore

from vla_runtime.recording.topics import JOINT_STATE

_SECOND_NS = 1_000_000_000
# Two bytes of representation, two of options, then the message.
_HEADER_BYTES = 4


def with_header_stamp(serialised: bytes, stamp_ns: int) -> bytes:
    """Return a message that begins with a `std_msgs/Header` with another stamp."""
    order = '<' if serialised[1] & 1 else '>'
    stamp = struct.pack(f'{order}iI', *divmod(stamp_ns, _SECOND_NS))
    return serialised[:_HEADER_BYTES] + stamp + serialised[_HEADER_BYTES + len(stamp) :]


def header_stamp_ns(serialised: bytes) -> int | None:
    """Stamp of a message that begins with a `std_msgs/Header`; None where it is too short."""
    if len(serialised) < _HEADER_BYTES + 8:
        return None
    order = '<' if serialised[1] & 1 else '>'
    seconds, nanoseconds = struct.unpack_from(f'{order}iI', serialised, _HEADER_BYTES)
    return int(seconds) * _SECOND_NS + int(nanoseconds)


def joint_state(stamp_ns: int, names: Sequence[str], positions: Sequence[float]) -> bytes:
    """Return a serialised `sensor_msgs/JointState`."""
    types = get_typestore(Stores.ROS2_JAZZY)
    stamp = types.types['builtin_interfaces/msg/Time'](*divmod(stamp_ns, _SECOND_NS))
    message = types.types[JOINT_STATE](
        types.types['std_msgs/msg/Header'](stamp, ''),
        list(names),
        np.array(positions, dtype=np.float64),
        np.zeros(0),
        np.zeros(0),
    )
    return bytes(types.serialize_cdr(message, JOINT_STATE))
