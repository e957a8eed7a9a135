"""Robot files: the shipped ones load, and every defect is an error that names file and field."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from vla_runtime.robot.file import RobotError, find_robot, for_replay, load_robot
from vla_runtime.robot.limits import beyond_urdf, urdf_limits
from vla_runtime.robot.schema import received_topics

ROBOTS = ROOT / 'config' / 'robots'
URDF = """<robot name="arm">
  <joint name="lift" type="revolute"><limit lower="-1" upper="1" velocity="2" effort="1"/></joint>
  <joint name="turn" type="continuous"><limit velocity="3" effort="1"/></joint>
</robot>"""


HAND = {'name': 'hand', 'unit': 'm', 'lower': 0.0, 'upper': 0.1, 'velocity': 0.2}


def arm() -> dict[str, Any]:
    """A robot file that is right, to be broken."""
    return {
        'format': 1,
        'name': 'arm',
        'joints': [
            {'name': 'lift', 'unit': 'rad', 'lower': -1.0, 'upper': 1.0, 'velocity': 2.0},
            {'name': 'turn', 'unit': 'rad', 'continuous': True, 'velocity': 3.0},
            HAND,
        ],
        'joint_states': [
            {'topic': 'joint_states', 'joints': ['lift', 'turn']},
            {'topic': 'hand/joint_states', 'joints': ['hand']},
        ],
        'cameras': [
            {'name': 'top', 'topic': 'top/image_raw'},
            {'name': 'wrist', 'topic': 'wrist/image_raw', 'aliases': ['left_wrist_0_rgb']},
        ],
        'poses': [
            {
                'name': 'tool',
                'frame_id': 'base',
                'lower': [0.1, -0.3, 0.0],
                'upper': [0.5, 0.3, 0.4],
                'velocity': 0.5,
                'angular_velocity': 1.0,
            }
        ],
        'outputs': [
            {
                'kind': 'joint_trajectory',
                'topic': 'arm/joint_trajectory',
                'joints': ['lift', 'turn'],
            },
            {'kind': 'float64_multi_array', 'topic': 'hand/commands', 'joints': ['hand']},
            {'kind': 'pose_stamped', 'topic': 'target_pose', 'pose': 'tool'},
        ],
    }


def write(folder: Path, document: Any) -> Path:
    file = folder / 'arm.yaml'
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return file


def place(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with `value` at `path`; the value `...` removes what is there."""
    result = copy.deepcopy(document)
    target = result
    for step in path[:-1]:
        target = target[step]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return result


@pytest.mark.parametrize(
    ('name', 'joints', 'cameras'),
    [
        ('tabletop', 6, 2),
        ('so101', 6, 2),
        ('so101_split', 6, 2),
        ('so101_one_topic', 6, 2),
        ('aloha', 14, 4),
        ('droid', 8, 2),
        ('franka_fr3', 8, 2),
        ('ur5e', 6, 2),
        ('ur5e_servo', 6, 2),
    ],
)
def test_shipped_robots_load(name: str, joints: int, cameras: int) -> None:
    robot = load_robot(find_robot(name, ROBOTS))
    assert robot.name == name
    assert len(robot.joints) == joints
    assert len(robot.cameras) == cameras
    commanded = [joint for output in robot.outputs for joint in output.joints]
    moves_tool = any(output.pose for output in robot.outputs)
    assert sorted(commanded) == sorted(() if moves_tool else (one.name for one in robot.joints))


@pytest.mark.parametrize(
    ('name', 'grippers'),
    [
        ('so101', ['gripper']),
        ('so101_split', ['gripper']),
        ('so101_one_topic', ['gripper']),
        ('aloha', ['left_gripper', 'right_gripper']),
        ('droid', ['gripper']),
        ('franka_fr3', ['gripper']),
        ('ur5e', []),
        ('ur5e_servo', []),
    ],
)
def test_shipped_robots_may_hold_what_they_grip(name: str, grippers: list[str]) -> None:
    robot = load_robot(ROBOTS / f'{name}.yaml')
    assert [joint.name for joint in robot.joints if joint.grips] == grippers


