"""Each robot file of the package drives a policy of the shape that is trained for its robot."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from paths import ROOT
from test_kinematics import needs_pinocchio
from test_robot_match import lerobot_so101, policy

from vla_runtime.bundle.schema import ActionSpec, BundleSpec, CameraSpec, PoseSpec, StateSpec
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import MatchError, RobotMatch, match_robot
from vla_runtime.robot.schema import Robot

ROBOTS = ROOT / 'config' / 'robots'
ALOHA = ('waist', 'shoulder', 'elbow', 'forearm_roll', 'wrist_angle', 'wrist_rotate', 'gripper')


def of_units(names_and_units: Sequence[tuple[str, str]], cameras: Sequence[str]) -> BundleSpec:
    """A policy that measures and commands the same numbers."""
    return policy(
        tuple(StateSpec(name, unit) for name, unit in names_and_units),
        tuple(ActionSpec(name, unit, 'absolute') for name, unit in names_and_units),
        tuple(CameraSpec(name) for name in cameras),
    )


def aloha() -> BundleSpec:
    names = [f'{side}_{name}' for side in ('left', 'right') for name in ALOHA]
    units = ['1' if name.endswith('gripper') else 'rad' for name in names]
    cameras = ('cam_high', 'cam_left_wrist', 'cam_right_wrist')
    return of_units(list(zip(names, units, strict=True)), cameras)


def droid() -> BundleSpec:
    arm = [(f'joint_position_{number}', 'rad') for number in range(1, 8)]
    cameras = ('exterior_image_1_left', 'wrist_image_left')
    return of_units([*arm, ('gripper_position', '1')], cameras)


def ur5e() -> BundleSpec:
    names = ('shoulder_pan', 'shoulder_lift', 'elbow', 'wrist_1', 'wrist_2', 'wrist_3')
    return of_units([(f'{name}_joint', 'rad') for name in names], ('front', 'wrist'))


def so101() -> BundleSpec:
    return lerobot_so101('percent')


POLICIES = {
    'so101': so101,
    'so101_split': so101,
    'so101_one_topic': so101,
    'aloha': aloha,
    'droid': droid,
    'franka_fr3': droid,
    'ur5e': ur5e,
}


def matched(name: str) -> tuple[Robot, RobotMatch]:
    robot = load_robot(ROBOTS / f'{name}.yaml')
    return robot, match_robot(robot, POLICIES[name](), 'bundle')


def commands(match: RobotMatch, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers that a policy's actions become on each output, limits left out."""
    setpoints = match.actions.to_robot(actions)
    sent = {}
    for output in match.outputs:
        numbers = setpoints[list(output.columns)]
        sent[output.output.topic] = (
            numbers if output.units is None else output.units.to_robot(numbers)
        )
    return sent


@pytest.mark.parametrize('name', POLICIES)
def test_every_joint_of_a_policy_is_limited_and_carried(name):
    robot, match = matched(name)
    assert sorted(match.column_names) == sorted(joint.name for joint in robot.joints)
    assert len(match.outputs) == len(robot.outputs)
    limits = match.limits
    for limit in (limits.lower, limits.upper, limits.velocity):
        assert np.isfinite(limit).all()
    assert np.all(limits.lower < limits.upper)
    assert len(match.cameras) == len(POLICIES[name]().cameras) - (name.startswith('so101'))


def twist_of_a_tool() -> BundleSpec:
    """A policy that sees the arm's joints and moves its tool."""
    names = ('vx', 'vy', 'vz', 'wx', 'wy', 'wz')
    pose = PoseSpec('tool', names[:3], names[3:], 'axis_angle', 'velocity', 'base')
    units = ('m/s',) * 3 + ('rad/s',) * 3
    actions = tuple(ActionSpec(*one, 'velocity') for one in zip(names, units, strict=True))
    return replace(ur5e(), actions=actions, poses=(pose,))


