"""Types of messages in bags: ROS 2 Jazzy's, and those of drivers that it comes without."""

from __future__ import annotations

from functools import cache
from typing import Any

from rosbags.typesys import Stores, get_types_from_msg, get_typestore

# By what they carry, in the words of rosidl.
_OF_DRIVERS = {
    'interbotix_xs_msgs/msg/JointGroupCommand': 'string name\nfloat32[] cmd',
    'interbotix_xs_msgs/msg/JointSingleCommand': 'string name\nfloat32 cmd',
}


@cache
def message_types() -> Any:
    """Return the type store that bags are written and read with."""
    types = get_typestore(Stores.ROS2_JAZZY)
    for name, text in _OF_DRIVERS.items():
        types.register(get_types_from_msg(text, name))
    return types