def test_no_robot_file_is_shipped_without_being_tested() -> None:
    assert {file.stem for file in ROBOTS.glob('*.yaml')} == {
        'tabletop',
        'so101',
        'so101_split',
        'so101_one_topic',
        'aloha',
        'droid',
        'franka_fr3',
        'ur5e',
        'ur5e_servo',
    }


def test_tabletop_file_says_what_the_simulator_does() -> None:
    world = pytest.importorskip('vla_tabletop.sim.world', reason='the simulator needs mujoco')
    tabletop = world.Tabletop()
    robot = load_robot(ROBOTS / 'tabletop.yaml')
    assert tuple(joint.name for joint in robot.joints) == tabletop.joint_names
    assert [joint.lower for joint in robot.joints] == pytest.approx(tabletop.lower_rad)
    assert [joint.upper for joint in robot.joints] == pytest.approx(tabletop.upper_rad)
    assert {camera.name for camera in robot.cameras} == set(tabletop.cameras)


def test_two_arms_may_call_their_joints_alike() -> None:
    robot = load_robot(ROBOTS / 'aloha.yaml')
    assert robot.joint('left_waist').in_messages == robot.joint('right_waist').in_messages


def test_a_good_file_loads_with_its_defaults(tmp_path: Path) -> None:
    robot = load_robot(write(tmp_path, arm()))
    assert robot.file == tmp_path / 'arm.yaml'
    assert robot.cameras[0].reliability == 'best_effort'
    assert robot.outputs[0].interface == 'position'
    assert robot.start.on_too_far == 'approach'


def test_one_joint_state_topic_brings_all_joints_unless_it_names_some(tmp_path: Path) -> None:
    robot = load_robot(write(tmp_path, place(arm(), ('joint_states',), ...)))
    assert [source.topic for source in robot.joint_states] == ['joint_states']
    assert robot.joint_states[0].joints == ()


