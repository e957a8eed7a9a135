"""Contents of a robot file: the dataclasses that config/robots/*.yaml mirror.

Only words and shapes are here; what belongs together is checked in `rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from vla_runtime.execution.column_model import StartParameters
from vla_runtime.execution.leader import Engage, LeaderMode
from vla_runtime.execution.limits import LimitActions
from vla_runtime.execution.stopping import StopActions
from vla_runtime.files.field_error import FieldError

FORMAT = 1

JointUnit = Literal['rad', 'deg', 'm', 'mm', '1', 'percent']
ImageType = Literal['raw', 'compressed']
Reliability = Literal['best_effort', 'reliable']
StampSource = Literal['header', 'receive']
ImageEncoding = Literal[
    'rgb8',
    'bgr8',
    'rgba8',
    'bgra8',
    'mono8',
    'bayer_rggb8',
    'bayer_bggr8',
    'bayer_gbrg8',
    'bayer_grbg8',
    'yuyv',
    'uyvy',
]
OutputKind = Literal[
    'joint_trajectory',
    'float64_multi_array',
    'joint_state',
    'joint_group_command',
    'joint_single_command',
    'gripper_command',
    'parallel_gripper_command',
    'pose_stamped',
    'twist_stamped',
]
Interface = Literal['position', 'velocity']
ScalingType = Literal['std_msgs/Float64', 'control_msgs/SpeedScalingFactor']
HoldKind = Literal['silent', 'send']

POSE_KINDS = ('pose_stamped', 'twist_stamped')
# Goals of an action instead of messages on a topic.
ACTION_KINDS = ('gripper_command', 'parallel_gripper_command')
# A side of a workspace box that is so far away bounds nothing.
_NO_BOUND_M = 1e3
# Their messages have no place for more than one joint.
ONE_JOINT_KINDS = (*ACTION_KINDS, 'joint_single_command')


@dataclass(frozen=True)
class JointCommand:
    """A joint's command, where its driver calls or counts it otherwise than its measured position.

    Attributes:
        name: name in command messages; the one in joint states where left out.
        unit: unit of the command; the joint's where left out.
        zero: command at the joint's own `zero`; at its 0 where the joint is in `'1'` or percent.
        one: command at the joint's own `one`; at its 1 or 100 percent likewise.
    """

    name: str | None = None
    unit: JointUnit | None = None
    zero: float | None = None
    one: float | None = None


@dataclass(frozen=True)
class RobotJoint:
    """One measured and commanded number: a joint, or a gripper.

    Attributes:
        name: name of the joint; unique in the robot.
        unit: unit of its measured position, its limits, and its command unless `command` has
            another.
        lower: smallest position that may be commanded; left out for a continuous joint, and where
            the URDF shall decide.
        upper: largest.
        velocity: largest speed, `unit` a second; the URDF's where left out.
        acceleration: largest, `unit` a second squared; unlimited where left out.
        max_step: largest distance of a command from the measured position; unlimited where left
            out.
        max_tracking_error: distance of the measured position from the command that stops the robot
            until it is started again. Where left out: the executor's parameter of this name, or
            three quarters of the joint's range where that is smaller.
        grips: a gripper that is commanded by position. An object stops it short of its command; the
            distance that is left is the force of the grip. It is no fault, and neither a hold nor
            a start opens the gripper.
        start_tolerance: `tolerance` of `start` for this joint, in its unit. Where left out: that
            one, or a quarter of the joint's range where that is smaller.
        approach_speed: `approach_speed` of `start` for this joint, `unit` a second. Where left
            out: that one, or half the joint's range a second where that is smaller.
        hold_follows: distance that a hold gives way in all to a joint that rests elsewhere, `unit`.
            A joint that a person moved by half of it takes the hold of a stopped robot along. Where
            left out: 0.05 rad or m, or 5% of the joint's range where that is smaller.
        continuous: an angle without end stops.
        message_name: name in messages and in the URDF, when not `name`; two arms under two
            namespaces may both have a `waist`.
        aliases: further names under which policies know it.
        zero: position where a policy without units (`'1'` or percent) says 0, whatever the
            joint's unit; not used where the policy's numbers are in rad, deg, m or mm.
        one: position where such a policy says 1 (100 percent).
        command: name and unit of its command, where they are not those of its measured position.
    """

    name: str
    unit: JointUnit
    lower: float | None = None
    upper: float | None = None
    velocity: float | None = None
    acceleration: float | None = None
    max_step: float | None = None
    max_tracking_error: float | None = None
    start_tolerance: float | None = None
    approach_speed: float | None = None
    hold_follows: float | None = None
    continuous: bool = False
    grips: bool = False
    message_name: str | None = None
    aliases: tuple[str, ...] = ()
    zero: float | None = None
    one: float | None = None
    command: JointCommand | None = None

    @property
    def in_messages(self) -> str:
        return self.message_name or self.name

    @property
    def in_commands(self) -> str:
        return (self.command.name if self.command else None) or self.in_messages

    @property
    def command_unit(self) -> JointUnit:
        return (self.command.unit if self.command else None) or self.unit


@dataclass(frozen=True)
class JointStateTopic:
    """Topic of measured positions (`sensor_msgs/JointState`).

    Attributes:
        topic: relative topics are in the node's namespace.
        joints: joints of the robot that it brings; all of them where left out.
        stamp: time of a message: `header`, as its driver stamps it, or `receive`, the time at which
            it comes, for drivers that stamp nothing or by a clock of their own.
    """

    topic: str
    joints: tuple[str, ...] = ()
    reliability: Reliability = 'best_effort'
    depth: int = 10
    stamp: StampSource = 'header'


@dataclass(frozen=True)
class RobotCamera:
    """One camera's stream.

    Attributes:
        name: name that policies know it by; `aliases` are further such names.
        topic: relative topics are in the node's namespace.
        type: `raw` (`sensor_msgs/Image`) or `compressed` (`sensor_msgs/CompressedImage`).
        reliability: quality of service asked of the driver; `best_effort` matches every driver.
        depth: frames kept while the node is busy.
        width: pixels, checked on each frame when given.
        height: pixels, checked on each frame when given.
        encoding: meaning of the bytes of raw images whose own encoding is 8UC1 to 8UC4.
        rate_hz: frames a second that its driver is set to; `vla_runtime doctor` says when fewer
            come. Where left out, it compares with the policy's steps a second.
    """

    name: str
    topic: str
    type: ImageType = 'raw'
    reliability: Reliability = 'best_effort'
    depth: int = 2
    width: int | None = None
    height: int | None = None
    stamp: StampSource = 'header'
    encoding: ImageEncoding | None = None
    aliases: tuple[str, ...] = ()
    rate_hz: float | None = None


@dataclass(frozen=True)
class RobotPose:
    """An end effector that is commanded as a pose.

    Attributes:
        name: name of the pose, as in the policy's `poses`.
        frame_id: the frame of its positions, written into each message.
        lower: (3,) smallest x, y, z, m: one corner of the workspace box. A commanded pose stays in
            it, and a twist keeps the measured position in it. Left out only for a twist: no box.
        upper: (3,) the opposite corner.
        velocity: largest speed along each axis, m/s.
        angular_velocity: largest angular velocity of a pose, whatever its axis, rad/s; of a twist
            about each axis.
        acceleration: largest along each axis, m/s²; unlimited where left out.
        angular_acceleration: largest change of the angular velocity of a pose, rad/s²; of a twist
            about each axis; unlimited where left out.
        aliases: further names under which policies know it.
        link: link of the URDF that is this end effector: the pose is measured through the joints
            between `frame_id` and this link, and commanded through them where no output carries it.
        topic: topic on which the pose is measured (`geometry_msgs/PoseStamped` in `frame_id`), for
            a twist; relative topics are in the node's namespace.
    """

    name: str
    frame_id: str
    velocity: float
    angular_velocity: float
    lower: tuple[float, float, float] | None = None
    upper: tuple[float, float, float] | None = None
    acceleration: float | None = None
    angular_acceleration: float | None = None
    aliases: tuple[str, ...] = ()
    link: str | None = None
    topic: str | None = None

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Smallest and largest x, y and z, m; infinite where there is no bound."""
        if self.lower is None or self.upper is None:
            return ((-math.inf, math.inf),) * 3
        return tuple(
            (
                low if low > -_NO_BOUND_M else -math.inf,
                high if high < _NO_BOUND_M else math.inf,
            )
            for low, high in zip(self.lower, self.upper, strict=True)
        )


