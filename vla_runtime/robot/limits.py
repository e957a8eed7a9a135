"""Limits of what a policy commands, from the robot file and the URDF that it names."""

from __future__ import annotations

import difflib
from dataclasses import replace

import numpy as np

from vla_runtime.bundle.schema import PoseSpec
from vla_runtime.execution.limits import ColumnLimits, Limits, make_limits
from vla_runtime.execution.urdf import read_urdf_limits, tighten_with_urdf
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.robot.rules import needed_limits
from vla_runtime.robot.schema import SIZE, Robot, RobotJoint, RobotPose, by_name
from vla_runtime.robot.written_columns import WrittenColumns

# Limits that a robot's URDF has for the joints of its robot file, in the joints' units.

# A name as near as this to one of the URDF's is a slip of the pen.
_NEARLY = 0.8


def urdf_limits(robot: Robot) -> dict[str, ColumnLimits]:
    """Return the URDF's limits by the robot file's joint names, in each joint's unit.

    Joints are left out that the URDF says nothing about: those that it does not have, those in
    percent or `'1'`, and a joint that turns where the URDF has one that slides, or the other way
    round. A URDF that cannot be used is a ValueError.
    """
    if robot.urdf_text is None:
        return {}
    known = read_urdf_limits(robot.urdf_text)
    found = {}
    for joint in robot.joints:
        its = known.get(joint.in_messages)
        if its is None or SIZE[joint.unit][0] != SIZE[its.unit][0]:
            continue
        factor = SIZE[its.unit][1] / SIZE[joint.unit][1]
        found[joint.name] = replace(
            its.limits,
            lower=its.limits.lower * factor,
            upper=its.limits.upper * factor,
            velocity=its.limits.velocity * factor,
        )
    return found


def check_names(robot: Robot) -> None:
    """Refuse a joint that the URDF does not have, unless the robot file has all of its limits.

    So a gripper may be described in the robot file alone. A name that is nearly one of the URDF's
    is taken for a slip.

    Raises:
        FieldError: such a joint, or a URDF that has none of the robot's joints.
        ValueError: the URDF cannot be used.
    """
    known = read_urdf_limits(robot.urdf_text or '')
    named = {joint.in_messages for joint in robot.joints}
    for index, joint in enumerate(robot.joints):
        name = joint.in_messages
        if name in known:
            continue
        free = sorted(known.keys() - named)
        missing = _missing(joint)
        slip = difflib.get_close_matches(name, free, n=1, cutoff=_NEARLY)
        if not missing and not slip and not named.isdisjoint(known):
            continue
        mend = f'; give the joint {" and ".join(missing)} if the URDF is without it' * bool(missing)
        raise FieldError(
            f'joints[{index}].name',
            f'{quoted(name)} is no movable joint of {robot.urdf}{did_you_mean(name, sorted(known))}'
            f"{mend}; message_name is the joint's name in the URDF",
        )


def beyond_urdf(robot: Robot) -> list[str]:
    """Return the joints whose limits are the robot file's alone, although it names a URDF."""
    known = urdf_limits(robot)
    if robot.urdf_text is None:
        return []
    return [joint.name for joint in robot.joints if joint.name not in known]


def why_without(robot: Robot, joint: RobotJoint) -> str:
    its = read_urdf_limits(robot.urdf_text or '').get(joint.in_messages)
    if its is None:
        return 'is missing, and the URDF is without the joint'
    if SIZE[its.unit][0] != SIZE[joint.unit][0]:
        return f"is missing: the URDF's {its.unit} cannot be converted to {joint.unit}"
    return f'is missing, in the URDF too{its.why}'


def _missing(joint: RobotJoint) -> list[str]:
    return [key for key in needed_limits(joint) if getattr(joint, key) is None]


def column_limits(robot: Robot, written: WrittenColumns) -> Limits:
    """Return the limits of a command's columns, in robot units.

    ValueError if they make no sense.
    """
    # A number of a pose is no joint, whatever it is called.
    joints = {joint.name: joint for joint in robot.joints if joint.name not in written.pose_of}
    poses = by_name(robot.poses)
    limits, workspace = {}, {}
    columns = written.columns
    for column in columns:
        pose = written.pose_of.get(column.name)
        if pose is not None:
            limits[column.name] = _pose_limits(pose, poses[pose.name], column.name)
            # A velocity is no position: its box is that of the position which is measured.
            if column.name in pose.position and (pose.kind != 'velocity' or column.feedback):
                axis = pose.position.index(column.name)
                workspace[column.name] = poses[pose.name].bounds[axis]
        elif column.name in joints:
            limits[column.name] = _joint_limits(joints[column.name])
    names = tuple(column.name for column in columns)
    result = make_limits(names, limits, workspace, robot.on_violation)
    if robot.urdf_text is None:
        return result
    known = urdf_limits(robot)
    in_urdf = {name: known[name] for name in names if name in joints and name in known}
    result = tighten_with_urdf(result, in_urdf)
    # Limits that the robot file leaves to the URDF; without one the file was refused.
    found = {'lower': result.lower, 'upper': result.upper, 'velocity': result.velocity}
    for index, name in enumerate(names):
        for key in needed_limits(joints[name]) if name in joints else ():
            if not np.isfinite(found[key][index]):
                raise ValueError(
                    f"joints[{name}].{key}: {why_without(robot, joints[name])}: '{name}' would "
                    'move without this limit; give it here'
                )
    return result


def _joint_limits(joint: RobotJoint) -> ColumnLimits:
    given = {
        'lower': joint.lower,
        'upper': joint.upper,
        'velocity': joint.velocity,
        'acceleration': joint.acceleration,
        'step_from_measured': joint.max_step,
        'tracking_error': np.inf if joint.grips else joint.max_tracking_error,
        'start_tolerance': joint.start_tolerance,
        'approach_speed': joint.approach_speed,
        'hold_follows': joint.hold_follows,
    }
    present = {key: value for key, value in given.items() if value is not None}
    return replace(ColumnLimits(), **present)


def _pose_limits(pose: PoseSpec, robot_pose: RobotPose, name: str) -> ColumnLimits:
    if name in pose.position:
        return _limits(robot_pose.velocity, robot_pose.acceleration)
    return _limits(robot_pose.angular_velocity, robot_pose.angular_acceleration)


def _limits(velocity: float, acceleration: float | None) -> ColumnLimits:
    return ColumnLimits(
        velocity=velocity, acceleration=np.inf if acceleration is None else acceleration
    )
