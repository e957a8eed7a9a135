"""Rules that fields of a robot file keep together, beyond words and shapes.

Each rule raises `FieldError` with the full path of the field that is wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from vla_runtime.execution.leader import LeaderParameters
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.robot.schema import (
    ACTION_KINDS,
    FORMAT,
    ONE_JOINT_KINDS,
    POSE_KINDS,
    JointCommand,
    JointStateTopic,
    LeaderButton,
    RobotCamera,
    RobotJoint,
    RobotLeader,
    RobotOutput,
    RobotPose,
    RobotSpec,
    SpeedScalingTopic,
    command_scaling,
    leader_scaling,
)

# Messages kept while a node is busy: at its rates many seconds of them.
_MOST_DEPTH = 1000
_POSITIVE = (
    'velocity',
    'acceleration',
    'max_step',
    'max_tracking_error',
    'start_tolerance',
    'approach_speed',
    'hold_follows',
)
# Their messages name each joint; those of the others count on the order.
_NAMED_KINDS = ('joint_trajectory', 'joint_state')
_SLOWEST_GOALS_HZ, _FASTEST_GOALS_HZ = 0.1, 100.0
_FASTEST_CONTROLLER_HZ = 10_000.0
# Names that the package's nodes and ROS itself publish on: alone, last in a topic, or anywhere.
_TOPICS_OF_ROS = ('clock', 'diagnostics', 'parameter_events', 'rosout', 'tf', 'tf_static')
_TOPICS = ('action_chunk', 'committed_plan')
_PRIVATE_TOPICS = ('~/instruction', '~/current_instruction', '~/description', '~/report')
_SINGLE = ('speed_scaling', 'leader', 'leader.button')
_NODES = ('vla_policy', 'vla_executor', 'vla_recorder')
# ROS 2 takes 247 characters of a topic; the rest is for the nodes' namespace.
_LONGEST_NAME = 200
# Numbers so small that nothing would move are slips, and overflow where they divide.
_LEAST = 1e-9
# https://design.ros2.org/articles/topic_and_service_names.html, without substitutions.
_TOPIC = re.compile(r'(/|~/)?[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*')
# Of a node; relative names are in the nodes' namespace.
_NODE = re.compile(r'/?[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*')


def check_robot(robot: RobotSpec) -> None:
    """Raise FieldError at the first rule that a robot file breaks."""
    if robot.format != FORMAT:
        raise FieldError('format', f'{robot.format}: this version reads format {FORMAT}')
    _require_short('name', robot.name)
    _require_some('joints', robot.joints, 'what does the robot move?')
    _require_some('joint_states', robot.joint_states, 'where are the joints measured?')
    _require_some('outputs', robot.outputs, 'where do the commands go?')
    if not robot.restart_after_outage_s >= _LEAST:
        raise FieldError(
            'restart_after_outage_s',
            f'{robot.restart_after_outage_s:g} where more than 0 is expected',
        )
    _require_unique_names('joints', robot.joints)
    _require_unique_names('cameras', robot.cameras)
    _require_unique_names('poses', robot.poses)
    _check_topics(robot)
    for index, joint in enumerate(robot.joints):
        _check_joint(f'joints[{index}]', joint, has_urdf=robot.urdf is not None)
    for index, pose in enumerate(robot.poses):
        _check_pose(f'poses[{index}]', pose, robot)
        _check_link(f'poses[{index}]', pose, robot)
    for index, output in enumerate(robot.outputs):
        _check_output(f'outputs[{index}]', output)
        _check_fields_of_kind(f'outputs[{index}]', output)
    for index, camera in enumerate(robot.cameras):
        if camera.rate_hz is not None and not 0.0 < camera.rate_hz < math.inf:
            raise FieldError(f'cameras[{index}].rate_hz', 'must be above 0')
        if camera.encoding is not None and camera.type == 'compressed':
            raise FieldError(
                f'cameras[{index}].encoding',
                'is for raw images: compressed ones say what they are; leave it out',
            )
    if robot.speed_scaling is not None and not robot.speed_scaling.full > 0.0:
        raise FieldError(
            'speed_scaling.full', f'{robot.speed_scaling.full:g} where more than 0 is expected'
        )
    _check_home(robot)
    if robot.leader is not None:
        _check_leader(robot, robot.leader)
    _check_joint_states(robot)
    _check_what_outputs_carry(robot)


def _check_joint(where: str, joint: RobotJoint, *, has_urdf: bool) -> None:
    _require_positive(where, joint, _POSITIVE)
    if (joint.lower is None) != (joint.upper is None):
        missing = 'lower' if joint.lower is None else 'upper'
        raise FieldError(f'{where}.{missing}', 'is missing: give both limits or neither')
    if joint.lower is not None and joint.upper is not None and joint.lower >= joint.upper:
        raise FieldError(
            f'{where}.lower', f'{joint.lower:g} is not smaller than upper {joint.upper:g}'
        )
    if joint.continuous and (joint.lower is not None or joint.unit != 'rad'):
        raise FieldError(
            f'{where}.continuous', 'a continuous joint is in rad and has neither lower nor upper'
        )
    if joint.grips and joint.continuous:
        raise FieldError(
            f'{where}.grips', 'a gripper closes at a limit: leave out grips or continuous'
        )
    if joint.grips and joint.max_tracking_error is not None:
        raise FieldError(
            f'{where}.max_tracking_error',
            f"has no use beside grips: true: an object may keep '{joint.name}' any distance from "
            'its command; leave one of them out',
        )
    if (joint.zero is None) != (joint.one is None):
        missing = 'zero' if joint.zero is None else 'one'
        raise FieldError(f'{where}.{missing}', 'is missing: zero and one go together')
    if joint.zero is not None and joint.zero == joint.one:
        raise FieldError(f'{where}.one', f'is the same position as zero ({joint.zero:g})')
    if joint.command is not None:
        _check_command(where, joint, joint.command)
    if joint.lower is not None and joint.upper is not None:
        check_with_limits(where, joint, joint.lower, joint.upper)
    for key in needed_limits(joint):
        if getattr(joint, key) is None and not has_urdf:
            raise FieldError(
                f'{where}.{key}',
                f"is missing: '{joint.name}' would move without this limit; give it, or name the "
                "robot's URDF in 'urdf'",
            )


def _check_command(where: str, joint: RobotJoint, command: JointCommand) -> None:
    if (command.zero is None) != (command.one is None):
        missing = 'zero' if command.zero is None else 'one'
        raise FieldError(f'{where}.command.{missing}', 'is missing: zero and one go together')
    if command.zero is not None and command.zero == command.one:
        raise FieldError(f'{where}.command.one', f'is the same command as zero ({command.zero:g})')
    if command.name is not None:
        _require_short(f'{where}.command.name', command.name)
    try:
        command_scaling(joint)
    except FieldError as error:
        raise FieldError(f'{where}.{error.field}', error.message) from None


def check_with_limits(where: str, joint: RobotJoint, lower: float, upper: float) -> None:
    """Refuse what no joint with these position limits can have.

    Args:
        joint: has `zero` and `one`, or neither.
        lower, upper: position limits, in the joint's unit.

    Raises:
        FieldError: `max_tracking_error` is more than the limits are apart; or `zero` or `one` lies
            further outside of them than that, or the two are less than a thousandth of it apart.
    """
    reach = upper - lower
    # A continuous joint of a URDF has no limits.
    if not math.isfinite(reach):
        return
    if joint.max_tracking_error is not None and joint.max_tracking_error > reach:
        raise FieldError(
            f'{where}.max_tracking_error',
            f"{joint.max_tracking_error:g} {joint.unit} would never stop '{joint.name}', whose "
            f'limits are only {reach:g} apart: give a smaller distance, or leave it out',
        )
    if joint.zero is None or joint.one is None:
        return
    for key, value in (('zero', joint.zero), ('one', joint.one)):
        if not lower - reach <= value <= upper + reach:
            raise FieldError(
                f'{where}.{key}',
                f'{value:g} {joint.unit} is far outside of the limits {lower:g} to {upper:g}: give '
                "a position of the joint, in the joint's unit",
            )
    if abs(joint.one - joint.zero) < 1e-3 * reach:
        raise FieldError(f'{where}.one', f'is the same position as zero ({joint.zero:g})')


def needed_limits(joint: RobotJoint) -> tuple[str, ...]:
    """Return the limits without which a joint is not moved: the robot file's, or the URDF's."""
    return ('velocity',) if joint.continuous else ('lower', 'upper', 'velocity')


def _check_home(robot: RobotSpec) -> None:
    _require_known('home', 'joints', robot.home, [joint.name for joint in robot.joints])
    for name, position in robot.home.items():
        joint = robot.joint(name)
        if joint.lower is not None and joint.upper is not None:
            check_home(joint, position, joint.lower, joint.upper)


def check_home(joint: RobotJoint, position: float, lower: float, upper: float) -> None:
    """Raise FieldError for a home position outside the joint's limits, in its unit."""
    if not lower <= position <= upper:
        raise FieldError(
            f'home.{joint.name}',
            f'{position:g} {joint.unit} is outside of the limits {lower:g} to {upper:g}',
        )