def test_ur5e_under_servo_takes_a_twist_and_keeps_the_tool_in_its_box():
    robot = load_robot(ROBOTS / 'ur5e_servo.yaml')
    match = match_robot(robot, twist_of_a_tool(), 'bundle')
    assert [one.output.topic for one in match.outputs] == ['servo_node/delta_twist_cmds']
    assert [one.frame_id for one in match.outputs] == ['base']
    (tool,) = match.tools
    assert (tool.topic, tool.axes, tool.frame_id) == (
        'tcp_pose_broadcaster/pose',
        (0, 1, 2),
        'base',
    )
    assert match.limits.velocity == pytest.approx([0.25] * 3 + [0.8] * 3)


def page_policy(grip: bool) -> BundleSpec:
    """The bundle of docs/start/end_effector.md: it sees the tool's pose and says a twist."""
    names = ('x', 'y', 'z', 'rx', 'ry', 'rz')
    spec = twist_of_a_tool()
    pose = replace(spec.poses[0], state_position=names[:3], state_rotation=names[3:])
    units = ('m',) * 3 + ('rad',) * 3
    state = tuple(StateSpec(*one) for one in zip(names, units, strict=True))
    actions = spec.actions
    if grip:
        state += (StateSpec('grip', '1'),)
        actions += (ActionSpec('grip', '1', 'absolute'),)
    return replace(spec, state=state, actions=actions, poses=(pose,))


def servo_text(grip: bool) -> str:
    """The shipped robot file; with the gripper that the page adds."""
    text = (ROBOTS / 'ur5e_servo.yaml').read_text(encoding='utf-8')
    if not grip:
        return text
    joint = (
        "  - {name: gripper, aliases: [grip], unit: '1', lower: 0.0, upper: 1.0, velocity: 5.0}\n"
    )
    output = '  - {kind: float64_multi_array, topic: gripper/commands, joints: [gripper]}\n'
    return text.replace('\njoint_states:', f'{joint}\njoint_states:').replace(
        '\nstart:', f'{output}\nstart:'
    )


@pytest.mark.parametrize('grip', [False, True])
def test_the_pages_twist_bundle_asks_for_the_urdf_and_the_link_of_the_shipped_file(tmp_path, grip):
    path = tmp_path / 'my_arm.yaml'
    path.write_text(servo_text(grip))
    with pytest.raises(MatchError) as caught:
        match_robot(load_robot(path), page_policy(grip), 'bundle')
    (line,) = str(caught.value).splitlines()
    assert 'another robot' not in line
    assert 'uncomment urdf and link of poses[0]' in line
    # A policy that sees joints needs neither.
    assert match_robot(load_robot(path), twist_of_a_tool(), 'bundle').measured_poses == ()


@needs_pinocchio
@pytest.mark.parametrize('grip', [False, True])
def test_the_pages_twist_bundle_fits_once_they_are_there(tmp_path, grip):
    path = tmp_path / 'my_arm.yaml'
    text = servo_text(grip).replace('# urdf:', 'urdf:').replace('    # link:', '    link:')
    path.write_text(text)
    joints = [joint.name for joint in load_robot(ROBOTS / 'ur5e_servo.yaml').joints]
    links = ['base', *(f'link{at}' for at in range(5)), 'tool0']
    (tmp_path / 'ur5e.urdf').write_text(
        '<robot name="ur5e">'
        + ''.join(f'<link name="{name}"/>' for name in links)
        + ''.join(
            f'<joint name="{name}" type="revolute"><parent link="{links[at]}"/>'
            f'<child link="{links[at + 1]}"/><origin xyz="0 0 0.2"/>'
            f'<axis xyz="{"0 0 1" if at % 2 else "0 1 0"}"/>'
            '<limit lower="-6.28319" upper="6.28319" effort="1" velocity="3.14159"/></joint>'
            for at, name in enumerate(joints)
        )
        + '</robot>'
    )
    match = match_robot(load_robot(path), page_policy(grip), 'bundle')
    (pose,) = match.measured_poses
    assert pose.state == tuple(range(6))
    assert [one.output.kind for one in match.outputs][:1] == ['twist_stamped']