@dataclass(frozen=True)
class RobotOutput:
    """One command topic, or one action.

    Attributes:
        kind: `joint_trajectory` (joint_trajectory_controller), `float64_multi_array`
            (forward_command_controller), `joint_state`, `joint_group_command` and
            `joint_single_command` (Interbotix), `gripper_command` and `parallel_gripper_command`
            (actions of gripper controllers), `pose_stamped` (Cartesian controllers) or
            `twist_stamped` (MoveIt Servo).
        topic: name of the topic or of the action; relative ones are in the node's namespace.
        joints: joints that it carries, in this order; for joint outputs.
        pose: pose that it carries; for `pose_stamped` and `twist_stamped`.
        interface: meaning of the numbers of a joint output.
        hold: `silent` sends nothing more once a stopped robot has come to rest and its controller
            has the hold; `send` repeats the hold, for a controller that forgets its last command.
            Where left out, `send` for velocities and `silent` for all others.
        group: name of the joint group in a `joint_group_command`; `arm` where left out.
        deadband: least change of the joint, in its unit, that is a new goal of an action; a
            hundredth of its range where left out.
        goals_hz: most goals a second; 10 where left out.
        max_effort: largest effort that a goal allows, N or Nm; the controller's where left out.
        shared_with: nodes that may send on this topic too. Any other one that does stops the
            executor. Relative names are in the node's namespace.
        update_rate_hz: cycles a second of the trajectory controller, where its parameters do not
            say so.
        same_clock: the trajectory controller's clock is the executor's; found by the stamps of its
            `controller_state` where left out.
    """

    kind: OutputKind
    topic: str
    joints: tuple[str, ...] = ()
    pose: str | None = None
    interface: Interface = 'position'
    hold: HoldKind | None = None
    group: str | None = None
    deadband: float | None = None
    goals_hz: float | None = None
    max_effort: float | None = None
    shared_with: tuple[str, ...] = ()
    update_rate_hz: float | None = None
    same_clock: bool | None = None

    @property
    def is_action(self) -> bool:
        return self.kind in ACTION_KINDS

    @property
    def command_topic(self) -> str:
        """Topic on which the commands can be heard; of an action the goals as `JointState`."""
        return f'{self.topic}/goal' if self.is_action else self.topic