def _check_leader(robot: RobotSpec, leader: RobotLeader) -> None:
    _require_some('leader.joints', leader.joints, 'which joints does it lead?')
    names = [joint.name for joint in robot.joints]
    led: dict[str, int] = {}
    called: dict[str, int] = {}
    for index, item in enumerate(leader.joints):
        where = f'leader.joints[{index}]'
        _require_known(f'{where}.joint', 'joints', (item.joint,), names)
        _require_one_source(f'{where}.joint', 'is led by joints', (item.joint,), index, led)
        joint = robot.joint(item.joint)
        name = item.name or joint.in_messages
        _require_short(f'{where}.name', name)
        _require_one_source(f'{where}.name', 'is the name of joints', (name,), index, called)
        if (item.zero is None) != (item.one is None):
            missing = 'zero' if item.zero is None else 'one'
            raise FieldError(f'{where}.{missing}', 'is missing: zero and one go together')
        if item.zero is not None and item.zero == item.one:
            raise FieldError(f'{where}.one', f'is the same number as zero ({item.zero:g})')
        try:
            leader_scaling(item, joint)
        except FieldError as error:
            field = error.field.removeprefix('command.')
            raise FieldError(f'{where}.{field}', error.message) from None
    if (leader.engage == 'button') != (leader.button is not None):
        word = 'is missing' if leader.button is None else 'has no use'
        raise FieldError('leader.button', f"{word}: it goes together with 'engage: button'")
    LeaderParameters(tuple(led), leader.mode, leader.engage, leader.timeout_s)