HAND_BY_ACTION = {
    'kind': 'parallel_gripper_command',
    'topic': 'hand/gripper_cmd',
    'joints': ['hand'],
}
DEFECTS: dict[str, tuple[tuple[str | int, ...], Any, str, str]] = {
    'unknown key': (('cammeras',), [], 'cammeras', "did you mean 'cameras'?"),
    'unknown joint key': (('joints', 0, 'lowwer'), 1.0, 'joints[0].lowwer', "'lower'"),
    'grip without end': (
        ('joints', 2),
        {'name': 'hand', 'unit': 'rad', 'velocity': 1.0, 'continuous': True, 'grips': True},
        'joints[2].grips',
        'closes at a limit',
    ),
    'grip and tracking error': (
        ('joints', 2),
        {**HAND, 'grips': True, 'max_tracking_error': 0.05},
        'joints[2].max_tracking_error',
        'has no use beside grips',
    ),
    'other format': (('format',), 2, 'format', 'reads format 1'),
    'no joints': (('joints',), [], 'joints', 'is empty'),
    'no outputs': (('outputs',), [], 'outputs', 'is empty'),
    'missing unit': (('joints', 0, 'unit'), ..., 'joints[0].unit', 'is missing'),
    'wrong unit': (('joints', 0, 'unit'), 'radians', 'joints[0].unit', "did you mean 'rad'?"),
    'limits swapped': (('joints', 0, 'lower'), 3.0, 'joints[0].lower', 'not smaller than upper 1'),
    'one limit': (('joints', 0, 'upper'), ..., 'joints[0].upper', 'give both limits or neither'),
    'no speed limit': (('joints', 0, 'velocity'), ..., 'joints[0].velocity', 'without this limit'),
    'negative speed': (('joints', 0, 'velocity'), -2.0, 'joints[0].velocity', 'more than 0'),
    'limit is text': (('joints', 0, 'upper'), 'high', 'joints[0].upper', 'a number is expected'),
    'infinite limit': (('joints', 0, 'upper'), float('inf'), 'joints[0].upper', 'finite'),
    'continuous with limits': (
        ('joints', 0, 'continuous'),
        True,
        'joints[0].continuous',
        'neither',
    ),
    'zero alone': (('joints', 2, 'zero'), 0.0, 'joints[2].one', 'zero and one go together'),
    'zero far outside': (
        ('joints', 2),
        {**HAND, 'zero': 0.5, 'one': 0.0},
        'joints[2].zero',
        '0.5 m is far outside of the limits 0 to 0.1',
    ),
    'one far outside': (
        ('joints', 2),
        {**HAND, 'zero': 0.0, 'one': -0.2},
        'joints[2].one',
        'far outside',
    ),
    'zero is one': (('joints', 2), {**HAND, 'zero': 0.1, 'one': 0.1}, 'joints[2].one', 'same'),
    'zero is almost one': (
        ('joints', 2),
        {**HAND, 'zero': 0.0, 'one': 1e-300},
        'joints[2].one',
        'same position as zero',
    ),
    'same joint twice': (
        ('joints', 1, 'name'),
        'lift',
        'joints[1].name',
        'already means joints[0]',
    ),
    'alias taken': (('joints', 0, 'aliases'), ['lift'], 'joints[0].aliases', 'already means'),
    'joint unmeasured': (
        ('joint_states', 0, 'joints'),
        ['lift'],
        'joints[1].name',
        "no topic of joint_states brings 'turn'",
    ),
    'joint measured twice': (
        ('joint_states', 1, 'joints'),
        ['hand', 'lift'],
        'joint_states[1].joints',
        "'lift' already comes from joint_states[0]",
    ),
    'unknown measured joint': (
        ('joint_states', 1, 'joints'),
        ['hands'],
        'joint_states[1].joints',
        "did you mean 'hand'?",
    ),
    'two sources, one unnamed': (
        ('joint_states', 1, 'joints'),
        ...,
        'joint_states[1].joints',
        'each names its joints',
    ),
    'same name in messages': (
        ('joints', 1, 'message_name'),
        'lift',
        'joint_states[0].joints',
        "2 joints are called 'lift' in its messages",
    ),
    'camera type': (('cameras', 0, 'type'), 'jpeg', 'cameras[0].type', 'raw, compressed'),
    'camera depth': (('cameras', 0, 'depth'), 0, 'cameras[0].depth', 'at least 1'),
    'camera topic': (('cameras', 0, 'topic'), 'top image', 'cameras[0].topic', 'not a ROS topic'),
    'camera topic twice': (
        ('cameras', 1, 'topic'),
        'top/image_raw',
        'cameras[1].topic',
        'already cameras[0].topic',
    ),
    'camera topic twice, once absolute': (
        ('cameras', 1, 'topic'),
        '/top/image_raw',
        'cameras[1].topic',
        "already cameras[0].topic: without a namespace 'top/image_raw' is /top/image_raw",
    ),
    'camera on joint states': (
        ('cameras', 1, 'topic'),
        'joint_states',
        'cameras[1].topic',
        'already joint_states[0].topic',
    ),
    'camera depth without end': (
        ('cameras', 0, 'depth'),
        2147483647,
        'cameras[0].depth',
        'at most 1000',
    ),
    'joint state depth without end': (
        ('joint_states', 1, 'depth'),
        1001,
        'joint_states[1].depth',
        'at most 1000',
    ),
    'output topic twice, once absolute': (
        ('outputs', 1, 'topic'),
        '/arm/joint_trajectory',
        'outputs[1].topic',
        'already outputs[0].topic',
    ),
    'output on joint states': (
        ('outputs', 1, 'topic'),
        '/joint_states',
        'outputs[1].topic',
        'already joint_states[0].topic',
    ),
    'output on the chunks': (
        ('outputs', 1, 'topic'),
        'action_chunk',
        'outputs[1].topic',
        "a topic of ROS or of vla_runtime's nodes",
    ),
    "output on another namespace's plans": (
        ('outputs', 1, 'topic'),
        '/left/committed_plan',
        'outputs[1].topic',
        'a topic of',
    ),
    'output on a report': (('outputs', 1, 'topic'), '~/report', 'outputs[1].topic', 'a topic of'),
    "output on a node's topic": (
        ('outputs', 1, 'topic'),
        'vla_policy/instruction',
        'outputs[1].topic',
        'a topic of',
    ),
    'output on the clock': (('outputs', 1, 'topic'), '/clock', 'outputs[1].topic', 'a topic of'),
    'cause of a stop that is none': (
        ('on_stop',),
        {'clock_stopped': 'brake'},
        'on_stop.clock_stopped',
        "did you mean 'stopped'?",
    ),
    'number with an exponent': (
        ('joints', 0, 'velocity'),
        '-1e3',
        'joints[0].velocity',
        '-1000 where more than 0',
    ),
    'number that is next to nothing': (
        ('joints', 0, 'acceleration'),
        1e-308,
        'joints[0].acceleration',
        '1e-308 where at least 1e-09',
    ),
    'topic longer than ROS takes': (
        ('outputs', 0, 'topic'),
        'a' * 300,
        'outputs[0].topic',
        '300 characters where at most 200',
    ),
    'name of a page': (('name',), 'arm' * 9999, 'name', '29997 characters where at most 200'),
    'joint name of a page': (
        ('joints', 0, 'name'),
        'lift' * 99,
        'joints[0].name',
        '396 characters where at most 200',
    ),
    'output kind': (('outputs', 0, 'kind'), 'trajectory', 'outputs[0].kind', 'joint_trajectory'),
    'output without joints': (('outputs', 0, 'joints'), ..., 'outputs[0].joints', 'is missing'),
    'output of unknown joint': (
        ('outputs', 1, 'joints'),
        ['gripper'],
        'outputs[1].joints',
        "'gripper' is not in joints",
    ),
    'joint commanded twice': (
        ('outputs', 1, 'joints'),
        ['hand', 'turn'],
        'outputs[1].joints',
        "'turn' already is commanded by outputs[0]",
    ),
    'trajectory of velocities': (
        ('outputs', 0, 'interface'),
        'velocity',
        'outputs[0].interface',
        'float64_multi_array',
    ),
    'action of velocities': (
        ('outputs', 1),
        {**HAND_BY_ACTION, 'interface': 'velocity'},
        'outputs[1].interface',
        'carries positions',
    ),
    'action of two joints': (
        ('outputs', 0),
        {'kind': 'gripper_command', 'topic': 'hand/gripper_cmd', 'joints': ['lift', 'turn']},
        'outputs[0].joints',
        'carries one joint, not 2',
    ),
    'action of a joint without ends': (
        ('outputs', 0),
        {'kind': 'gripper_command', 'topic': 'hand/gripper_cmd', 'joints': ['turn']},
        'outputs[0].joints',
        'a gripper is not continuous',
    ),
    'deadband of a topic': (
        ('outputs', 1, 'deadband'),
        0.01,
        'outputs[1].deadband',
        'has no use in float64_multi_array',
    ),
    'deadband of nothing': (
        ('outputs', 1),
        {**HAND_BY_ACTION, 'deadband': 0.0},
        'outputs[1].deadband',
        'more than 0',
    ),
    'goals without end': (
        ('outputs', 1),
        {**HAND_BY_ACTION, 'goals_hz': 1000.0},
        'outputs[1].goals_hz',
        '0.1 to 100',
    ),
    'effort of a pull': (
        ('outputs', 1),
        {**HAND_BY_ACTION, 'max_effort': -5.0},
        'outputs[1].max_effort',
        'more than 0',
    ),
    'a node that is no name': (
        ('outputs', 0, 'shared_with'),
        ['home', 'go home'],
        'outputs[0].shared_with[1]',
        "'go home' is not the name of a node",
    ),
    'an action that others share': (
        ('outputs', 1),
        {
            'kind': 'gripper_command',
            'topic': 'hand/cmd',
            'joints': ['hand'],
            'shared_with': ['home'],
        },
        'outputs[1].shared_with',
        'has no use in gripper_command',
    ),
    'group of no group': (('outputs', 0, 'group'), 'arm', 'outputs[0].group', 'has no use'),
    'two joints of one name in commands': (
        ('joints', 1, 'command'),
        {'name': 'lift'},
        'outputs[0].joints',
        "2 joints are called 'lift' in its messages",
    ),
    'command of an unknown unit': (
        ('joints', 2, 'command'),
        {'unit': 'metre'},
        'joints[2].command.unit',
        'unknown',
    ),
    'command of another dimension': (
        ('joints', 2, 'command'),
        {'unit': 'rad'},
        'joints[2].command.unit',
        "'m' of 'hand' cannot become 'rad'",
    ),
    'command without a counterpart': (
        ('joints', 2, 'command'),
        {'unit': 'rad', 'zero': 0.0, 'one': 1.0},
        'joints[2].command.zero',
        "give the joint 'zero' and 'one' too",
    ),
    'half a command': (
        ('joints', 2),
        {**HAND, 'zero': 0.0, 'one': 0.1, 'command': {'unit': 'rad', 'one': 1.0}},
        'joints[2].command.zero',
        'zero and one go together',
    ),
    'command that stands still': (
        ('joints', 2),
        {**HAND, 'zero': 0.0, 'one': 0.1, 'command': {'zero': 1.0, 'one': 1.0}},
        'joints[2].command.one',
        'same command as zero',
    ),
    'command with a slip': (
        ('joints', 2, 'command'),
        {'units': 'm'},
        'joints[2].command.units',
        "did you mean 'unit'?",
    ),
    'pose output with joints': (
        ('outputs', 2, 'joints'),
        ['lift'],
        'outputs[2].joints',
        'carries a pose',
    ),
    'joint output with a pose': (('outputs', 0, 'pose'), 'tool', 'outputs[0].pose', 'joints'),
    'unknown pose': (('outputs', 2, 'pose'), 'tol', 'outputs[2].pose', "did you mean 'tool'?"),
    'pose left out': (('outputs', 2, 'pose'), ..., 'outputs[2].pose', 'is missing'),
    'workspace swapped': (('poses', 0, 'lower'), [0.9, -1, 0], 'poses[0].lower[0]', 'not smaller'),
    'workspace of two sides': (('poses', 0, 'lower'), [0.1, 0.2], 'poses[0].lower', '3 are'),
    'start': (('start',), {'tolerance': 0}, 'start.tolerance', '0 where more than 0 is expected'),
    'tracking error beyond the range': (
        ('joints', 0, 'max_tracking_error'),
        2.1,
        'joints[0].max_tracking_error',
        "2.1 rad would never stop 'lift', whose limits are only 2 apart",
    ),
    'limit action': (
        ('on_violation',),
        {'position': 'clip'},
        'on_violation.position',
        "did you mean 'clamp'?",
    ),
    'urdf not there': (('urdf',), 'arm.urdf', 'urdf', 'cannot be read (No such file'),
    'urdf of a package': (
        ('urdf',),
        'package://x/y.urdf',
        'urdf',
        "'package://x/y.urdf': package and other URIs are not resolved here; give the path of the",
    ),
    'file is no field': (('file',), 'arm.yaml', 'file', 'unknown key'),
}