def test_aloha_has_no_ros2_control_and_its_gripper_is_measured_in_m_and_commanded_in_rad():
    robot, match = matched('aloha')
    assert {output.kind for output in robot.outputs} == {
        'joint_group_command',
        'joint_single_command',
    }
    actions = np.zeros(14)
    assert commands(match, actions)['follower_left/commands/joint_single'] == pytest.approx(-0.6213)
    actions[6] = actions[13] = 1.0
    sent = commands(match, actions)
    assert sent['follower_right/commands/joint_single'] == pytest.approx(1.4910)
    names = [output.message_names for output in match.outputs]
    assert names == [ALOHA[:6], ('gripper',)] * 2


def test_fr3_opens_its_fingers_to_40_mm_where_droid_says_0():
    _, match = matched('franka_fr3')
    assert commands(match, np.zeros(8))['franka_gripper/gripper_action'] == pytest.approx(0.04)
    closed = commands(match, np.array([0.0] * 7 + [1.0]))
    assert closed['franka_gripper/gripper_action'] == pytest.approx(0.0)
    assert match.limits.velocity[:7] == pytest.approx([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])


def test_ur5e_has_the_limits_of_each_joint():
    _, match = matched('ur5e')
    turn = 2.0 * np.pi
    assert match.limits.upper == pytest.approx([turn, turn, np.pi, turn, turn, turn], abs=1e-4)


def test_so101_split_sends_its_gripper_to_an_action_and_its_arm_to_a_topic():
    robot, match = matched('so101_split')
    assert [output.is_action for output in robot.outputs] == [False, True]
    sent = commands(match, np.full(6, 100.0))
    assert sent['follower/gripper_controller/gripper_cmd'] == pytest.approx(1.74533)


UNITS = [
    # Joint, command, and pairs of position and command.
    ('unit: rad', 'name: g', [(0.3, 0.3)]),
    ('unit: rad', 'unit: deg', [(np.pi / 2, 90.0)]),
    ('unit: m', 'unit: mm', [(0.02, 20.0)]),
    ('unit: rad, zero: 0.1, one: 0.3', 'unit: m, zero: 0.04, one: 0.0', [(0.1, 0.04), (0.3, 0.0)]),
    ('unit: rad, zero: 0.1, one: 0.3', 'unit: percent', [(0.1, 0.0), (0.3, 100.0)]),
    ('unit: rad, zero: 0.1, one: 0.3', 'unit: rad', [(0.1, 0.1)]),
    ('unit: percent', 'unit: rad, zero: -1.0, one: 1.0', [(0.0, -1.0), (75.0, 0.5)]),
    ("unit: '1'", 'unit: mm, zero: 0.0, one: 85.0', [(1.0, 85.0)]),
    ('unit: percent', "unit: '1'", [(50.0, 0.5)]),
]  # fmt: skip


@pytest.mark.parametrize(('joint', 'command', 'pairs'), UNITS)
@pytest.mark.parametrize('interface', ['position', 'velocity'])
def test_a_command_has_a_name_and_unit_of_its_own(tmp_path, joint, command, pairs, interface):
    file = tmp_path / 'hand.yaml'
    file.write_text(
        f"""
format: 1
name: hand
joints:
  - {{name: hand, {joint}, lower: 0.0, upper: 100.0, velocity: 1.0, command: {{{command}}}}}
outputs:
  - {{kind: joint_state, topic: hand/commands, interface: {interface}, joints: [hand]}}
"""
    )
    unit = load_robot(file).joints[0].unit
    kind, suffix = ('velocity', '/s') if interface == 'velocity' else ('absolute', '')
    spec = policy((StateSpec('hand', unit),), (ActionSpec('hand', unit + suffix, kind),))
    (output,) = match_robot(load_robot(file), spec, 'bundle').outputs
    assert output.message_names == ('g' if 'name: g' in command else 'hand',)

    def sent(position: float) -> float:
        numbers = np.array([position])
        return (numbers if output.units is None else output.units.to_robot(numbers))[0]

    if interface == 'position':
        for position, wanted in pairs:
            assert sent(position) == pytest.approx(wanted)
    else:
        assert sent(0.0) == 0.0
        if len(pairs) == 2:
            (a, x), (b, y) = pairs
            assert sent(b - a) == pytest.approx(y - x)