def _check_pose(where: str, pose: RobotPose, robot: RobotSpec) -> None:
    limits = ('velocity', 'angular_velocity', 'acceleration', 'angular_acceleration')
    _require_positive(where, pose, limits)
    is_twist = any(
        output.pose == pose.name and output.kind == 'twist_stamped' for output in robot.outputs
    )
    if pose.topic is not None and not is_twist:
        raise FieldError(
            f'{where}.topic',
            'is for a pose that a twist_stamped output carries: poses are sent, not measured',
        )
    if pose.lower is None or pose.upper is None:
        for key in ('lower', 'upper'):
            if getattr(pose, key) is None and not (is_twist and pose.lower == pose.upper):
                raise FieldError(
                    f'{where}.{key}',
                    'is missing: give both corners of the workspace box'
                    + (', or neither' if is_twist else ''),
                )
        return
    for axis, (lower, upper) in enumerate(zip(pose.lower, pose.upper, strict=True)):
        if lower >= upper:
            raise FieldError(f'{where}.lower[{axis}]', f'{lower:g} is not smaller than {upper:g}')


def _check_link(where: str, pose: RobotPose, robot: RobotSpec) -> None:
    if pose.link is not None and robot.urdf is None:
        raise FieldError(f'{where}.link', 'is a link of the URDF, and the file names none (urdf)')


def _check_output(where: str, output: RobotOutput) -> None:
    for index, name in enumerate(output.shared_with):
        if not _NODE.fullmatch(name):
            raise FieldError(
                f'{where}.shared_with[{index}]',
                f"'{name}' is not the name of a node (letters, 0-9, _ and /)",
            )
    if output.kind in POSE_KINDS:
        if output.pose is None:
            raise FieldError(f'{where}.pose', f'is missing: {output.kind} carries a pose')
        if output.joints:
            raise FieldError(f'{where}.joints', f'{output.kind} carries a pose, not joints')
        return
    if not output.joints:
        raise FieldError(f'{where}.joints', f'is missing: {output.kind} carries joints')
    if output.pose is not None:
        raise FieldError(f'{where}.pose', f'{output.kind} carries joints, not a pose')
    if output.kind in ('joint_trajectory', *ACTION_KINDS) and output.interface != 'position':
        raise FieldError(
            f'{where}.interface',
            f'{output.kind} carries positions; use float64_multi_array or joint_state',
        )
    if output.kind in ONE_JOINT_KINDS and len(output.joints) != 1:
        raise FieldError(
            f'{where}.joints',
            f'{output.kind} carries one joint, not {len(output.joints)}: give each an output of '
            'its own',
        )


