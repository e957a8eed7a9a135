"""Robot files: the shipped ones load, and every defect is an error that names file and field."""

import copy
import os
import re
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
# A robot file that is right, to be broken.
ARM = """
format: 1
name: arm
joints:
- {name: lift, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
- {name: turn, unit: rad, continuous: true, velocity: 3.0}
- {name: hand, unit: m, lower: 0.0, upper: 0.1, velocity: 0.2}
joint_states:
- {topic: joint_states, joints: [lift, turn]}
- {topic: hand/joint_states, joints: [hand]}
cameras:
- {name: top, topic: top/image_raw}
- {name: wrist, topic: wrist/image_raw, aliases: [left_wrist_0_rgb]}
poses:
- {name: tool, frame_id: base, lower: [0.1, -0.3, 0.0], upper: [0.5, 0.3, 0.4], velocity: 0.5,
   angular_velocity: 1.0}
outputs:
- {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [lift, turn]}
- {kind: float64_multi_array, topic: hand/commands, joints: [hand]}
- {kind: pose_stamped, topic: target_pose, pose: tool}
"""


def arm() -> dict[str, Any]:
    return yaml.safe_load(ARM)


def write(folder: Path, document: Any) -> Path:
    file = folder / 'arm.yaml'
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return file


def written(document, place, value):
    """The document with a value at a place such as `joints[0].unit`."""
    result = copy.deepcopy(document)
    *steps, last = [int(step) if step.isdigit() else step for step in re.findall(r'\w+', place)]
    target = result
    for step in steps:
        target = target[step]
    if value is None:
        del target[last]
    elif isinstance(value, dict):
        before = target.get(last, {}) if isinstance(target, dict) else target[last]
        target[last] = {k: v for k, v in {**before, **value}.items() if v is not None}
    else:
        target[last] = value
    return result


# Joints, cameras, and the joints that may hold an object.
SHIPPED = {
    'tabletop': (6, 2, []),
    'so101': (6, 2, ['gripper']),
    'so101_split': (6, 2, ['gripper']),
    'so101_one_topic': (6, 2, ['gripper']),
    'aloha': (14, 4, ['left_gripper', 'right_gripper']),
    'droid': (8, 2, ['gripper']),
    'franka_fr3': (8, 2, ['gripper']),
    'ur5e': (6, 2, []),
    'ur5e_servo': (6, 2, []),
}


@pytest.mark.parametrize('name', [file.stem for file in ROBOTS.glob('*.yaml')])
def test_shipped_robots_load(name):
    robot = load_robot(find_robot(name, ROBOTS))
    assert robot.name == name
    grips = [joint.name for joint in robot.joints if joint.grips]
    assert (len(robot.joints), len(robot.cameras), grips) == SHIPPED[name]
    commanded = [joint for output in robot.outputs for joint in output.joints]
    moves_tool = any(output.pose for output in robot.outputs)
    assert sorted(commanded) == sorted(() if moves_tool else (one.name for one in robot.joints))


def test_tabletop_file_says_what_the_simulator_does():
    world = pytest.importorskip('vla_tabletop.sim.world', reason='the simulator needs mujoco')
    tabletop = world.Tabletop()
    robot = load_robot(ROBOTS / 'tabletop.yaml')
    assert tuple(joint.name for joint in robot.joints) == tabletop.joint_names
    assert [joint.lower for joint in robot.joints] == pytest.approx(tabletop.lower_rad)
    assert [joint.upper for joint in robot.joints] == pytest.approx(tabletop.upper_rad)
    assert {camera.name for camera in robot.cameras} == set(tabletop.cameras)


def test_two_arms_may_call_their_joints_alike():
    robot = load_robot(ROBOTS / 'aloha.yaml')
    assert robot.joint('left_waist').in_messages == robot.joint('right_waist').in_messages


def test_a_good_file_loads_with_its_defaults(tmp_path):
    robot = load_robot(write(tmp_path, arm()))
    assert robot.file == tmp_path / 'arm.yaml'
    assert robot.cameras[0].reliability == 'best_effort'
    assert robot.outputs[0].interface == 'position'
    assert robot.start.on_too_far == 'approach'