@pytest.mark.parametrize('defect', DEFECTS)
def test_a_defect_is_an_error_that_names_file_and_field(tmp_path: Path, defect: str) -> None:
    path, value, field, hint = DEFECTS[defect]
    file = write(tmp_path, place(arm(), path, value))
    with pytest.raises(RobotError) as caught:
        load_robot(file)
    assert str(caught.value).startswith(f'{file}: field {field}: ')
    assert hint in str(caught.value)
    assert caught.value.field == field


def test_a_gripper_that_is_commanded_by_velocity_is_an_error(tmp_path: Path) -> None:
    document = place(arm(), ('outputs', 1, 'interface'), 'velocity')
    load_robot(write(tmp_path, document))
    file = write(tmp_path, place(document, ('joints', 2), {**HAND, 'grips': True}))
    with pytest.raises(RobotError, match="'hand'") as caught:
        load_robot(file)
    assert caught.value.field == 'outputs[1].interface'


@pytest.mark.parametrize(
    ('text', 'hint'),
    [
        ('joints: [', 'line 1'),
        ('- arm', 'a list where a mapping is expected'),
        ('', 'nothing where a mapping is expected'),
        ('name: a\nname: b', "'name' is given twice"),
        ('name: !!python/object/apply:os.getcwd []', 'python/object'),
    ],
)
def test_what_is_no_robot_file_is_refused(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(RobotError, match='arm') as caught:
        load_robot(write(tmp_path, text))
    assert hint in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RobotError, match=r'missing\.yaml'):
        load_robot(tmp_path / 'missing.yaml')