def _check_fields_of_kind(where: str, output: RobotOutput) -> None:
    """Refuse fields that an output of this kind has no use for, and numbers out of range."""
    of_kinds = {
        'group': ('joint_group_command',),
        'deadband': ACTION_KINDS,
        'goals_hz': ACTION_KINDS,
        'max_effort': ACTION_KINDS,
        'update_rate_hz': ('joint_trajectory',),
        'same_clock': ('joint_trajectory',),
    }
    for key, kinds in of_kinds.items():
        if getattr(output, key) is not None and output.kind not in kinds:
            raise FieldError(
                f'{where}.{key}', f'has no use in {output.kind}: it is of {" and ".join(kinds)}'
            )
    if output.shared_with and output.is_action:
        raise FieldError(
            f'{where}.shared_with',
            f'has no use in {output.kind}: who else sends goals is not heard',
        )
    _require_positive(where, output, ('deadband', 'max_effort'))
    cycles = output.update_rate_hz
    if cycles is not None and not 1.0 <= cycles <= _FASTEST_CONTROLLER_HZ:
        raise FieldError(
            f'{where}.update_rate_hz',
            f'{cycles:g} where 1 to {_FASTEST_CONTROLLER_HZ:g} cycles a second are expected',
        )
    rate = output.goals_hz
    if rate is not None and not _SLOWEST_GOALS_HZ <= rate <= _FASTEST_GOALS_HZ:
        raise FieldError(
            f'{where}.goals_hz',
            f'{rate:g} where {_SLOWEST_GOALS_HZ:g} to {_FASTEST_GOALS_HZ:g} goals a second are '
            'expected',
        )


def _check_joint_states(robot: RobotSpec) -> None:
    """Check that every joint is measured on exactly one topic, under a name unique there."""
    names = [joint.name for joint in robot.joints]
    in_messages = {joint.name: joint.in_messages for joint in robot.joints}
    source_of: dict[str, int] = {}
    for index, source in enumerate(robot.joint_states):
        where = f'joint_states[{index}].joints'
        if not source.joints and len(robot.joint_states) > 1:
            raise FieldError(where, 'is missing: with several topics each names its joints')
        _require_known(where, 'joints', source.joints, names)
        _require_one_source(where, 'comes from joint_states', source.joints, index, source_of)
        called = Counter(in_messages[name] for name in source.joints or names)
        for name, count in called.items():
            if count > 1:
                raise FieldError(where, f"{count} joints are called '{name}' in its messages")
    if len(robot.joint_states) == 1 and not robot.joint_states[0].joints:
        return
    for index, name in enumerate(names):
        if name not in source_of:
            raise FieldError(f'joints[{index}].name', f"no topic of joint_states brings '{name}'")


def _check_what_outputs_carry(robot: RobotSpec) -> None:
    joints = [joint.name for joint in robot.joints]
    poses = [pose.name for pose in robot.poses]
    output_of: dict[str, int] = {}
    for index, output in enumerate(robot.outputs):
        if output.pose is not None:
            where = f'outputs[{index}].pose'
            _require_known(where, 'poses', (output.pose,), poses)
            _require_one_source(where, 'is commanded by outputs', (output.pose,), index, output_of)
        else:
            where = f'outputs[{index}].joints'
            _require_known(where, 'joints', output.joints, joints)
            _require_one_source(where, 'is commanded by outputs', output.joints, index, output_of)
            called = Counter(robot.joint(name).in_commands for name in output.joints)
            for name, count in called.items():
                if count > 1 and output.kind in _NAMED_KINDS:
                    raise FieldError(where, f"{count} joints are called '{name}' in its messages")
            for joint in robot.joints:
                if output.is_action and joint.continuous and joint.name in output.joints:
                    raise FieldError(
                        where, f'{output.kind} is for grippers, and a gripper is not continuous'
                    )
                if output.interface == 'velocity' and joint.grips and joint.name in output.joints:
                    raise FieldError(
                        f'outputs[{index}].interface',
                        f"is velocity, but '{joint.name}' has grips: true, which holds on to an "
                        'object by a position beyond it; leave grips out or command positions',
                    )