def test_one_joint_state_topic_brings_all_joints_unless_it_names_some(tmp_path):
    robot = load_robot(write(tmp_path, written(arm(), 'joint_states', None)))
    assert [source.topic for source in robot.joint_states] == ['joint_states']
    assert robot.joint_states[0].joints == ()


# Place, what is written there (a mapping: into what is there; ~: nothing), the field that is named
# where it is another (from the place on where it begins with a dot), and what is said.
DEFECTS = r"""
cammeras | [] | did you mean 'cameras'?
joints[0].lowwer | 1.0 | 'lower'
joints[1].grips | true | closes at a limit
joints[2] | {grips: true, max_tracking_error: 0.05} | .max_tracking_error | has no use beside grips
format | 2 | reads format 1
joints | [] | is empty
outputs | [] | is empty
joints[0].unit | ~ | is missing
joints[0].unit | radians | did you mean 'rad'?
joints[0].lower | 3.0 | not smaller than upper 1
joints[0].upper | ~ | give both limits or neither
joints[0].velocity | ~ | without this limit
joints[0].velocity | -2.0 | more than 0
joints[0].upper | high | a number is expected
joints[0].upper | .inf | finite
joints[0].continuous | true | neither
joints[2].zero | 0.0 | joints[2].one | zero and one go together
joints[2] | {zero: 0.5, one: 0.0} | .zero | 0.5 m is far outside of the limits 0 to 0.1
joints[2] | {zero: 0.0, one: -0.2} | .one | far outside
joints[2] | {zero: 0.1, one: 0.1} | .one | same
joints[2] | {zero: 0.0, one: 1.0e-300} | .one | same position as zero
joints[1].name | lift | already means joints[0]
joints[0].aliases | [lift] | already means
joint_states[0].joints | [lift] | joints[1].name | no topic of joint_states brings 'turn'
joint_states[1].joints | [hand, lift] | 'lift' already comes from joint_states[0]
joint_states[1].joints | [hands] | did you mean 'hand'?
joint_states[1].joints | ~ | each names its joints
joints[1].message_name | lift | joint_states[0].joints | 2 joints are called 'lift' in its messages
cameras[0].type | jpeg | raw, compressed
cameras[0].depth | 0 | at least 1
cameras[0].topic | top image | not a ROS topic
cameras[1].topic | top/image_raw | already cameras[0].topic
cameras[1].topic | /top/image_raw | already cameras[0].topic: without a namespace 'top/image_raw' is
cameras[1].topic | joint_states | already joint_states[0].topic
cameras[0].depth | 2147483647 | at most 1000
joint_states[1].depth | 1001 | at most 1000
outputs[1].topic | /arm/joint_trajectory | already outputs[0].topic
outputs[1].topic | /joint_states | already joint_states[0].topic
outputs[1].topic | action_chunk | a topic of ROS or of vla_runtime's nodes
outputs[1].topic | /left/committed_plan | a topic of
outputs[1].topic | ~/report | a topic of
outputs[1].topic | vla_policy/instruction | a topic of
outputs[1].topic | /clock | a topic of
on_stop | {clock_stopped: brake} | .clock_stopped | did you mean 'stopped'?
joints[0].velocity | -1e3 | -1000 where more than 0
joints[0].acceleration | 1.0e-308 | 1e-308 where at least 1e-09
outputs[0].kind | trajectory | joint_trajectory
outputs[0].joints | ~ | is missing
outputs[1].joints | [gripper] | 'gripper' is not in joints
outputs[1].joints | [hand, turn] | 'turn' already is commanded by outputs[0]
outputs[0].interface | velocity | float64_multi_array
outputs[1] | {kind: parallel_gripper_command, interface: velocity} | .interface | carries positions
outputs[0] | {kind: gripper_command, joints: [lift, turn]} | .joints | carries one joint, not 2
outputs[0] | {kind: gripper_command, joints: [turn]} | .joints | a gripper is not continuous
outputs[1].deadband | 0.01 | has no use in float64_multi_array
outputs[1] | {kind: parallel_gripper_command, deadband: 0.0} | .deadband | more than 0
outputs[1] | {kind: parallel_gripper_command, goals_hz: 1000.0} | .goals_hz | 0.1 to 100
outputs[1] | {kind: parallel_gripper_command, max_effort: -5.0} | .max_effort | more than 0
outputs[0].shared_with | [home, go home] | [1] | 'go home' is not the name of a node
outputs[1] | {kind: gripper_command, shared_with: [home]} | .shared_with | no use in gripper_command
outputs[0].group | arm | has no use
joints[1].command | {name: lift} | outputs[0].joints | 2 joints are called 'lift' in its messages
joints[2].command | {unit: metre} | .unit | unknown
joints[2].command | {unit: rad} | .unit | 'm' of 'hand' cannot become 'rad'
joints[2].command | {unit: rad, zero: 0.0, one: 1.0} | .zero | give the joint 'zero' and 'one' too
joints[2] | {zero: 0, one: 0.1, command: {unit: rad, one: 1}} | .command.zero | go together
joints[2] | {zero: 0, one: 0.1, command: {zero: 1, one: 1}} | .command.one | same command as zero
joints[2].command | {units: m} | .units | did you mean 'unit'?
outputs[2].joints | [lift] | carries a pose
outputs[0].pose | tool | joints
outputs[2].pose | tol | did you mean 'tool'?
outputs[2].pose | ~ | is missing
poses[0].lower | [0.9, -1, 0] | [0] | not smaller
poses[0].lower | [0.1, 0.2] | 3 are
start | {tolerance: 0} | .tolerance | 0 where more than 0 is expected
joints[0].max_tracking_error | 2.1 | 2.1 rad would never stop 'lift', whose limits are only 2 apart
on_violation | {position: clip} | .position | did you mean 'clamp'?
urdf | arm.urdf | cannot be read (No such file
urdf | package://x/y.urdf | 'package://x/y.urdf': package and other URIs are not resolved here
file | arm.yaml | unknown key
cameras[0].stamp | now | now
cameras[0].encoding | 8UC3 | 8UC3
cameras[0] | {encoding: bgr8, type: compressed} | .encoding | compressed
""".strip().splitlines()
LONG = [
    f'outputs[0].topic | {"a" * 300} | 300 characters where at most 200',
    f'name | {"arm" * 9999} | 29997 characters where at most 200',
    f'joints[0].name | {"lift" * 99} | 396 characters where at most 200',
]