def repeats_hold(output: RobotOutput) -> bool:
    """Return whether a hold is sent on and on: whoever misses a zero velocity goes on for ever."""
    if output.hold is not None:
        return output.hold == 'send'
    return output.interface == 'velocity' or output.kind == 'twist_stamped'


@dataclass(frozen=True)
class SpeedScalingTopic:
    """Topic on which the robot says at which share of its speed it moves.

    Attributes:
        topic: relative topics are in the node's namespace.
        full: its number at full speed; UR's driver publishes percent: 100.
    """

    topic: str
    full: float
    type: ScalingType = 'std_msgs/Float64'


@dataclass(frozen=True)
class LeaderJoint:
    """One joint of a leader, and the robot's joint that it leads.

    Attributes:
        joint: the robot's joint.
        name: name in the leader's messages; the joint's own there where left out.
        unit: unit of its number; the joint's where left out.
        zero, one: its numbers at the robot joint's own `zero` and `one`; see `JointCommand`.
    """

    joint: str
    name: str | None = None
    unit: JointUnit | None = None
    zero: float | None = None
    one: float | None = None


@dataclass(frozen=True)
class LeaderButton:
    """A button that is held to lead (`sensor_msgs/Joy`); `number` counts from 0."""

    topic: str
    number: int = 0