def two_joints(tmp_path: Path, urdf: str) -> dict[str, Any]:
    (tmp_path / 'arm.urdf').write_text(urdf)
    document = arm()
    document['joints'] = [{'name': 'lift', 'unit': 'rad'}, {'name': 'turn', 'unit': 'rad'}]
    document['joint_states'] = [{'topic': 'joint_states'}]
    document['outputs'] = [document['outputs'][0]]
    return document | {'urdf': 'arm.urdf'}


def test_limits_may_be_left_to_the_urdf(tmp_path: Path) -> None:
    robot = load_robot(write(tmp_path, two_joints(tmp_path, URDF)))
    assert robot.urdf_text == URDF
    assert robot.joint('lift').lower is None


@pytest.mark.parametrize(
    ('urdf', 'field', 'hint'),
    [
        (URDF.replace('"turn"', '"trun"'), 'joints[1].name', "did you mean 'trun'?"),
        ('<robot name="arm"/>', 'joints[0].name', 'no movable joint of arm.urdf; there is none'),
        (URDF.replace('</robot>', ''), 'urdf', 'not valid XML'),
        (URDF.replace('"2"', '"fast"'), 'urdf', 'not a number'),
    ],
)
def test_a_urdf_that_does_not_fit_is_refused(
    tmp_path: Path, urdf: str, field: str, hint: str
) -> None:
    with pytest.raises(RobotError) as caught:
        load_robot(write(tmp_path, two_joints(tmp_path, urdf)))
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_a_tracking_error_as_large_as_the_range_or_without_a_range_is_taken(tmp_path: Path) -> None:
    document = place(arm(), ('joints', 0, 'max_tracking_error'), 2.0)
    load_robot(write(tmp_path, place(document, ('joints', 1, 'max_tracking_error'), 1e6)))