@pytest.mark.parametrize('defect', DEFECTS + LONG, ids=lambda defect: defect[:80])
def test_a_defect_is_an_error_that_names_file_and_field(tmp_path, defect):
    place, value, *field, hint = defect.split(' | ')
    field = place + field[0] if field and field[0][0] in '.[' else (field or [place])[0]
    file = write(tmp_path, written(arm(), place, yaml.safe_load(value)))
    with pytest.raises(RobotError) as caught:
        load_robot(file)
    assert str(caught.value).startswith(f'{file}: field {field}: ')
    assert hint in str(caught.value)
    assert caught.value.field == field


def test_a_gripper_that_is_commanded_by_velocity_is_an_error(tmp_path):
    document = written(arm(), 'outputs[1].interface', 'velocity')
    load_robot(write(tmp_path, document))
    file = write(tmp_path, written(document, 'joints[2].grips', True))
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
def test_what_is_no_robot_file_is_refused(tmp_path, text, hint):
    with pytest.raises(RobotError, match='arm') as caught:
        load_robot(write(tmp_path, text))
    assert hint in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RobotError, match=r'missing\.yaml'):
        load_robot(tmp_path / 'missing.yaml')


def two_joints(tmp_path: Path, urdf: str = URDF, **joint: Any) -> dict[str, Any]:
    """Two joints whose limits are the URDF's; the first with these fields, too."""
    (tmp_path / 'arm.urdf').write_text(urdf)
    document = arm()
    document['joints'] = [{'name': 'lift', 'unit': 'rad', **joint}, {'name': 'turn', 'unit': 'rad'}]
    document['joint_states'] = [{'topic': 'joint_states'}]
    document['outputs'] = [document['outputs'][0]]
    return document | {'urdf': 'arm.urdf'}


