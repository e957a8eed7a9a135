"""A robot file and a policy bundle, brought together: names, units, columns, limits, cameras.

Topics always speak the robot's joint names and units; only the policy's own state and actions are
in the bundle's. `match_robot` finds all that does not fit, before anything moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_runtime.bundle.pose_rules import named_as_poses, pose_options
from vla_runtime.bundle.schema import SPEC_FILE, ActionSpec, BundleSpec, PoseSpec
from vla_runtime.execution.columns import Column, ColumnKind
from vla_runtime.execution.limits import Limits
from vla_runtime.family.declaration import observation_steps
from vla_runtime.files.quotes import join_truncated
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.processing.poses import from_matrix
from vla_runtime.robot.kinematics import ArmKinematics, KinematicsError
from vla_runtime.robot.limits import column_limits
from vla_runtime.robot.schema import (
    SIZE,
    Robot,
    RobotCamera,
    RobotJoint,
    RobotOutput,
    by_name,
    command_scaling,
)
from vla_runtime.robot.written_columns import JointChain, WrittenColumns, quaternion_names
from vla_runtime.types import RotationForm


class MatchError(ValueError):
    """The bundle and the robot file do not fit; every conflict is a line that names both files."""


@dataclass(frozen=True)
class Scaling:
    """Per column: robot value = policy value * scale + offset; commands from positions likewise.

    `scale`, never zero, and `offset`, zero for velocities, are (columns,) float64.
    """

    scale: np.ndarray
    offset: np.ndarray

    def to_robot(self, values: np.ndarray) -> np.ndarray:
        """Policy units to robot units; (..., columns) to (..., columns) float64."""
        return np.asarray(values, dtype=np.float64) * self.scale + self.offset

    def to_policy(self, values: np.ndarray) -> np.ndarray:
        """Robot units to policy units; (..., columns) to (..., columns) float64."""
        return (np.asarray(values, dtype=np.float64) - self.offset) / self.scale


@dataclass(frozen=True)
class MatchedOutput:
    """One command topic and what of a command goes there.

    Attributes:
        columns: indices of its numbers in a command, in the output's own order: of a pose x, y, z
            and its quaternion's w, x, y, z; of a twist its linear and its angular velocity.
        message_names: the joints' names in the message; empty for poses.
        units: scaling from the robot's units to those of the message; None where they are the same.
        pose: the policy's pose; None for joint outputs.
        frame_id: frame of the pose; '' for joint outputs.
    """

    output: RobotOutput
    columns: tuple[int, ...]
    message_names: tuple[str, ...] = ()
    pose: PoseSpec | None = None
    frame_id: str = ''
    units: Scaling | None = None


@dataclass(frozen=True)
class EarlierFrame:
    """A policy's image that is an earlier frame of its camera, so much older than the newest."""

    camera: str
    age_ns: int


@dataclass(frozen=True)
class MeasuredPose:
    """A pose of the policy's state that is computed from measured joints.

    Attributes:
        joints: their indices in `measured_joints`.
        state: indices of position and rotation in the state.
        form: representation of the rotation, and its axes.
    """

    chain: JointChain
    joints: tuple[int, ...]
    state: tuple[int, ...]
    form: RotationForm
    euler_axes: str


@dataclass(frozen=True)
class MeasuredTool:
    """Measurement of a position that a twist moves, along the axes that the workspace box bounds.

    Attributes:
        columns: columns of the velocities along these axes.
        axes: which of x, y and z they are: 0, 1, 2.
        joints: those that measure the position; empty where a topic does.
        topic: topic of the pose; None where joints measure it.
        frame_id: frame in which it is to be measured.
    """

    columns: tuple[str, ...]
    axes: tuple[int, ...]
    joints: tuple[str, ...]
    topic: str | None
    frame_id: str


