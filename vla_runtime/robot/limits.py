"""Limits of what a policy commands, from the robot file and the URDF that it names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vla_runtime.bundle.schema import PoseSpec
from vla_runtime.execution.limits import ColumnLimits, Limits, make_limits
from vla_runtime.execution.urdf import tighten_with_urdf
from vla_runtime.robot.rules import needed_limits
from vla_runtime.robot.schema import Robot, RobotJoint, RobotPose, by_name
from vla_runtime.robot.urdf_limits import urdf_limits, why_without
from vla_runtime.robot.written_columns import WrittenColumns


def column_limits(robot: Robot, written: WrittenColumns) -> Limits:
    """Return the limits of the columns of a command, in robot units.

    Args:
        robot: the robot file.
        written: columns of a command, and the poses that they belong to.

    Raises:
        ValueError: limits that make no sense together, or a joint without one that it needs.
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