def test_a_tracking_error_is_compared_with_the_urdfs_limits_where_the_file_has_none(
    tmp_path: Path,
) -> None:
    document = two_joints(tmp_path, URDF)
    document['joints'][0] |= {'max_tracking_error': 1e6}
    with pytest.raises(RobotError, match="'lift'") as caught:
        load_robot(write(tmp_path, document))
    assert caught.value.field == 'joints[0].max_tracking_error'


def test_zero_and_one_are_compared_with_the_urdfs_limits_where_the_file_has_none(
    tmp_path: Path,
) -> None:
    document = two_joints(tmp_path, URDF)
    document['joints'][0] |= {'zero': -1.0, 'one': 90.0}
    document['joints'][1] |= {'zero': 0.0, 'one': 90.0}
    with pytest.raises(RobotError) as caught:
        load_robot(write(tmp_path, document))
    assert caught.value.field == 'joints[0].one'


def test_a_urdf_of_the_arm_alone_goes_with_a_hand_that_the_file_describes(tmp_path: Path) -> None:
    document = two_joints(tmp_path, URDF)
    document['joints'].append(dict(HAND))
    robot = load_robot(write(tmp_path, document))
    assert beyond_urdf(robot) == ['hand']
    assert urdf_limits(robot).keys() == {'lift', 'turn'}


