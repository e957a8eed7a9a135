"""Commands as the messages that controllers take; one writer per output of the robot file.

Invariants:
- the message is made once; a tick only overwrites its numbers and sends it;
- `IDLE` and dry-run commands never come here: the caller leaves them out;
- what a trajectory says is in `trajectory_message`; it changes its form at rest only.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import PoseStamped, TwistStamped
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.trajectories import stamp_to_ns
from vla_runtime.nodes.executor.trajectory_message import (
    DelayedWay,
    LineOnArrival,
    TrajectoryController,
    WayLimits,
    float_view,
)
from vla_runtime.nodes.output_types import message_type
from vla_runtime.robot.match import MatchedOutput
from vla_runtime.robot.schema import repeats_hold

# The group of all Interbotix arms of the X series; another robot's configuration may have others.
_GROUP = 'arm'
# Silence, also in usual intervals, after which a controller rests at its last command, or another
# one has moved the robot.
_SILENT_NS, _INTERVALS = 200_000_000, 4


class Output(Protocol):
    """The side of an output that the control loop sees: a topic's writer, or an action's."""

    topic: str
    repeats_hold: bool

    def send(self, setpoints: np.ndarray, stamp: Time, follows: bool) -> None: ...


class Publisher(Protocol):
    """The methods of an rclpy publisher that a writer calls."""

    def publish(self, msg: Any) -> None: ...


@dataclass
class Numbers:
    """An output's last command that was sent, and this one, which goes on from it if `follows`."""

    before: np.ndarray
    now: np.ndarray
    follows: bool = False


class OutputWriter:
    """Sends one output's share of every command.

    Args:
        limits: in the units of the message; none where left out.

    Attributes:
        controller: the `joint_trajectory_controller` that takes the messages; None if unknown.
        scaling: trajectory time per time in that controller.
        repeats_hold: a settled hold is sent on and on (`hold: send`).
    """

    def __init__(
        self,
        matched: MatchedOutput,
        publisher: Publisher,
        period_s: float,
        limits: WayLimits | None = None,
    ) -> None:
        self.topic = matched.output.topic
        self.controller: TrajectoryController | None = None
        self.scaling = 1.0
        self.repeats_hold = repeats_hold(matched.output)
        self._publisher = publisher
        self._columns = np.array(matched.columns, dtype=np.int64)
        self._units = matched.units
        count = len(matched.columns)
        self._numbers = Numbers(np.zeros(count), np.zeros(count))
        self._sent: np.ndarray | None = None
        self._sent_ns = self._interval_ns = 0
        self._message: Any
        self._fill: _Fill
        if matched.output.kind == 'joint_trajectory':
            limits = limits or WayLimits.none(count)
            self._message = JointTrajectory(joint_names=list(matched.message_names))
            self._fill = _Trajectories(self, self._message, self._numbers, period_s, limits).fill
        else:
            filler = _FILLERS[matched.output.kind]
            self._message, self._fill = filler(matched, self._numbers, period_s)

    def send(self, setpoints: np.ndarray, stamp: Time, follows: bool) -> None:
        """Publish this output's columns.

        Args:
            setpoints: (columns,) of the whole command, robot units.
            follows: the command goes on from the last one if that is recent; False where the robot
                was not commanded in between, or the command was set to its measured position.
        """
        numbers, now = self._numbers, self._numbers.now
        silent_ns = stamp_to_ns(stamp) - self._sent_ns
        follows = follows and silent_ns <= max(_SILENT_NS, _INTERVALS * self._interval_ns)
        np.take(setpoints, self._columns, out=now)
        if self._units is not None:
            np.multiply(now, self._units.scale, out=now)
            np.add(now, self._units.offset, out=now)
        numbers.follows = follows and self._sent is not None
        np.copyto(numbers.before, now if self._sent is None or not follows else self._sent)
        self._fill(stamp)
        self._publisher.publish(self._message)
        if self._sent is None:
            self._sent = np.zeros_like(now)
        np.copyto(self._sent, now)
        self._sent_ns, self._interval_ns = self._sent_ns + silent_ns, silent_ns


_Fill = Callable[[Time], None]


class _Trajectories:
    """Trajectories in the form that their subscriber understands best."""

    def __init__(
        self,
        writer: OutputWriter,
        message: JointTrajectory,
        numbers: Numbers,
        period_s: float,
        limits: WayLimits,
    ) -> None:
        self._writer, self._message, self._numbers = writer, message, numbers
        self._period_s, self._limits = period_s, limits
        self._made_for: tuple[float, bool] | None = None
        self._form: LineOnArrival | DelayedWay = LineOnArrival(len(numbers.now), period_s)
        message.points = self._form.points

    def fill(self, stamp: Time) -> None:
        numbers, controller = self._numbers, self._writer.controller
        at_ns = stamp.sec * 1_000_000_000 + stamp.nanosec
        begins = not numbers.follows
        if begins or np.array_equal(numbers.before, numbers.now):
            begins |= self._choose_form(controller)
        if isinstance(self._form, LineOnArrival):
            self._form.fill(self._message, numbers.before, numbers.now)
            return
        if begins:
            self._form.begin(numbers.before, at_ns)
        same_clock = controller is not None and controller.same_clock
        scaling = self._writer.scaling
        self._form.fill(self._message, numbers.now, at_ns, same_clock=same_clock, scaling=scaling)

    def _choose_form(self, controller: TrajectoryController | None) -> bool:
        """Return whether the form for this controller is another one; take it up."""
        wanted = None
        if controller is not None:
            # Without a limit of acceleration there is no way to brake on.
            splines = controller.splines and bool(np.isfinite(self._limits.acceleration).all())
            wanted = controller.update_period_s, splines
        if wanted == self._made_for:
            return False
        self._made_for = wanted
        count = len(self._numbers.now)
        if wanted is None:
            self._form = LineOnArrival(count, self._period_s)
        else:
            update_period_s, splines = wanted
            self._form = DelayedWay(
                count, self._period_s, update_period_s, self._limits, splines=splines
            )
        self._message.points = self._form.points
        return True


def _float64_multi_array(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[Float64MultiArray, _Fill]:
    message = Float64MultiArray()
    view = float_view(message, 'data', len(numbers.now))

    def fill(_: Time) -> None:
        np.copyto(view, numbers.now)

    return message, fill


def _joint_state(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[JointState, _Fill]:
    message = JointState(name=list(matched.message_names))
    view = float_view(message, matched.output.interface, len(numbers.now))

    def fill(stamp: Time) -> None:
        message.header.stamp = stamp
        np.copyto(view, numbers.now)

    return message, fill


def _joint_group_command(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[Any, _Fill]:
    """A whole joint group of Interbotix's `xs_sdk`, float32, in the driver's order (`joints`)."""
    message = message_type('joint_group_command')(name=matched.output.group or _GROUP)
    message.cmd = array.array('f', bytes(4 * len(numbers.now)))
    view = np.frombuffer(message.cmd, dtype=np.float32)

    def fill(_: Time) -> None:
        np.copyto(view, numbers.now, casting='same_kind')

    return message, fill


def _joint_single_command(
    matched: MatchedOutput, numbers: Numbers, period_s: float
) -> tuple[Any, _Fill]:
    message = message_type('joint_single_command')(name=matched.message_names[0])

    def fill(_: Time) -> None:
        message.cmd = float(numbers.now[0])

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
    'float64_multi_array': _float64_multi_array,
    'joint_state': _joint_state,
    'joint_group_command': _joint_group_command,
    'joint_single_command': _joint_single_command,
    'pose_stamped': _pose_stamped,
    'twist_stamped': _twist_stamped,
}
