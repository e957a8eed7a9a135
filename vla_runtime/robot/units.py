"""Units of joints and URDFs: sizes, and conversion from a measured position to its command."""

from __future__ import annotations

import numpy as np

from vla_runtime.files.field_error import FieldError
from vla_runtime.robot.schema import RobotJoint

# Unit to (dimension, size in the dimension's first unit).
SIZE: dict[str, tuple[str, float]] = {
    'rad': ('angle', 1.0),
    'deg': ('angle', np.pi / 180.0),
    'm': ('length', 1.0),
    'mm': ('length', 1e-3),
    '1': ('none', 1.0),
    'percent': ('none', 1e-2),
}


def command_scaling(joint: RobotJoint) -> tuple[float, float]:
    """Return scale and offset: command = position * scale + offset.

    Raises:
        FieldError: `command` leaves the conversion open; its field begins with `command`.
    """
    command = joint.command
    if command is None:
        return 1.0, 0.0
    if command.zero is not None and command.one is not None:
        zero, one = _ends(joint)
        scale = (command.one - command.zero) / (one - zero)
        return scale, command.zero - zero * scale
    dimension, size = SIZE[joint.unit]
    other, other_size = SIZE[joint.command_unit]
    if dimension == other:
        return size / other_size, 0.0
    if other == 'none' and joint.zero is not None and joint.one is not None:
        scale = 1.0 / other_size / (joint.one - joint.zero)
        return scale, -joint.zero * scale
    raise FieldError(
        'command.unit',
        f"'{joint.unit}' of '{joint.name}' cannot become '{joint.command_unit}': give "
        "'zero' and 'one' of the joint, and of its command, at the same two positions",
    )


def _ends(joint: RobotJoint) -> tuple[float, float]:
    """Positions of the joint at which its command is `command.zero` and `command.one`."""
    if joint.zero is not None and joint.one is not None:
        return joint.zero, joint.one
    dimension, size = SIZE[joint.unit]
    if dimension == 'none':
        return 0.0, 1.0 / size
    raise FieldError(
        'command.zero',
        f"is the command at the position 'zero' of '{joint.name}', which is missing: give the "
        f"joint 'zero' and 'one' too, in {joint.unit}",
    )