@pytest.mark.parametrize('left_out', ['velocity', 'lower'])
def test_a_joint_that_is_in_neither_is_refused_with_what_is_missing(
    tmp_path: Path, left_out: str
) -> None:
    document = two_joints(tmp_path, URDF)
    hand = dict(HAND)
    for key in {'lower', 'upper'} if left_out == 'lower' else {left_out}:
        del hand[key]
    document['joints'].append(hand)
    with pytest.raises(RobotError, match=f'give the joint {left_out}') as caught:
        load_robot(write(tmp_path, document))
    assert caught.value.field == 'joints[2].name'


def test_a_slip_in_a_joints_name_is_refused_although_the_file_has_its_limits(
    tmp_path: Path,
) -> None:
    urdf = URDF.replace('"turn"', '"shoulder_turn"')
    document = two_joints(tmp_path, urdf)
    document['joints'][1] = {**HAND, 'name': 'shoulder_trun', 'unit': 'rad'}
    document['outputs'][0]['joints'] = ['lift', 'shoulder_trun']
    with pytest.raises(RobotError, match="'shoulder_turn'") as caught:
        load_robot(write(tmp_path, document))
    assert caught.value.field == 'joints[1].name'


def test_a_urdf_of_another_robot_is_refused(tmp_path: Path) -> None:
    document = two_joints(tmp_path, URDF)
    document['joints'] = [{**HAND, 'name': 'a'}, {**HAND, 'name': 'b'}]
    document['outputs'][0]['joints'] = ['a', 'b']
    with pytest.raises(RobotError) as caught:
        load_robot(write(tmp_path, document))
    assert caught.value.field == 'joints[0].name'


@pytest.mark.parametrize(
    ('unit', 'lower', 'velocity'),
    [('deg', -57.29578, 114.59156), ('rad', -1.0, 2.0)],
)
def test_a_urdfs_limits_are_converted_to_the_joints_unit(
    tmp_path: Path, unit: str, lower: float, velocity: float
) -> None:
    document = place(two_joints(tmp_path, URDF), ('joints', 0, 'unit'), unit)
    limits = urdf_limits(load_robot(write(tmp_path, document)))['lift']
    assert (limits.lower, limits.velocity) == pytest.approx((lower, velocity), rel=1e-6)


def test_millimetres_too(tmp_path: Path) -> None:
    urdf = URDF.replace('<joint name="lift" type="revolute"', '<joint name="lift" type="prismatic"')
    document = place(two_joints(tmp_path, urdf), ('joints', 0, 'unit'), 'mm')
    limits = urdf_limits(load_robot(write(tmp_path, document)))['lift']
    assert (limits.lower, limits.upper, limits.velocity) == (-1000.0, 1000.0, 2000.0)


@pytest.mark.parametrize('unit', ['percent', '1', 'm', 'mm'])
def test_a_unit_that_the_urdfs_cannot_become_leaves_the_joint_to_the_file(
    tmp_path: Path, unit: str
) -> None:
    document = place(two_joints(tmp_path, URDF), ('joints', 0, 'unit'), unit)
    robot = load_robot(write(tmp_path, document))
    assert beyond_urdf(robot) == ['lift']