@dataclass(frozen=True)
class RobotMatch:
    """Mapping between one policy and one robot.

    Attributes:
        state_joints: the robot's joint of each of the policy's state dimensions, in order; of a
            dimension that belongs to a pose through joints a name of its own.
        measured_joints: joints that the state is made of, each once.
        measured_poses: poses of the state that are computed from them.
        state: scaling between measured positions and the policy's state.
        written: the policy's actions under the robot's names, as chunks and plans have them, and
            the columns of commands that they become.
        actions: scaling between the numbers of chunks and the policy's actions.
        limits: of the columns, in robot units; with the URDF's.
        cameras: policy's camera name to the robot's camera; cameras that the policy was trained
            without (`present: false`) are left out.
        earlier: those of `cameras` that are an earlier frame of another one.
        state_ages_ns: ages of the earlier states that the policy sees, the newest first.
        tools: positions that twists move, measured for the workspace box.
    """

    state_joints: tuple[str, ...]
    state: Scaling
    written: WrittenColumns
    actions: Scaling
    limits: Limits
    cameras: Mapping[str, RobotCamera]
    earlier: Mapping[str, EarlierFrame]
    outputs: tuple[MatchedOutput, ...]
    measured_joints: tuple[str, ...]
    measured_poses: tuple[MeasuredPose, ...] = ()
    state_ages_ns: tuple[int, ...] = ()
    tools: tuple[MeasuredTool, ...] = ()

    def observed_as(self, joint: str) -> str:
        """Return the column that a measured joint is the position of; empty for none."""
        for tool in self.tools:
            if joint in tool.joints:
                return tool.columns[tool.joints.index(joint)]
        # A number of a pose is no joint, whatever it is called.
        return '' if joint in self.written.pose_of else joint

    def policy_state(self, measured: np.ndarray) -> np.ndarray:
        """Return measured positions, (measured_joints,), as the state, (state_joints,) float64."""
        if not self.measured_poses:
            return self.state.to_policy(measured)
        state = np.zeros(len(self.state_joints))
        for place, name in enumerate(self.state_joints):
            if name in self.measured_joints:
                state[place] = measured[self.measured_joints.index(name)]
        for pose in self.measured_poses:
            joints = measured[list(pose.joints)] * pose.chain.unit
            (place_m,), (turned,) = pose.chain.kinematics.forward(joints[None])
            rotation = from_matrix(turned, pose.form, pose.euler_axes)
            state[list(pose.state)] = np.concatenate([place_m, rotation])
        return self.state.to_policy(state)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.written.columns

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.written.names

    @property
    def action_kinds(self) -> tuple[str, ...]:
        return self.written.kinds


def _earlier_frames(spec: BundleSpec) -> dict[str, EarlierFrame]:
    return {
        camera.name: EarlierFrame(camera.frame_of, round(camera.steps_ago * spec.step_time_s * 1e9))
        for camera in spec.cameras
        if camera.present and camera.frame_of is not None and camera.steps_ago is not None
    }


def _state_ages_ns(spec: BundleSpec) -> tuple[int, ...]:
    steps = observation_steps(spec.dims) or 1
    return tuple(round(ago * spec.step_time_s * 1e9) for ago in range(1, steps))


def match_robot(robot: Robot, spec: BundleSpec, bundle_place: str | Path) -> RobotMatch:
    """Bring a robot file and a bundle together.

    Messages name `bundle_place`: the bundle's folder, or the address of the server that has it.

    Raises:
        MatchError: a camera, state, action or pose of the policy that the robot file does not have,
            units that cannot be converted, an output that cannot be filled, or limits that make no
            sense together.
    """
    return _Matcher(robot, spec, f'{bundle_place}/{SPEC_FILE}').match()


# So many unknown names may be slips; of more, and most of all, the files are of two robots.
_SLIPS = 4


