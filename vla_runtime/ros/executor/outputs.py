"""Commands as the messages that controllers take; one writer per output of the robot file.

Invariants:
- the message is made once; a tick only overwrites its numbers and sends it;
- `IDLE` and dry-run commands never come here: the caller leaves them out;
- a trajectory goes in a straight line from the last command, on arrival, to this one, one control
  period later. Its zero stamp tells `joint_trajectory_controller` to begin on arrival: clocks of
  two computers do not matter then. To a first point that lies ahead that controller goes from the
  measured position, anew with every message: an arm that gets messages as often as the controller
  updates would be told to stay where it is, and sink. It holds positions only: a last point with a
  velocity is refused by that controller.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import PoseStamped, TwistStamped
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from vla_runtime.ros.executor.interbotix_outputs import joint_group_command, joint_single_command
from vla_runtime.ros.robot.match import MatchedOutput


class Output(Protocol):
    """The side of an output that the control loop sees: a topic's writer, or an action's."""

    topic: str
    repeats_hold: bool

    def send(self, setpoints: np.ndarray, stamp: Time, follows: bool) -> None: ...


class Publisher(Protocol):
    """The methods of an rclpy publisher that a writer calls."""

    def publish(self, msg: Any) -> None: ...


class OutputWriter:
    """Sends one output's share of every command.

    Args:
        matched: the output and its columns of a command.
        publisher: publisher of the kind's `message_type`.
        period_s: control period.

    Attributes:
        topic: name of the topic in the robot file.
        repeats_hold: a hold that is settled is sent on and on (`hold: send`).
    """

    def __init__(self, matched: MatchedOutput, publisher: Publisher, period_s: float) -> None:
        self.topic = matched.output.topic
        self.repeats_hold = matched.output.hold == 'send'
        self._publisher = publisher
        self._columns = np.array(matched.columns, dtype=np.int64)
        self._units = matched.units
        count = len(matched.columns)
        self._numbers = Numbers(np.zeros(count), np.zeros(count))
        self._sent: np.ndarray | None = None
        self._message, self._fill = _FILLERS[matched.output.kind](matched, self._numbers, period_s)

    def send(self, setpoints: np.ndarray, stamp: Time, follows: bool) -> None:
        """Publish this output's columns.

        Args:
            setpoints: (columns,) of the whole command, robot units.
            stamp: ROS time of the tick.
            follows: the command goes on from the last one. It does not where the robot was not
                commanded in between or was seated where it is.
        """
        before, now = self._numbers
        np.take(setpoints, self._columns, out=now)
        if self._units is not None:
            np.multiply(now, self._units.scale, out=now)
            np.add(now, self._units.offset, out=now)
        np.copyto(before, self._sent if follows and self._sent is not None else now)
        self._fill(stamp)
        self._publisher.publish(self._message)
        if self._sent is None:
            self._sent = np.zeros_like(now)
        np.copyto(self._sent, now)


class Numbers(NamedTuple):
    """An output's numbers of the last command that was sent, and of this one."""

    before: np.ndarray
    now: np.ndarray


_Fill = Callable[[Time], None]


def _joint_trajectory(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[JointTrajectory, _Fill]:
    begin, end = JointTrajectoryPoint(), JointTrajectoryPoint()
    views = [_view(point, 'positions', len(numbers.now)) for point in (begin, end)]
    seconds, nanoseconds = divmod(round(period_s * 1e9), 1_000_000_000)
    end.time_from_start = Duration(sec=seconds, nanosec=nanoseconds)
    message = JointTrajectory(joint_names=list(matched.message_names), points=[begin, end])

    def fill(_: Time) -> None:
        np.copyto(views[0], numbers.before)
        np.copyto(views[1], numbers.now)

    return message, fill


def _float64_multi_array(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[Float64MultiArray, _Fill]:
    message = Float64MultiArray()
    view = _view(message, 'data', len(numbers.now))

    def fill(_: Time) -> None:
        np.copyto(view, numbers.now)

    return message, fill


def _joint_state(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[JointState, _Fill]:
    message = JointState(name=list(matched.message_names))
    view = _view(message, matched.output.interface, len(numbers.now))

    def fill(stamp: Time) -> None:
        message.header.stamp = stamp
        np.copyto(view, numbers.now)

    return message, fill


def _pose_stamped(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[PoseStamped, _Fill]:
    message = PoseStamped()
    message.header.frame_id = matched.frame_id
    position, orientation = message.pose.position, message.pose.orientation

    def fill(stamp: Time) -> None:
        message.header.stamp = stamp
        position.x, position.y, position.z, w, x, y, z = numbers.now.tolist()
        orientation.w, orientation.x, orientation.y, orientation.z = w, x, y, z

    return message, fill


def _twist_stamped(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[TwistStamped, _Fill]:
    message = TwistStamped()
    message.header.frame_id = matched.frame_id
    linear, angular = message.twist.linear, message.twist.angular

    def fill(stamp: Time) -> None:
        message.header.stamp = stamp
        linear.x, linear.y, linear.z = (float(number) for number in numbers.now[:3])
        angular.x, angular.y, angular.z = (float(number) for number in numbers.now[3:])

    return message, fill


_FILLERS: dict[str, Callable[[MatchedOutput, Numbers, float], tuple[Any, _Fill]]] = {
    'joint_trajectory': _joint_trajectory,
    'float64_multi_array': _float64_multi_array,
    'joint_state': _joint_state,
    'joint_group_command': joint_group_command,
    'joint_single_command': joint_single_command,
    'pose_stamped': _pose_stamped,
    'twist_stamped': _twist_stamped,
}


def _view(message: Any, field: str, count: int) -> np.ndarray:
    """Size a `float64[]` field and look at its memory: (count,) float64, writable.

    Taken from the message after the assignment, because assigning may copy.
    """
    setattr(message, field, array.array('d', bytes(8 * count)))
    return np.frombuffer(getattr(message, field), dtype=np.float64)