def test_limits_may_be_left_to_the_urdf(tmp_path):
    robot = load_robot(write(tmp_path, two_joints(tmp_path)))
    assert robot.urdf_text == URDF
    assert robot.joint('lift').lower is None


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in HAND.items() if key not in keys}


SLIP = URDF.replace('"turn"', '"shoulder_turn"')


@pytest.mark.parametrize(
    ('urdf', 'joints', 'field', 'hint'),
    [
        (URDF.replace('"turn"', '"trun"'), {}, 'joints[1].name', "did you mean 'trun'?"),
        ('<robot name="arm"/>', {}, 'joints[0].name', 'no movable joint of arm.urdf; there is no'),
        (URDF.replace('</robot>', ''), {}, 'urdf', 'not valid XML'),
        (URDF.replace('"2"', '"fast"'), {}, 'urdf', 'not a number'),
        # What the file says is compared with the URDF's limits where it has none.
        (URDF, {0: {'max_tracking_error': 1e6}}, 'joints[0].max_tracking_error', "'lift'"),
        (URDF, {0: {'zero': -1.0, 'one': 90.0}}, 'joints[0].one', ''),
        # A joint whose limits are in neither.
        (URDF, {2: without('velocity')}, 'joints[2].name', 'give the joint velocity'),
        (URDF, {2: without('lower', 'upper')}, 'joints[2].name', 'give the joint lower'),
        # A slip in its name, although the file has its limits; a URDF of another robot.
        (SLIP, {1: {**HAND, 'name': 'shoulder_trun', 'unit': 'rad'}}, 'joints[1].name', "r_turn'"),
        (URDF, {0: {**HAND, 'name': 'a'}, 1: {**HAND, 'name': 'b'}}, 'joints[0].name', ''),
    ],
)
def test_a_urdf_that_does_not_fit_is_refused(tmp_path, urdf, joints, field, hint):
    document = two_joints(tmp_path, urdf)
    document['joints'] += [{}] * (2 in joints)
    for index, changes in joints.items():
        document['joints'][index] = document['joints'][index] | changes
    document['outputs'][0]['joints'] = [joint['name'] for joint in document['joints'][:2]]
    with pytest.raises(RobotError) as caught:
        load_robot(write(tmp_path, document))
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_a_tracking_error_as_large_as_the_range_or_without_a_range_is_taken(tmp_path):
    document = written(arm(), 'joints[0].max_tracking_error', 2.0)
    load_robot(write(tmp_path, written(document, 'joints[1].max_tracking_error', 1e6)))


def test_a_urdf_of_the_arm_alone_goes_with_a_hand_that_the_file_describes(tmp_path):
    document = two_joints(tmp_path)
    document['joints'].append(dict(HAND))
    robot = load_robot(write(tmp_path, document))
    assert beyond_urdf(robot) == ['hand']
    assert urdf_limits(robot).keys() == {'lift', 'turn'}


@pytest.mark.parametrize(
    ('unit', 'kind', 'limits'),
    [
        ('deg', 'revolute', (-57.29578, 57.29578, 114.59156)),
        ('rad', 'revolute', (-1.0, 1.0, 2.0)),
        ('mm', 'prismatic', (-1000.0, 1000.0, 2000.0)),
    ],
)
def test_a_urdfs_limits_are_converted_to_the_joints_unit(tmp_path, unit, kind, limits):
    document = two_joints(tmp_path, URDF.replace('revolute', kind), unit=unit)
    found = urdf_limits(load_robot(write(tmp_path, document)))['lift']
    assert (found.lower, found.upper, found.velocity) == pytest.approx(limits, rel=1e-6)


@pytest.mark.parametrize('unit', ['percent', '1', 'm', 'mm'])
def test_a_unit_that_the_urdfs_cannot_become_leaves_the_joint_to_the_file(tmp_path, unit):
    robot = load_robot(write(tmp_path, two_joints(tmp_path, unit=unit)))
    assert beyond_urdf(robot) == ['lift']


def test_a_robot_is_found_by_name_or_path(tmp_path, monkeypatch):
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
def test_a_file_that_is_not_there_names_the_one_that_is_near(tmp_path, monkeypatch, named, near):
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


def test_stamps_and_encodings_of_drivers(tmp_path):
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