@dataclass(frozen=True)
class RobotLeader:
    """Another arm, which a person leads the robot by.

    Attributes:
        topic: its measured positions (`sensor_msgs/JointState`); relative topics are in the node's
            namespace.
        mode: `offset` keeps the distance that it has from the robot when it takes over; `absolute`
            brings the robot to where the leader is, slowly.
        engage: what lets it take over beside `~/take_over`: `service` nothing, `button` a button
            that is held, `motion` its own, until it has rested for a second.
        timeout_s: without a usable message for so long it is lost, and the robot is paused.
    """

    topic: str
    joints: tuple[LeaderJoint, ...]
    mode: LeaderMode = 'offset'
    engage: Engage = 'service'
    button: LeaderButton | None = None
    stamp: StampSource = 'header'
    timeout_s: float = 0.3


@dataclass(frozen=True)
class RobotSpec:
    """Contents of a robot file.

    Attributes:
        format: 1.
        name: for people and diagnostics.
        joints: everything measured and commanded.
        outputs: one robot may have several (arm, gripper).
        cameras: all there are; a policy uses those it was trained with.
        start: tolerance and speed of a start from standstill, in the joints' units.
        on_stop: way to stop, by cause: brake along the plan, or freeze at once.
        restart_after_outage_s: a loss of joint states, of the policy's answers or of control ticks
            that lasts longer stops the robot until it is started again.
        home: position of each joint, in its unit, to which `~/home` sends the robot; joints that
            are left out stay where they are.
        leader: another arm, which a person leads the robot by.
        urdf: path of a URDF, relative to the robot file, whose limits are never exceeded.
        speed_scaling: topic of the speed scaling that the executor follows. A
            `joint_trajectory_controller` that scales by itself needs none.
    """

    format: int
    name: str
    joints: tuple[RobotJoint, ...]
    outputs: tuple[RobotOutput, ...]
    cameras: tuple[RobotCamera, ...] = ()
    joint_states: tuple[JointStateTopic, ...] = (JointStateTopic('joint_states'),)
    poses: tuple[RobotPose, ...] = ()
    start: StartParameters = field(default_factory=StartParameters)
    on_violation: LimitActions = field(default_factory=LimitActions)
    on_stop: StopActions = field(default_factory=StopActions)
    restart_after_outage_s: float = 1.5
    home: Mapping[str, float] = field(default_factory=dict)
    leader: RobotLeader | None = None
    urdf: str | None = None
    speed_scaling: SpeedScalingTopic | None = None

    def joint(self, name: str) -> RobotJoint:
        return next(joint for joint in self.joints if joint.name == name)

    def joint_source(self, name: str) -> JointStateTopic:
        return next(
            source for source in self.joint_states if not source.joints or name in source.joints
        )


@dataclass(frozen=True)
class Robot(RobotSpec):
    """A robot file that was read and checked: its text, and that of the URDF that it names."""

    file: Path = Path()
    text: str = ''
    urdf_text: str | None = None


def received_topics(robot: RobotSpec) -> tuple[str, ...]:
    return tuple(source.topic for source in robot.joint_states if source.stamp == 'receive')


def is_received(robot: RobotSpec, joint: str) -> bool:
    return robot.joint_source(joint).stamp == 'receive'


_Named = TypeVar('_Named', bound='RobotJoint | RobotCamera | RobotPose')


def by_name(items: Iterable[_Named]) -> dict[str, _Named]:
    """Joints, cameras or poses under the names that policies use: their own and their aliases."""
    return {name: item for item in items for name in (item.name, *item.aliases)}


# Units of joints and URDFs: sizes, and conversion from a measured position to its command.

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

    A `command` that leaves the conversion open is a FieldError whose field begins with `command`.
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


def leader_scaling(item: LeaderJoint, joint: RobotJoint) -> tuple[float, float]:
    """Return scale and offset: the leader's number = the joint's position * scale + offset.

    FieldError as of `command_scaling`.
    """
    number = JointCommand(item.name, item.unit, item.zero, item.one)
    return command_scaling(replace(joint, command=number))
