"""Convert between the tabletop world and messages: joint states, images, commands."""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cv2
import numpy as np
from builtin_interfaces.msg import Time
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.robot.schema import Robot, RobotCamera, RobotOutput
from vla_tabletop.sim.controller import CommandError, JointFollower

_JPEG_QUALITY = 90


def joint_state_message(
    names: Sequence[str], positions: np.ndarray, velocities: np.ndarray, stamp: Time
) -> JointState:
    """Measured joints, (n,) each, as a message."""
    message = JointState(name=list(names))
    message.header.stamp = stamp
    message.position = array.array('d', positions.tobytes())
    message.velocity = array.array('d', velocities.tobytes())
    return message


def image_message(camera: RobotCamera, image: np.ndarray, stamp: Time) -> Image | CompressedImage:
    """(height, width, 3) uint8 RGB as the type that the robot file gives the camera."""
    if camera.type == 'compressed':
        message = CompressedImage(format='rgb8; jpeg compressed bgr8')
        quality = [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY]
        encoded = cv2.imencode('.jpg', image[:, :, ::-1], quality)[1]
        message.data = array.array('B', encoded.tobytes())
    else:
        height, width, channels = image.shape
        message = Image(
            height=height, width=width, encoding='rgb8', step=width * channels, is_bigendian=0
        )
        message.data = array.array('B', image.tobytes())
    message.header.stamp = stamp
    message.header.frame_id = f'{camera.name}_camera'
    return message


def command_taker(
    output: RobotOutput, robot: Robot, follower: JointFollower, ros_now_ns: Callable[[], int]
) -> Callable[[Any, float], None]:
    """Return an output's handler: called with the message and the steady time.

    The robot file has passed `require_tabletop`.
    """
    own = {robot.joint(name).in_commands: name for name in output.joints}
    take = _TAKERS[output.kind]

    def taker(message: Any, now_s: float) -> None:
        take(message, now_s, own, follower, ros_now_ns)

    return taker


def _joint_trajectory(
    message: JointTrajectory,
    now_s: float,
    own: Mapping[str, str],
    follower: JointFollower,
    ros_now_ns: Callable[[], int],
) -> None:
    stamp_ns = stamp_to_ns(message.header.stamp)
    # A zero stamp means: begin with the next update.
    start_s = now_s + (stamp_ns - ros_now_ns()) * 1e-9 if stamp_ns else None
    times = [stamp_to_ns(point.time_from_start) * 1e-9 for point in message.points]
    positions = [list(point.positions) for point in message.points]
    if any(len(row) != len(message.joint_names) for row in positions):
        raise CommandError('points: positions must be as many as joint_names')
    names = _own_names(message.joint_names, own)
    follower.follow(names, times, np.array(positions, dtype=np.float64), start_s)


def _float64_multi_array(
    message: Float64MultiArray,
    now_s: float,
    own: Mapping[str, str],
    follower: JointFollower,
    ros_now_ns: Callable[[], int],
) -> None:
    follower.follow(list(own.values()), [0.0], np.array([message.data], dtype=np.float64))


def _joint_state(
    message: JointState,
    now_s: float,
    own: Mapping[str, str],
    follower: JointFollower,
    ros_now_ns: Callable[[], int],
) -> None:
    names = _own_names(message.name, own)
    follower.follow(names, [0.0], np.array([message.position], dtype=np.float64))


_TAKERS: dict[str, Callable[[Any, float, Mapping[str, str], JointFollower, Any], None]] = {
    'joint_trajectory': _joint_trajectory,
    'float64_multi_array': _float64_multi_array,
    'joint_state': _joint_state,
}


def _own_names(in_message: Sequence[str], own: Mapping[str, str]) -> list[str]:
    unknown = [name for name in in_message if name not in own]
    if unknown:
        raise CommandError(f'joints {unknown} are not of this controller, which has {list(own)}')
    return [own[name] for name in in_message]
