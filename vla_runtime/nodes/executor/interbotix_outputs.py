"""Messages of Interbotix's `xs_sdk` node: a whole joint group, or one joint.

The driver takes float32. The numbers of a group have no names: they are in the order of the group
in the driver's motor configuration, which is that of the output's `joints`.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time

from vla_runtime.nodes.executor.output_numbers import Numbers
from vla_runtime.nodes.output_types import message_type
from vla_runtime.robot.match import MatchedOutput

# Of all arms of the X series; the motor configuration of another robot may have others.
_GROUP = 'arm'


def joint_group_command(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[Any, Callable[[Time], None]]:
    """Make the message once, and the function that overwrites its numbers."""
    message = message_type('joint_group_command')(name=matched.output.group or _GROUP)
    message.cmd = array.array('f', bytes(4 * len(numbers.now)))
    view = np.frombuffer(message.cmd, dtype=np.float32)

    def fill(_: Time) -> None:
        np.copyto(view, numbers.now, casting='same_kind')

    return message, fill


def joint_single_command(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[Any, Callable[[Time], None]]:
    """Make the message once, and the function that overwrites its number."""
    message = message_type('joint_single_command')(name=matched.message_names[0])

    def fill(_: Time) -> None:
        message.cmd = float(numbers.now[0])

    return message, fill