def test_a_robot_is_found_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write(tmp_path, arm())
    assert find_robot('so101', ROBOTS) == ROBOTS / 'so101.yaml'
    assert find_robot(own, ROBOTS) == own
    monkeypatch.setenv('HOME', str(own.parent))
    assert find_robot(f'~/{own.name}', ROBOTS) == own
    with pytest.raises(ValueError, match='neither'):
        find_robot('~nobody_of_that_name/arm.yaml', ROBOTS)
    with pytest.raises(ValueError, match="'so101'"):
        find_robot('so100', ROBOTS)
    with pytest.raises(ValueError, match='franka_fr3'):
        find_robot('my_arm.yaml', ROBOTS)


@pytest.mark.parametrize(
    ('named', 'near'),
    [
        ('dou.yaml', 'duo.yaml'),
        ('dou', 'duo.yaml'),
        ('mine/robto.yaml', 'mine/robot.yml'),
        # What comes with the package, and nothing that only ends alike.
        ('so101.yaml', 'so101'),
    ],
)
def test_a_file_that_is_not_there_names_the_one_that_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, near: str
) -> None:
    (tmp_path / 'mine').mkdir()
    for name in ('duo.yaml', 'mine/robot.yml', 'mine/robots.txt'):
        (tmp_path / name).write_text('')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        find_robot(named, ROBOTS)


@pytest.mark.parametrize('name', ['fifo', '/dev/zero', 'folder', 'large', 'bytes'])
def test_only_a_regular_file_of_text_is_read(tmp_path, name):
    os.mkfifo(tmp_path / 'fifo')
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'large').write_text('# a comment\n' * 50_000)
    (tmp_path / 'bytes').write_bytes(b'name: \xff')
    with pytest.raises(RobotError) as caught:
        load_robot(tmp_path / name)
    assert len(str(caught.value)) < 400
    assert str(caught.value).count(str(tmp_path / name)) == 1


def test_a_file_that_is_no_robot_is_not_printed(tmp_path):
    path = tmp_path / 'passwd'
    path.write_text('\n'.join(f'user{number}:x:{number}:secret' for number in range(100)))
    with pytest.raises(RobotError) as caught:
        load_robot(path)
    assert 'user50' not in str(caught.value) and len(str(caught.value)) < 400


def test_stamps_and_encodings_of_drivers(tmp_path: Path) -> None:
    document = arm()
    document['joint_states'][1]['stamp'] = 'receive'
    document['cameras'][0] |= {'stamp': 'receive', 'encoding': 'bgr8'}
    path = tmp_path / 'arm.yaml'
    path.write_text(yaml.safe_dump(document))
    robot = load_robot(path)
    assert [one.stamp for one in robot.joint_states] == ['header', 'receive']
    assert [(one.stamp, one.encoding) for one in robot.cameras] == [
        ('receive', 'bgr8'),
        ('header', None),
    ]
    assert received_topics(robot) == ('hand/joint_states',)
    path.write_text(for_replay(robot.text))
    headers = load_robot(path)
    assert received_topics(headers) == () and headers.cameras[0].stamp == 'header'
    assert headers.cameras[0].encoding == 'bgr8' and headers.joints == robot.joints
    # A step of a replay may have many messages of one topic, and needs all of them.
    for source in (*headers.cameras, *headers.joint_states):
        assert source.reliability == 'reliable' and source.depth >= 100


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'stamp': 'now'}, 'cameras[0].stamp'),
        ({'encoding': '8UC3'}, 'cameras[0].encoding'),
        ({'encoding': 'bgr8', 'type': 'compressed'}, 'cameras[0].encoding'),
    ],
)
def test_a_stamp_or_an_encoding_that_means_nothing_is_refused(
    tmp_path: Path, change: dict[str, str], field: str
) -> None:
    document = arm()
    document['cameras'][0] |= change
    path = tmp_path / 'arm.yaml'
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(RobotError) as error:
        load_robot(path)
    assert error.value.field == field
