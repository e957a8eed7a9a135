"""Check that a robot file is the simulated tabletop robot's, without ROS and MuJoCo."""

from __future__ import annotations

from collections.abc import Iterator

from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.robot.schema import Robot, RobotJoint, command_scaling
from vla_tabletop.sim.arm import joint_ranges_rad
from vla_tabletop.sim.scene import CAMERAS

# What the simulated controllers take, as positions.
OUTPUT_KINDS = ('joint_trajectory', 'float64_multi_array', 'joint_state')


def require_tabletop(robot: Robot) -> None:
    """Refuse a robot file that is not of this robot.

    Raises ValueError: names every joint, limit, camera or output that the tabletop lacks.
    """
    wrong = '\n  '.join((*_joints(robot), *_cameras(robot), *_outputs(robot)))
    if wrong:
        raise ValueError(
            f'{robot.file}: is of another robot than the simulated tabletop; start from its own '
            f'file, config/robots/tabletop.yaml:\n  {wrong}'
        )


def _joints(robot: Robot) -> Iterator[str]:
    ranges = joint_ranges_rad()
    for index, joint in enumerate(robot.joints):
        field = f'field joints[{index}]'
        if joint.name not in ranges:
            yield f"{field}.name: no joint '{joint.name}'{did_you_mean(joint.name, ranges)}"
        elif joint.unit != 'rad':
            yield f"{field}.unit: '{joint.unit}'; the tabletop's '{joint.name}' is in rad"
        elif command_scaling(joint) != (1.0, 0.0):
            yield f"{field}.command: the tabletop's controllers take positions as they are measured"
        else:
            yield from _limits(field, joint, *ranges[joint.name])


def _limits(field: str, joint: RobotJoint, lower: float, upper: float) -> Iterator[str]:
    reach = f"the tabletop's '{joint.name}' goes from {lower:g} to {upper:g} rad"
    if joint.continuous:
        yield f'{field}.continuous: true; {reach}'
    # Left out where a URDF decides.
    for side, limit in (('lower', joint.lower), ('upper', joint.upper)):
        if limit is not None and not lower <= limit <= upper:
            yield f'{field}.{side}: {limit:g}; {reach}'


def _cameras(robot: Robot) -> Iterator[str]:
    for index, camera in enumerate(robot.cameras):
        if camera.name not in CAMERAS:
            hint = did_you_mean(camera.name, CAMERAS)
            yield f"field cameras[{index}].name: no camera '{camera.name}'{hint}"


def _outputs(robot: Robot) -> Iterator[str]:
    for index, output in enumerate(robot.outputs):
        if output.kind not in OUTPUT_KINDS or output.interface != 'position':
            yield (
                f'field outputs[{index}]: {output.kind} with interface {output.interface}; the '
                f"tabletop's controllers take positions as {', '.join(OUTPUT_KINDS)}"
            )