def _require_some(field: str, items: Sequence[object], question: str) -> None:
    if not items:
        raise FieldError(field, f'is empty: {question}')


def _require_positive(
    where: str, item: RobotJoint | RobotPose | RobotOutput, keys: Iterable[str]
) -> None:
    for key in keys:
        value = getattr(item, key)
        if value is not None and value <= 0.0:
            raise FieldError(f'{where}.{key}', f'{value:g} where more than 0 is expected')
        if value is not None and value < _LEAST:
            raise FieldError(f'{where}.{key}', f'{value:g} where at least {_LEAST:g} is expected')


def _require_short(where: str, name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise FieldError(
            where, f'{len(name)} characters where at most {_LONGEST_NAME} are expected'
        )


def _require_known(where: str, list_name: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise FieldError(where, f"'{name}' is not in {list_name}{did_you_mean(name, known)}")


def _require_one_source(
    where: str, what: str, names: Iterable[str], index: int, taken: dict[str, int]
) -> None:
    for name in names:
        if name in taken:
            raise FieldError(where, f"'{name}' already {what}[{taken[name]}]")
        taken[name] = index


def _require_unique_names(
    field: str, items: Sequence[RobotJoint | RobotCamera | RobotPose]
) -> None:
    """Names and aliases are one vocabulary: a policy's name must mean one thing."""
    owner: dict[str, int] = {}
    for index, item in enumerate(items):
        for key, names in (('name', (item.name,)), ('aliases', item.aliases)):
            for name in names:
                _require_short(f'{field}[{index}].{key}', name)
                if name in owner:
                    raise FieldError(
                        f'{field}[{index}].{key}', f"'{name}' already means {field}[{owner[name]}]"
                    )
                owner[name] = index


def _check_topics(robot: RobotSpec) -> None:
    """Check that every topic is one stream, and none is one of the package's own nodes."""
    taken: dict[str, tuple[str, str]] = {}
    groups: dict[
        str,
        Sequence[
            JointStateTopic
            | RobotCamera
            | RobotOutput
            | RobotPose
            | SpeedScalingTopic
            | RobotLeader
            | LeaderButton
        ],
    ]
    groups = {
        'joint_states': robot.joint_states,
        'cameras': robot.cameras,
        'outputs': robot.outputs,
        'poses': robot.poses,
        'speed_scaling': () if robot.speed_scaling is None else (robot.speed_scaling,),
        'leader': () if robot.leader is None else (robot.leader,),
        'leader.button': (
            () if robot.leader is None or robot.leader.button is None else (robot.leader.button,)
        ),
    }
    for field, items in groups.items():
        for index, item in enumerate(items):
            where = f'{field}.topic' if field in _SINGLE else f'{field}[{index}].topic'
            topic = item.topic
            if topic is None:
                continue
            if not _TOPIC.fullmatch(topic):
                raise FieldError(
                    where, f"'{topic}' is not a ROS topic name (letters, 0-9, _ and /)"
                )
            _require_short(where, topic)
            if _is_own(topic):
                raise FieldError(where, f"'{topic}' is a topic of ROS or of vla_runtime's nodes")
            # Relative names are in the nodes' namespace, which may be the outermost.
            name = topic.removeprefix('/')
            if name in taken:
                other, written = taken[name]
                both = '' if written == topic else f": without a namespace '{written}' is /{name}"
                raise FieldError(where, f"'{topic}' is already {other}{both}")
            taken[name] = where, topic
            depth = getattr(item, 'depth', 1)
            if depth > _MOST_DEPTH:
                raise FieldError(
                    f'{field}[{index}].depth', f'{depth} where at most {_MOST_DEPTH} is expected'
                )


def _is_own(topic: str) -> bool:
    parts = topic.strip('/').split('/')
    return (
        topic in _PRIVATE_TOPICS
        or parts[-1] in _TOPICS
        or not set(parts).isdisjoint(_NODES)
        or (len(parts) == 1 and parts[0] in _TOPICS_OF_ROS)
    )
