"""Types of the outputs' messages and actions, also those of packages that a robot may lack."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from geometry_msgs.msg import PoseStamped, TwistStamped
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.robot.file import RobotError
from vla_runtime.robot.schema import Robot, RobotOutput

# Of an action the goals, as they can be heard beside it.
_TYPES: dict[str, type] = {
    'joint_trajectory': JointTrajectory,
    'float64_multi_array': Float64MultiArray,
    'joint_state': JointState,
    'gripper_command': JointState,
    'parallel_gripper_command': JointState,
    'pose_stamped': PoseStamped,
    'twist_stamped': TwistStamped,
}
# Module and name of types whose packages are not part of every ROS 2.
_ELSEWHERE = {
    'joint_group_command': ('interbotix_xs_msgs.msg', 'JointGroupCommand'),
    'joint_single_command': ('interbotix_xs_msgs.msg', 'JointSingleCommand'),
}
_ACTIONS = {
    'gripper_command': ('control_msgs.action', 'GripperCommand'),
    'parallel_gripper_command': ('control_msgs.action', 'ParallelGripperCommand'),
}
_INSTALL = {
    'control_msgs': 'sudo apt install ros-$ROS_DISTRO-control-msgs',
    'interbotix_xs_msgs': (
        "source the workspace of Interbotix's drivers, or build interbotix_xs_msgs of "
        "github.com/Interbotix/interbotix_ros_core in this one (branch of this ROS's name)"
    ),
}


class MissingTypeError(ImportError):
    """A type cannot be imported; the message says what to install."""


def message_type(kind: str) -> Any:
    """Return the topic's message type for an output of this kind, or raise MissingTypeError."""
    return _TYPES[kind] if kind in _TYPES else _imported(*_ELSEWHERE[kind], kind)


def action_type(kind: str) -> Any:
    """Return the action's type for an output of this kind, or raise MissingTypeError."""
    return _imported(*_ACTIONS[kind], kind)


def require_types(robot: Robot, output: RobotOutput, *, listens_only: bool = False) -> None:
    """Refuse an output whose types cannot be imported here.

    With `listens_only` its messages are heard and not sent, so that no action is needed.

    Raises:
        RobotError: names the output's field, and what to install.
    """
    try:
        message_type(output.kind)
        if output.is_action and not listens_only:
            action_type(output.kind)
    except MissingTypeError as error:
        field = f'outputs[{robot.outputs.index(output)}].kind'
        raise RobotError(robot.file, field, str(error)) from None


def _imported(module: str, name: str, kind: str) -> Any:
    package = module.partition('.')[0]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise MissingTypeError(
            f'{kind} needs the ROS package {package}, which is not installed here or not sourced '
            f'({error}): {_INSTALL[package]}'
        ) from None
    except AttributeError:
        raise MissingTypeError(
            f'{kind} needs {name} of {package}, which this {package} is too old for: update it '
            f'({_INSTALL[package]}), or use an output of another kind'
        ) from None