class _Matcher:
    """Collects every mismatch, so that the files can be mended in one go."""

    def __init__(self, robot: Robot, spec: BundleSpec, bundle_file: str) -> None:
        self._robot = robot
        self._spec = spec
        self._bundle_file = bundle_file
        self._conflicts: list[str] = []
        # Names of joints and cameras that the policy asked for; of unknown ones what was said.
        self._asked: set[str] = set()
        self._unknown: dict[str, list[str]] = {}
        # Names of 'state' and 'actions' that are no joints, and that one conflict tells of.
        self._explained: set[tuple[str, str]] = set()
        self._joints = by_name(robot.joints)
        self._poses = tuple(pose for pose in spec.poses if not self._moves_joints(pose))
        self._pose_of = {name: pose for pose in self._poses for name in pose.actions}

    def match(self) -> RobotMatch:
        cameras = self._match_cameras()
        chains = {pose.name: self._chain(pose) for pose in self._poses}
        # Every chain measures its pose; those whose pose no output carries command it, too.
        self._measuring = {name: chain for name, chain in chains.items() if chain is not None}
        self._chains = {
            pose.name: self._measuring[pose.name]
            for pose in self._poses
            if pose.name in self._measuring and not self._is_carried(pose)
        }
        self._measured_pose_of = {
            name: pose
            for pose in self._poses
            if pose.name in self._measuring
            for name in (*pose.state_position, *pose.state_rotation)
        }
        self._explain_poses()
        self._explain_undeclared()
        tools = tuple(filter(None, map(self._tool, self._poses)))
        self._measured_tools = {name for tool in tools for name in tool.columns}
        state = [self._state_scaling(index) for index in range(len(self._spec.state))]
        columns = [self._column(action) for action in self._spec.actions]
        written = WrittenColumns(columns, self._poses, self._chains)
        actions = [self._action_scaling(index) for index in range(len(self._spec.actions))]
        self._check_repeated('state', [joint for joint, _, _ in state if joint])
        self._check_repeated('actions', [column.name for column in written.columns])
        outputs = self._match_outputs(written) if not self._conflicts else ()
        if self._conflicts:
            raise MatchError('\n'.join(self._told()))
        try:
            limits = column_limits(self._robot, written)
            written.take_limits(limits, self._spec.step_time_s)
        except ValueError as error:
            raise MatchError(f'{self._robot.file}: {error}') from None
        return RobotMatch(
            state_joints=tuple(joint for joint, _, _ in state),
            state=_scaling([(scale, offset) for _, scale, offset in state]),
            written=written,
            actions=_scaling(actions),
            limits=limits,
            cameras=cameras,
            earlier=_earlier_frames(self._spec),
            state_ages_ns=_state_ages_ns(self._spec),
            outputs=outputs,
            tools=tools,
            **self._measured([joint for joint, _, _ in state]),
        )

    def _measured(self, state_joints: Sequence[str]) -> dict[str, Any]:
        poses = dict.fromkeys(pose.name for pose in self._measured_pose_of.values())
        plain = [
            joint
            for joint, item in zip(state_joints, self._spec.state, strict=True)
            if item.name not in self._measured_pose_of
        ]
        of_chains = [column.name for name in poses for column in self._measuring[name].columns]
        joints = tuple(dict.fromkeys([*plain, *of_chains])) if poses else tuple(plain)
        places = {item.name: index for index, item in enumerate(self._spec.state)}
        return {
            'measured_joints': joints,
            'measured_poses': tuple(
                MeasuredPose(
                    chain=self._measuring[pose.name],
                    joints=tuple(
                        joints.index(one.name) for one in self._measuring[pose.name].columns
                    ),
                    state=tuple(
                        places[name] for name in (*pose.state_position, *pose.state_rotation)
                    ),
                    form=pose.form,
                    euler_axes=pose.euler_axes or 'sxyz',
                )
                for pose in self._poses
                if pose.name in poses
            ),
        }

    def _explain_poses(self) -> None:
        """Note poses that the robot file lacks or does not measure, each in one conflict."""
        known = by_name(self._robot.poses)
        for pose in self._poses:
            here = f'poses[{self._spec.poses.index(pose)}]'
            robot_pose = known.get(pose.name)
            measured = (*pose.state_position, *pose.state_rotation)
            lacking = [
                name
                for name in measured
                if name not in self._joints and name not in self._measured_pose_of
            ]
            self._explained |= {('state', name) for name in lacking}
            if robot_pose is None:
                self._conflict(f'{here}.name', self._no_pose(pose))
                continue
            link = f'link of poses[{self._robot.poses.index(robot_pose)}]'
            absent = ['urdf'] if self._robot.urdf_text is None else []
            absent += [link] if robot_pose.link is None else []
            # A link that leads nowhere is noted already.
            if lacking and absent:
                self._conflict(
                    f'{here}.state_position',
                    f"nothing measures {', '.join(lacking)} of the pose '{pose.name}': uncomment "
                    f'{" and ".join(absent)} in the robot file, or write them, so that the pose is '
                    'computed from the joints; or measure it by joints of these names',
                )

    def _no_pose(self, pose: PoseSpec) -> str:
        known = by_name(self._robot.poses)
        taken = {known[one.name].name for one in self._poses if one.name in known}
        free = [one.name for one in self._robot.poses if one.name not in taken]
        if not free:
            return f"no pose '{pose.name}' in poses (name or aliases): the robot file needs one"
        if len(free) == 1:
            return f"the robot file's pose is '{free[0]}': give it the alias '{pose.name}'"
        return f"the robot file's poses are {', '.join(free)}: give one the alias '{pose.name}'"

    def _explain_undeclared(self) -> None:
        """Note numbers that are named as a pose, that no pose holds, and that are no joints."""
        actions = [name for name in self._spec.action_names if name not in self._pose_of]
        found = [
            names for names in named_as_poses(actions) if not any(map(self._joints.get, names))
        ]
        places = {name: index for index, name in enumerate(self._spec.action_names)}
        called = [pose.name for pose in self._robot.poses]
        for names in found:
            self._explained |= {('actions', name) for name in names}
            self._conflict(
                f'actions[{places[names[0]]}].name',
                f'{", ".join(names)} are named as the pose of an end effector, but the bundle '
                'takes them for joints: export it again with '
                f'{pose_options(names, called[0] if len(called) == 1 else "tool")}',
            )
        if not found and not self._poses:
            return
        held = {
            name
            for pose in self._spec.poses
            for name in (*pose.state_position, *pose.state_rotation)
        }
        units = {item.name: item.unit for item in self._spec.state}
        for names in named_as_poses([name for name in units if name not in held]):
            if not all(self._can_measure(name, units[name]) for name in names):
                self._explained |= {('state', name) for name in names}
                self._conflict(
                    f'state[{list(units).index(names[0])}].name',
                    f'{", ".join(names)} are named as the measured pose of an end effector, but '
                    'the bundle takes them for joints: export it again with --pose-state '
                    f'{",".join(names)}, or with their units (--units) where joints measure them',
                )

    def _can_measure(self, name: str, unit: str) -> bool:
        """Return whether a joint is called so, and has a meaning for a state without a unit."""
        joint = self._joints.get(name)
        if joint is None:
            return False
        has_range = joint.zero is not None and joint.one is not None
        return has_range or SIZE[unit][0] != 'none' or SIZE[joint.unit][0] == 'none'

    def _is_carried(self, pose: PoseSpec) -> bool:
        carried = {output.pose for output in self._robot.outputs}
        return pose.name in by_name(one for one in self._robot.poses if one.name in carried)

    def _moves_joints(self, pose: PoseSpec) -> bool:
        """Return whether a twist is the velocities of joints: no output of the robot carries it."""
        return (
            pose.kind == 'velocity'
            and not self._is_carried(pose)
            and all(name in self._joints for name in pose.actions)
        )

    def _chain(self, pose: PoseSpec) -> JointChain | None:
        """Return the joints that a pose is measured through; None where it has no link."""
        robot_pose = by_name(self._robot.poses).get(pose.name)
        if robot_pose is None or robot_pose.link is None or self._robot.urdf_text is None:
            return None
        index = self._robot.poses.index(robot_pose)
        if pose.kind == 'velocity' and not self._is_carried(pose):
            self._conflict(
                'poses',
                f"'{pose.name}' is velocity; only poses go through joints: give it an output "
                'twist_stamped',
            )
            return None
        joints = {joint.in_messages: joint for joint in self._robot.joints}
        try:
            kinematics = ArmKinematics(
                self._robot.urdf_text, robot_pose.frame_id, robot_pose.link, list(joints)
            )
        except KinematicsError as error:
            self._conflict('poses', f'poses[{index}].link of the robot file: {error}')
            return None
        chain = [joints[name] for name in kinematics.joints]
        for joint in chain:
            if SIZE[joint.unit][0] == 'none':
                self._conflict('poses', f"joint '{joint.name}' in '{joint.unit}' holds no pose")
        return JointChain(
            columns=tuple(_joint_column(joint, 'position') for joint in chain),
            kinematics=kinematics,
            unit=np.array([SIZE[joint.unit][1] for joint in chain]),
            lower=np.array(robot_pose.bounds)[:, 0],
            upper=np.array(robot_pose.bounds)[:, 1],
            clamps=self._robot.on_violation.workspace == 'clamp',
        )

    def _tool(self, pose: PoseSpec) -> MeasuredTool | None:
        """Return where the position that a twist moves is measured; None without a box to keep."""
        twists = [output.pose for output in self._robot.outputs if output.kind == 'twist_stamped']
        robot_pose = by_name(one for one in self._robot.poses if one.name in twists).get(pose.name)
        if pose.kind != 'velocity' or robot_pose is None:
            return None
        axes = tuple(np.flatnonzero(np.isfinite(robot_pose.bounds).any(axis=1)).tolist())
        if not axes:
            return None
        where = f'poses[{self._robot.poses.index(robot_pose)}]'
        otherwise = f'leave out {where}.lower and upper if the controller alone is to bound it'
        if pose.frame != 'base':
            self._conflict(
                f'poses[{self._spec.poses.index(pose)}].frame',
                f"the twist of '{pose.name}' is in the tool's own frame, so its workspace box in "
                f"'{robot_pose.frame_id}' cannot be held: command the twist in that frame (frame: "
                f'base), or {otherwise}',
            )
            return None
        columns = tuple(pose.position[axis] for axis in axes)
        if robot_pose.topic is not None:
            return MeasuredTool(columns, axes, (), robot_pose.topic, robot_pose.frame_id)
        names = pose.state_position or pose.position
        joints = [self._joints.get(names[axis]) for axis in axes]
        found = [joint.name for joint in joints if joint is not None and joint.unit == 'm']
        if len(found) == len(axes):
            return MeasuredTool(columns, axes, tuple(found), None, robot_pose.frame_id)
        self._conflict(
            'poses',
            f"{where}.lower and upper bound '{pose.name}', but nothing measures where its twist "
            f'leads: give {where}.topic, on which its pose is measured (PoseStamped in '
            f"'{robot_pose.frame_id}'), or the bundle's pose a state_position of joints in m; or "
            f'{otherwise}',
        )
        return None

    def _conflict(self, bundle_field: str, message: str) -> None:
        self._conflicts.append(
            f'{self._bundle_file}: {bundle_field}: {message} (robot file {self._robot.file})'
        )

    def _note_unknown(self, field: str, name: str, message: str) -> None:
        self._conflict(field, message)
        self._unknown.setdefault(name, []).append(self._conflicts[-1])

    def _told(self) -> list[str]:
        """Return the conflicts; one for unknown names where most are another robot's."""
        if len(self._unknown) <= max(_SLIPS, len(self._asked) // 2):
            return self._conflicts
        of_names = {text for texts in self._unknown.values() for text in texts}
        joints = [joint.name for joint in self._robot.joints]
        cameras = [camera.name for camera in self._robot.cameras]
        robots = join_truncated([*joints, *cameras], ', ')
        policys = join_truncated(self._unknown, ', ')
        return [
            f'{self._bundle_file}: is of another robot than {self._robot.file}: '
            f'{len(self._unknown)} of the {len(self._asked)} names of its joints and cameras are '
            f'unknown there ({policys}; the robot has {robots}). Take the bundle that was made for '
            "this robot; if only the names differ, give them as 'aliases' in the robot file",
            *(text for text in self._conflicts if text not in of_names),
        ]

    def _check_repeated(self, field: str, names: Sequence[str]) -> None:
        for name in sorted({name for name in names if names.count(name) > 1}):
            self._conflict(field, f"two names of the policy mean the robot's joint '{name}'")

    def _match_cameras(self) -> dict[str, RobotCamera]:
        known = by_name(self._robot.cameras)
        found = {}
        for index, camera in enumerate(self._spec.cameras):
            if not camera.present:
                continue
            name = camera.frame_of or camera.name
            self._asked.add(name)
            if name in known:
                found[camera.name] = known[name]
                self._check_image_size(index, known[name])
            else:
                self._note_unknown(
                    f'cameras[{index}].name',
                    name,
                    f"no camera '{name}' in cameras (name or aliases){did_you_mean(name, known)}",
                )
        return found

    def _check_image_size(self, index: int, camera: RobotCamera) -> None:
        sizes = self._spec.fixed_image_sizes
        if sizes is None:
            return
        height, width = sizes[index]
        if (camera.height or height, camera.width or width) != (height, width):
            self._conflict(
                f'cameras[{index}]',
                f"'{camera.name}' sends {camera.width}x{camera.height} (width x height), but the "
                f'policy takes {width}x{height} and nothing resizes them; set the camera driver',
            )

    def _joint_of(self, field: str, name: str) -> RobotJoint | None:
        if (field.partition('[')[0], name) in self._explained:
            return None
        joint = self._joints.get(name)
        self._asked.add(name)
        if joint is None:
            hint = did_you_mean(name, self._joints)
            self._note_unknown(field, name, f"no joint '{name}' in joints (name or aliases){hint}")
        return joint

    def _state_scaling(self, index: int) -> tuple[str, float, float]:
        item = self._spec.state[index]
        pose = self._measured_pose_of.get(item.name)
        if pose is not None:
            # In m, rad and plain numbers, as the pose's actions are.
            return f'{pose.name}/{item.name}', SIZE[item.unit][1], 0.0
        joint = self._joint_of(f'state[{index}].name', item.name)
        if joint is None:
            return '', 1.0, 0.0
        return joint.name, *self._convert(f'state[{index}].unit', item.unit, joint)

    def _column(self, action: ActionSpec) -> Column:
        kind: ColumnKind = 'velocity' if action.kind == 'velocity' else 'position'
        joint = self._joints.get(action.name)
        # A number of a pose is no joint, whatever it is called: it has the pose's limits and unit.
        if joint is None or action.name in self._pose_of:
            return Column(action.name, kind, feedback=action.name in self._measured_tools)
        return _joint_column(joint, kind)

    def _action_scaling(self, index: int) -> tuple[float, float]:
        action = self._spec.actions[index]
        unit = action.unit.removesuffix('/s')
        if action.name in self._pose_of:
            # Pose topics are in m, rad and plain numbers, whatever the policy was trained with.
            return SIZE[unit][1], 0.0
        joint = self._joint_of(f'actions[{index}].name', action.name)
        if joint is None:
            return 1.0, 0.0
        scale, offset = self._convert(f'actions[{index}].unit', unit, joint)
        return scale, 0.0 if action.kind == 'velocity' else offset

    def _convert(self, field: str, unit: str, joint: RobotJoint) -> tuple[float, float]:
        """Scale and offset from the policy's unit to the joint's."""
        unit = unit.removesuffix('/s')
        dimension, size = SIZE[unit]
        joint_dimension, joint_size = SIZE[joint.unit]
        full = 1.0 / size
        # First: `zero` and `one` hold for a joint without a dimension too (an inverted gripper).
        if dimension == 'none' and joint.zero is not None and joint.one is not None:
            return (joint.one - joint.zero) / full, joint.zero
        if dimension == joint_dimension:
            return size / joint_size, 0.0
        mend = (
            f"give the joint 'zero' and 'one': its positions where the policy says 0 and {full:g}"
            if dimension == 'none'
            else "correct the bundle's or the joint's unit"
        )
        self._conflict(
            field, f"'{unit}' cannot become '{joint.unit}' of joint '{joint.name}'; {mend}"
        )
        return 1.0, 0.0

    def _match_outputs(self, written: WrittenColumns) -> tuple[MatchedOutput, ...]:
        columns = written.columns
        place = {column.name: index for index, column in enumerate(columns)}
        of_joints = {name: at for name, at in place.items() if name not in written.pose_of}
        matched: list[MatchedOutput] = []
        carried: set[int] = set()
        for index, output in enumerate(self._robot.outputs):
            one = (
                self._joint_output(index, output, of_joints, columns)
                if output.pose is None
                else self._pose_output(output, place)
            )
            if one is not None:
                matched.append(one)
                carried.update(one.columns)
        carried_poses = [one.pose for one in matched if one.pose is not None]
        carried_poses += [
            pose
            for pose in self._poses
            if pose.name in self._chains
            and all(place[column.name] in carried for column in self._chains[pose.name].columns)
        ]
        told: list[PoseSpec] = []
        for index, action in enumerate(self._spec.actions):
            pose = self._pose_of.get(action.name)
            if pose in told:
                continue
            in_outputs = pose in carried_poses or (
                pose is None and place.get(written.names[index]) in carried
            )
            if not in_outputs:
                what = f"pose '{pose.name}' with '{action.name}'" if pose else f"'{action.name}'"
                told += [pose] if pose else []
                self._conflict(
                    f'actions[{index}].name', f'{what} is carried by none of the outputs'
                )
        return tuple(matched)

    def _joint_output(
        self,
        index: int,
        output: RobotOutput,
        place: Mapping[str, int],
        columns: Sequence[Column],
    ) -> MatchedOutput | None:
        missing = [name for name in output.joints if name not in place]
        if len(missing) == len(output.joints):
            return None
        if missing:
            self._conflict(
                'actions',
                f'outputs[{index}] also carries {missing}, which the policy does not command; '
                'give these joints an output of their own',
            )
            return None
        where = tuple(place[name] for name in output.joints)
        wrong = [name for name in output.joints if columns[place[name]].kind != output.interface]
        if wrong:
            self._conflict(
                'actions',
                f"outputs[{index}].interface is '{output.interface}', but the policy commands "
                f'the {columns[place[wrong[0]]].kind} of {wrong}',
            )
        joints = [self._robot.joint(name) for name in output.joints]
        return MatchedOutput(
            output,
            where,
            message_names=tuple(joint.in_commands for joint in joints),
            units=command_units(output, self._robot),
        )

    def _pose_output(self, output: RobotOutput, place: Mapping[str, int]) -> MatchedOutput | None:
        robot_pose = next(pose for pose in self._robot.poses if pose.name == output.pose)
        known = (robot_pose.name, *robot_pose.aliases)
        pose = next((pose for pose in self._spec.poses if pose.name in known), None)
        if pose is None:
            return None
        wanted = 'twist_stamped' if pose.kind == 'velocity' else 'pose_stamped'
        if output.kind != wanted:
            self._conflict(
                'poses', f"'{pose.name}' is {pose.kind} and needs {wanted}, not {output.kind}"
            )
        rotation = pose.rotation
        if pose.kind != 'velocity':
            rotation = quaternion_names(pose.name)
        elif pose.form != 'axis_angle':
            self._conflict(
                f'poses[{self._spec.poses.index(pose)}].form',
                f"'{pose.name}' is velocity and written as {pose.form}, but a twist has three "
                'angular velocities, which no rates of other numbers are: write them as axis_angle '
                'in the bundle, rad/s about x, y and z, or command absolute poses',
            )
        where = tuple(place[name] for name in (*pose.position, *rotation))
        return MatchedOutput(output, where, pose=pose, frame_id=robot_pose.frame_id)


def _joint_column(joint: RobotJoint, kind: ColumnKind) -> Column:
    return Column(
        joint.name,
        kind,
        continuous=joint.continuous,
        # Tolerances and the approach speed are in rad or m; of a unitless joint the whole way
        # from 0 to 1 counts as one.
        scale=1.0 / SIZE[joint.unit][1],
    )


def command_units(output: RobotOutput, robot: Robot) -> Scaling | None:
    """Return the scaling from joints to the numbers of messages; None: the same."""
    pairs = [command_scaling(robot.joint(name)) for name in output.joints]
    if output.interface == 'velocity':
        pairs = [(scale, 0.0) for scale, _ in pairs]
    return _scaling(pairs) if any(pair != (1.0, 0.0) for pair in pairs) else None


def _scaling(pairs: Sequence[tuple[float, float]]) -> Scaling:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return Scaling(table[:, 0], table[:, 1])
