"""Bringing a robot file and a policy together: names, units, limits, and every conflict named."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from test_kinematics import STEP_S, STEPS, Arm
from tiny_policy import tiny_spec
from twist_robot import BOX, ROBOT, SPEC
from twist_robot import TWIST as CART_OWN_TWIST

from vla_runtime.bundle.schema import (
    ActionSpec,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
    PoseSpec,
    StateSpec,
)
from vla_runtime.declarations.pi import PI05
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.robot.file import RobotError, load_robot
from vla_runtime.robot.match import MatchError, RobotMatch, match_robot
from vla_runtime.robot.schema import Robot

ROBOTS = ROOT / 'config' / 'robots'
SO101 = ('shoulder_pan', 'shoulder_lift', 'elbow_flex', 'wrist_flex', 'wrist_roll', 'gripper')
TOOL = PoseSpec(
    name='tool',
    position=('x', 'y', 'z'),
    rotation=('roll', 'pitch', 'yaw'),
    form='euler',
    kind='absolute',
    frame='base',
    euler_axes='sxyz',
)
TWIST = replace(TOOL, form='axis_angle', euler_axes=None, kind='velocity')
ARM = """
format: 1
name: arm
joints:
  - {name: hand, unit: m, lower: 0.0, upper: 0.1, velocity: 0.2, zero: 0.0, one: 0.1}
  - {name: lift, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
  - {name: turn, unit: rad, continuous: true, velocity: 3.0}
cameras:
  - {name: top, topic: top/image_raw, aliases: [base_0_rgb]}
poses:
  - {name: tool, frame_id: base, lower: [0.1, -0.3, 0.0], upper: [0.5, 0.3, 0.4],
     velocity: 0.5, angular_velocity: 1.0}
outputs:
  - {kind: pose_stamped, topic: target_pose, pose: tool}
  - {kind: float64_multi_array, topic: hand/commands, joints: [hand]}
  - {kind: float64_multi_array, topic: arm/commands, joints: [turn, lift]}
"""
# Without a box: nothing measures the tool.
TWIST_ARM = ARM.replace('pose_stamped', 'twist_stamped').replace(
    ' lower: [0.1, -0.3, 0.0], upper: [0.5, 0.3, 0.4],', ''
)
POSE_OUTPUT = '  - {kind: pose_stamped, topic: target_pose, pose: tool}\n'
URDF = """<robot name="arm">
  <joint name="hand" type="prismatic"><limit lower="0" upper="0.1" velocity="1" effort="1"/></joint>
  <joint name="lift" type="revolute"><limit lower="-1" upper="1" velocity="2" effort="1"/></joint>
  <joint name="turn" type="continuous"><limit velocity="3" effort="1"/></joint>
</robot>"""


def policy(
    state: tuple[StateSpec, ...],
    actions: tuple[ActionSpec, ...],
    cameras: tuple[CameraSpec, ...] = (),
    poses: tuple[PoseSpec, ...] = (),
) -> BundleSpec:
    return BundleSpec(
        name='p',
        family='pi05',
        dims=PI05,
        cameras=cameras,
        images=ImageSpec('centre', 'bilinear'),
        state=state,
        actions=actions,
        step_time_s=0.05,
        denoise_steps=10,
        prompt=PromptFormat('pi05_state', 'openpi'),
        normalisation=NormalisationSpec('quantiles_openpi', 'quantiles_openpi'),
        tokenizer='tokenizer.model',
        poses=poses,
    )


def lerobot_so101(unit: str, gripper_unit: str = 'percent') -> BundleSpec:
    units = [unit] * 5 + [gripper_unit]
    return policy(
        tuple(StateSpec(f'{n}.pos', u) for n, u in zip(SO101, units, strict=True)),
        tuple(ActionSpec(f'{n}.pos', u, 'absolute') for n, u in zip(SO101, units, strict=True)),
        (CameraSpec('front'), CameraSpec('wrist'), CameraSpec('right_wrist', present=False)),
    )


@pytest.fixture
def arm(tmp_path):
    (tmp_path / 'arm.yaml').write_text(ARM)
    return load_robot(tmp_path / 'arm.yaml')


def absolute(*names_and_units: tuple[str, str]) -> tuple[ActionSpec, ...]:
    return tuple(ActionSpec(name, unit, 'absolute') for name, unit in names_and_units)


def measured(*names_and_units: tuple[str, str]) -> tuple[StateSpec, ...]:
    return tuple(StateSpec(name, unit) for name, unit in names_and_units)


JOINTS = (('turn', 'rad'), ('lift', 'rad'), ('hand', '1'))
SAME = policy(measured(*JOINTS), absolute(*JOINTS))


def matched(folder: Path, text: str, spec: BundleSpec = SAME) -> RobotMatch:
    (folder / 'arm.yaml').write_text(text)
    return match_robot(load_robot(folder / 'arm.yaml'), spec, 'bundle')


def lift_with(arm: Robot, urdf: str | None = URDF, **changes: object) -> Robot:
    """The arm, with another lift."""
    joints = (replace(one, **changes) if one.name == 'lift' else one for one in arm.joints)
    return replace(arm, joints=tuple(joints), urdf_text=urdf)


def test_lerobot_names_and_degrees_become_joints_in_radians():
    match = match_robot(load_robot(ROBOTS / 'so101.yaml'), lerobot_so101('deg'), 'bundle')
    assert match.state_joints == SO101
    assert match.column_names == SO101
    command = match.actions.to_robot(np.array([90.0, -45.0, 0.0, 10.0, 180.0, 100.0]))
    assert command[:5] == pytest.approx(np.deg2rad([90.0, -45.0, 0.0, 10.0, 180.0]))
    assert command[5] == pytest.approx(1.74533)


def test_percent_of_the_calibrated_range_becomes_radians_and_comes_back():
    match = match_robot(load_robot(ROBOTS / 'so101.yaml'), lerobot_so101('percent'), 'bundle')
    limits = match.limits
    ends = np.array([[-100.0] * 5 + [0.0], [100.0] * 6])
    assert match.actions.to_robot(ends) == pytest.approx(
        np.array([limits.lower, limits.upper]), abs=1e-5
    )
    rows = np.random.default_rng(0).uniform(-100, 100, (8, 6))
    assert match.actions.to_policy(match.actions.to_robot(rows)) == pytest.approx(rows)
    assert match.state.to_policy(match.state.to_robot(rows)) == pytest.approx(rows)
    # A gripper has no tracking error, and a joint that of its range.
    assert np.isnan(limits.tracking_error[:5]).all() and np.isinf(limits.tracking_error[5])


@pytest.mark.parametrize(
    ('unit', 'zero', 'one'),
    [("'1'", 1.0, 0.0), ('percent', 100.0, 0.0), ('percent', 10.0, 90.0), ('m', 0.1, 0.0)],
)
@pytest.mark.parametrize(('said', 'full'), [('1', 1.0), ('percent', 100.0)])
def test_zero_and_one_hold_for_a_policy_without_units_whatever_the_joints_unit(
    tmp_path, unit, zero, one, said, full
):
    hand = f'unit: {unit}, lower: 0.0, upper: {max(zero, one)}, velocity: 1.0'
    old = 'unit: m, lower: 0.0, upper: 0.1, velocity: 0.2, zero: 0.0, one: 0.1'
    text = ARM.replace(old, f'{hand}, zero: {zero}, one: {one}')
    joints = (*JOINTS[:2], ('hand', said))
    spec = policy(measured(*joints), absolute(*joints))
    match = matched(tmp_path, text, spec)
    commands = match.actions.to_robot(np.array([[0.0, 0.0, 0.0], [0.0, 0.0, full]]))
    assert commands[:, 2] == pytest.approx([zero, one])
    assert match.state.to_policy(commands)[:, 2] == pytest.approx([0.0, full])


def test_units_of_a_policy_are_converted_whatever_zero_and_one_say(tmp_path):
    joints = (*JOINTS[:2], ('hand', 'mm'))
    spec = policy(measured(*joints), absolute(*joints))
    match = matched(tmp_path, ARM.replace('zero: 0.0, one: 0.1', 'zero: 0.1, one: 0.0'), spec)
    assert match.actions.to_robot(np.array([0.0, 0.0, 40.0]))[2] == pytest.approx(0.04)


def test_cameras_are_found_by_name_or_alias_and_absent_ones_left_out():
    spec = replace(
        lerobot_so101('deg'),
        cameras=(
            CameraSpec('base_0_rgb'),
            CameraSpec('wrist'),
            CameraSpec('right_wrist_0_rgb', present=False),
        ),
    )
    match = match_robot(load_robot(ROBOTS / 'so101.yaml'), spec, 'bundle')
    topics = {name: camera.topic for name, camera in match.cameras.items()}
    assert topics == {'base_0_rgb': 'front/image_raw', 'wrist': 'wrist/image_raw'}


def test_each_output_takes_its_columns_in_its_own_order_and_limits_have_that_of_the_columns(arm):
    match = match_robot(arm, SAME, 'bundle')
    assert match.column_names == ('turn', 'lift', 'hand')
    carried = {output.output.topic: output.columns for output in match.outputs}
    assert carried == {'hand/commands': (2,), 'arm/commands': (0, 1)}
    assert [column.continuous for column in match.columns] == [True, False, False]
    assert match.limits.lower == pytest.approx([-np.inf, -1.0, 0.0])
    assert match.limits.velocity == pytest.approx([3.0, 2.0, 0.2])
    assert np.isinf(match.limits.acceleration).all()


def test_an_output_that_the_policy_does_not_command_is_left_out(arm):
    match = match_robot(arm, policy(measured(*JOINTS), absolute(('hand', 'mm'))), 'bundle')
    assert [output.output.topic for output in match.outputs] == ['hand/commands']
    assert match.actions.to_robot(np.array([50.0])) == pytest.approx([0.05])


def test_velocities_are_scaled_but_not_shifted(arm):
    robot = replace(
        arm, outputs=tuple(replace(output, interface='velocity') for output in arm.outputs[1:2])
    )
    spec = policy(measured(*JOINTS), (ActionSpec('hand', '1', 'velocity'),))
    match = match_robot(robot, spec, 'bundle')
    assert match.columns[0].kind == 'velocity'
    assert match.actions.to_robot(np.array([0.0, 1.0])[:, None])[:, 0] == pytest.approx([0.0, 0.1])


def pose_policy(pose: PoseSpec = TOOL, unit: str = 'm', angle: str = 'rad') -> BundleSpec:
    actions = tuple(
        ActionSpec(name, u, pose.kind)
        for name, u in [*((n, unit) for n in pose.position), *((n, angle) for n in pose.rotation)]
    )
    return policy(measured(*JOINTS), actions, poses=(pose,))


def test_pose_actions_have_the_workspace_and_no_feedback(arm):
    match = match_robot(arm, pose_policy(unit='mm', angle='deg'), 'bundle')
    assert match.limits.workspace_lower[:3] == pytest.approx([0.1, -0.3, 0.0])
    assert match.limits.velocity == pytest.approx([0.5] * 3 + [1.0] * 4)
    assert np.isinf(match.limits.acceleration).all()
    assert not any(column.feedback for column in match.columns)
    (output,) = match.outputs
    assert (output.columns, output.frame_id, output.pose) == (tuple(range(7)), 'base', TOOL)
    command = match.actions.to_robot(np.array([100.0, 0.0, 0.0, 180.0, 0.0, 0.0]))
    assert command == pytest.approx([0.1, 0.0, 0.0, np.pi, 0.0, 0.0])


@pytest.mark.parametrize(
    ('key', 'in_urdf'),
    [
        ('velocity', '<joint name="lift" type="revolute"><limit lower="-1" upper="1"/></joint>'),
        ('lower', '<joint name="lift" type="continuous"><limit velocity="2"/></joint>'),
    ],
)
def test_a_limit_that_neither_robot_file_nor_urdf_has_is_an_error(arm, key, in_urdf):
    left_out = {'velocity': None, 'lower': None, 'upper': None}
    match_robot(lift_with(arm, **left_out), SAME, 'bundle')
    urdf = re.sub('<joint name="lift".*?</joint>', in_urdf, URDF)
    with pytest.raises(MatchError, match=rf'joints\[lift\]\.{key}: is missing, in the URDF too'):
        match_robot(lift_with(arm, urdf, **left_out), SAME, 'bundle')


def test_a_urdf_only_ever_tightens(tmp_path, arm):
    tight = match_robot(replace(arm, urdf_text=URDF), SAME, 'bundle')
    assert tight.limits.velocity == pytest.approx([3.0, 2.0, 0.2])
    narrow = URDF.replace('upper="1"', 'upper="0.5"')
    with pytest.raises(MatchError, match=r'arm\.yaml'):
        match_robot(replace(arm, urdf_text=narrow), SAME, 'bundle')


@pytest.mark.parametrize(
    ('spec', 'field', 'hint'),
    [
        (
            policy(measured(*JOINTS), absolute(*JOINTS), (CameraSpec('tpo'),)),
            'cameras[0].name',
            "did you mean 'top'?",
        ),
        (
            policy(measured(('lfit', 'rad')), absolute(*JOINTS)),
            'state[0].name',
            "did you mean 'lift'?",
        ),
        (
            policy(measured(*JOINTS), absolute(('elbow', 'rad'))),
            'actions[0].name',
            "no joint 'elbow'",
        ),
        (
            policy(measured(('lift', 'm')), absolute(*JOINTS)),
            'state[0].unit',
            "'m' cannot become 'rad' of joint 'lift'",
        ),
        (
            policy(measured(*JOINTS), absolute(('turn', 'percent'), ('lift', 'rad'))),
            'actions[0].unit',
            "give the joint 'zero' and 'one': its positions where the policy says 0 and 100",
        ),
        (
            policy(measured(*JOINTS), absolute(('turn', 'rad'))),
            'actions',
            "also carries ['lift'], which the policy does not command",
        ),
        (
            policy(measured(*JOINTS), (ActionSpec('hand', 'm/s', 'velocity'),)),
            'actions',
            "interface is 'position', but the policy commands the velocity of ['hand']",
        ),
        (pose_policy(replace(TOOL, name='flange')), 'poses[0].name', "alias 'flange'"),
        (pose_policy(TWIST, 'm/s', 'rad/s'), 'poses', "'tool' is velocity and needs twist_stamped"),
    ],
)
def test_a_conflict_names_both_files_and_the_field(arm, spec, field, hint):
    with pytest.raises(MatchError) as caught:
        match_robot(arm, spec, 'bundles/mine')
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f'bundles/mine/policy.yaml: {field}: ')
    assert str(arm.file) in first
    assert hint in first


def test_two_policy_names_for_one_joint_are_refused():
    robot = load_robot(ROBOTS / 'so101.yaml')
    spec = lerobot_so101('deg')
    twice = replace(spec, state=(*spec.state, StateSpec('gripper', 'percent')))
    with pytest.raises(MatchError):
        match_robot(robot, twice, 'bundle')


def test_all_conflicts_are_told_at_once(arm):
    spec = policy(measured(('a', 'rad'), ('b', 'rad')), absolute(('c', 'rad')), (CameraSpec('d'),))
    with pytest.raises(MatchError) as caught:
        match_robot(arm, spec, 'bundle')
    assert len(str(caught.value).splitlines()) == 4


def test_a_bundle_of_another_robot_is_one_line_with_the_names_of_both():
    names = [f'{side}_joint{index}' for side in ('left', 'right') for index in range(8)]
    spec = policy(
        measured(*((name, 'rad') for name in names)),
        absolute(*((name, 'rad') for name in names)),
        (CameraSpec('head'), CameraSpec('wrist')),
    )
    with pytest.raises(MatchError) as caught:
        match_robot(load_robot(ROBOTS / 'so101.yaml'), spec, 'bundle')
    (told,) = str(caught.value).splitlines()
    for word in ('bundle/policy.yaml', 'so101.yaml', 'left_joint0', 'shoulder_pan', 'aliases'):
        assert word in told


def test_a_few_unknown_names_are_told_one_by_one():
    robot = load_robot(ROBOTS / 'so101.yaml')
    names = [joint.name for joint in robot.joints]
    spec = policy(
        measured(*((name, 'rad') for name in (*names[1:], 'waist'))),
        absolute(*((name, 'rad') for name in names)),
        (CameraSpec('head'),),
    )
    with pytest.raises(MatchError) as caught:
        match_robot(robot, spec, 'bundle')
    fields = [line.split(': ')[1] for line in str(caught.value).splitlines()]
    assert fields == ['cameras[0].name', 'state[5].name']


@pytest.mark.parametrize(
    ('known', 'unknown', 'is_another'),
    [(4, 4, False), (3, 5, True), (6, 6, False), (5, 7, True), (0, 4, False)],
)
def test_a_bundle_is_of_another_robot_where_more_than_four_and_than_half_is_unknown(
    tmp_path, known, unknown, is_another
):
    joints = ''.join(
        f'  - {{name: known{at}, unit: rad, lower: -1, upper: 1, velocity: 1}}\n'
        for at in range(known)
    )
    (tmp_path / 'arm.yaml').write_text(ARM.replace('cameras:', f'{joints}cameras:'))
    names = [f'known{at}' for at in range(known)] + [f'strange{at}' for at in range(unknown)]
    named = [(name, 'rad') for name in names]
    spec = policy(measured(*named), absolute(*named))
    with pytest.raises(MatchError) as caught:
        match_robot(load_robot(tmp_path / 'arm.yaml'), spec, 'bundle')
    lines = str(caught.value).splitlines()
    assert ('is of another robot' in lines[0]) == is_another
    assert len(lines) == (1 if is_another else 2 * unknown)


def test_a_joints_tolerances_scale_with_its_unit(tmp_path):
    text = ARM.replace('name: lift, unit: rad, lower: -1.0', 'name: lift, unit: deg, lower: -57')
    spec = policy(
        (StateSpec('lift', 'deg'),),
        (ActionSpec('lift', 'deg', 'absolute'), ActionSpec('turn', 'rad', 'absolute')),
    )
    columns = matched(tmp_path, text, spec).columns
    assert {column.name: column.scale for column in columns} == {
        'lift': pytest.approx(180 / np.pi),
        'turn': 1.0,
    }


FORMS = {
    'quaternion_wxyz': ('qw', 'qx', 'qy', 'qz'),
    'quaternion_xyzw': ('qx', 'qy', 'qz', 'qw'),
    'euler': ('roll', 'pitch', 'yaw'),
    'axis_angle': ('rx', 'ry', 'rz'),
    'rotation_6d': tuple('abcdef'),
    'rotation_6d_rows': tuple('abcdef'),
    'rotation_6d_interleaved': tuple('abcdef'),
}


@pytest.mark.parametrize('form', FORMS)
def test_a_rotation_is_a_quaternion_in_commands_whatever_the_policy_writes(arm, form):
    pose = replace(
        TOOL, rotation=FORMS[form], form=form, euler_axes='sxyz' if form == 'euler' else None
    )
    # Not in the order of the pose, and with a joint between.
    names = (FORMS[form][0], 'x', 'hand', 'y', 'z', *reversed(FORMS[form][1:]))
    units = {'hand': 'm', 'x': 'm', 'y': 'm', 'z': 'm'}
    actions = absolute(*((name, units.get(name, '1')) for name in names))
    match = match_robot(arm, policy(measured(*JOINTS), actions, poses=(pose,)), 'bundle')
    assert match.action_names == names
    quaternion = ('tool.qw', 'tool.qx', 'tool.qy', 'tool.qz')
    assert match.column_names == (*quaternion, 'x', 'hand', 'y', 'z')
    labels = [column.quaternion for column in match.columns]
    assert labels == ['tool'] * 4 + [''] * 4
    by_topic = {output.output.topic: output.columns for output in match.outputs}
    assert by_topic == {'target_pose': (4, 6, 7, 0, 1, 2, 3), 'hand/commands': (5,)}


def test_actions_of_a_pose_may_be_called_as_joints_are(tmp_path):
    text = ARM.replace('name: lift, unit: rad', 'name: lift, aliases: [x], unit: m')
    pose = replace(TOOL, rotation=('turn', 'pitch', 'yaw'))
    spec = replace(pose_policy(pose), state=measured(('turn', 'rad')))
    match = matched(tmp_path, text[: text.index('  - {kind: float64')], spec)
    assert match.column_names == ('x', 'y', 'z', 'tool.qw', 'tool.qx', 'tool.qy', 'tool.qz')
    assert not any(column.feedback for column in match.columns)
    assert match.outputs[0].columns == tuple(range(7))


RAIL = 'name: x, unit: UNIT, lower: -9000.0, upper: 9000.0, velocity: 7000.0, max_step: 0.5'


@pytest.mark.parametrize('unit', ['m', 'mm'])
@pytest.mark.parametrize('called', ['name: x', 'name: rail, aliases: [x]'])
@pytest.mark.parametrize('kind', ['absolute', 'delta', 'velocity'])
def test_an_action_of_a_pose_has_the_poses_limits_and_unit_where_a_joint_is_called_so(
    tmp_path, unit, called, kind
):
    rail = RAIL.replace('name: x', called).replace('UNIT', unit)
    turn = '  - {name: roll, unit: deg, lower: -360.0, upper: 360.0, velocity: 90.0}\n'
    arm = TWIST_ARM if kind == 'velocity' else ARM
    text = arm.replace('cameras:', f'  - {{{rail}}}\n{turn}cameras:')
    text = text[: text.index('  - {kind: float64')]
    path = tmp_path / 'arm.yaml'
    path.write_text(text)
    rate = '/s' if kind == 'velocity' else ''
    pose = TWIST if kind == 'velocity' else replace(TOOL, kind=kind)
    spec = pose_policy(pose, 'm' + rate, 'rad' + rate)
    # The URDF knows the joints and nothing of the pose.
    robot = replace(load_robot(path), urdf_text=URDF)
    match = match_robot(robot, replace(spec, state=measured(('x', 'm'))), 'bundle')
    assert match.column_names[:3] == ('x', 'y', 'z')
    assert not any(column.feedback for column in match.columns)
    assert {column.scale for column in match.columns} == {1.0}
    limits = match.limits
    assert limits.velocity == pytest.approx([0.5] * 3 + [1.0] * (len(limits.names) - 3))
    assert np.isinf(limits.lower).all() and np.isinf(limits.upper).all()
    if kind != 'velocity':
        assert limits.workspace_lower[:3] == pytest.approx([0.1, -0.3, 0.0])
        assert limits.workspace_upper[:3] == pytest.approx([0.5, 0.3, 0.4])
    numbers = np.array([[0.2, 0.1, 0.1, 0.3, 0.2, 0.1]])
    assert match.actions.to_robot(numbers) == pytest.approx(numbers)
    # The state is the joint's.
    assert match.state.to_robot(np.array([0.2])) == pytest.approx(200.0 if unit == 'mm' else 0.2)


def test_a_twist_that_no_output_carries_is_the_velocities_of_its_joints(tmp_path):
    names = (*TOOL.position, *TOOL.rotation)
    joints = ''.join(
        f'  - {{name: {name}, unit: {"mm" if name in "xyz" else "rad"}, lower: -9.0, upper: 9.0, '
        'velocity: 7.0}\n'
        for name in names
    )
    text = ARM[: ARM.index('outputs:')].replace('cameras:', f'{joints}cameras:')
    output = f'{{kind: joint_state, topic: t, interface: velocity, joints: [{", ".join(names)}]}}'
    spec = pose_policy(TWIST, 'm/s', 'rad/s')
    match = matched(tmp_path, f'{text}outputs: [{output}]\n', spec)
    assert match.limits.velocity == pytest.approx([7.0] * 6)
    assert match.actions.to_robot(np.ones(6)) == pytest.approx([1e3] * 3 + [1.0] * 3)


def test_an_output_of_joints_does_not_carry_a_number_of_a_pose(tmp_path):
    rail = RAIL.replace('UNIT', 'm')
    text = ARM.replace('cameras:', f'  - {{{rail}}}\ncameras:').replace('[hand]', '[x]')
    match = matched(tmp_path, text, pose_policy())
    assert [output.output.topic for output in match.outputs] == ['target_pose']
    with pytest.raises(MatchError, match="'tool'"):
        matched(tmp_path, text.replace(POSE_OUTPUT, ''), pose_policy())


def test_a_pose_stays_in_its_box_at_its_speed_where_a_joint_is_called_as_its_action(tmp_path):
    rail = RAIL.replace('UNIT', 'm')
    text = ARM.replace('cameras:', f'  - {{{rail}}}\ncameras:')
    path = tmp_path / 'arm.yaml'
    path.write_text(text[: text.index('  - {kind: float64')])
    robot = load_robot(path)
    spec = replace(pose_policy(replace(TOOL, kind='delta')), state=measured(('x', 'm')))
    match = match_robot(robot, spec, 'bundle')
    arm = Arm(robot, match, np.array([0.3, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0]))

    def rows() -> np.ndarray:
        # At twice the pose's speed to the box, and later through it.
        goal = 0.5 if arm.tick < 150 else 5.0
        found = np.zeros((STEPS, 6))
        found[:, 0] = np.minimum(arm.joints[0] + STEP_S * np.arange(STEPS), goal)
        found[:, 2] = 0.2
        return found

    arm.run(250, rows)
    sent = [command[0] for command in arm.sent]
    assert len(sent) > 50 and max(sent) == pytest.approx(0.5)
    assert np.diff(sent).max() == pytest.approx(0.5 * 0.01)
    assert arm.results[0].accepted and "workspace of 'x' in row" in arm.results[-1].text


def test_accelerations_of_a_pose_are_those_of_its_columns(tmp_path):
    given = 'angular_velocity: 1.0, acceleration: 2.0, angular_acceleration: 5.0}'
    limits = matched(tmp_path, ARM.replace('angular_velocity: 1.0}', given), pose_policy()).limits
    assert limits.acceleration == pytest.approx([2.0] * 3 + [5.0] * 4)
    assert limits.braking_s == pytest.approx(0.25)
    twist = pose_policy(TWIST, 'm/s', 'rad/s')
    limits = matched(tmp_path, TWIST_ARM.replace('angular_velocity: 1.0}', given), twist).limits
    assert limits.acceleration == pytest.approx([2.0] * 3 + [5.0] * 3)
    assert limits.velocity == pytest.approx([0.5] * 3 + [1.0] * 3)


@pytest.mark.parametrize('form', ['quaternion_wxyz', 'quaternion_xyzw', 'rotation_6d', 'euler'])
def test_a_twist_that_is_no_angular_velocity_is_a_conflict_that_says_what_mends_it(tmp_path, form):
    axes = 'rzyx' if form == 'euler' else None
    pose = replace(TOOL, rotation=FORMS[form], form=form, euler_axes=axes, kind='velocity')
    with pytest.raises(
        MatchError, match=rf"poses\[0\]\.form: 'tool' is velocity .*{form}.*axis_angle"
    ):
        matched(tmp_path, TWIST_ARM, pose_policy(pose, 'm/s', '1'))


def test_a_camera_of_another_size_is_a_conflict_where_nothing_resizes_its_images(tmp_path):
    bundle = tiny_spec('act')
    text = """
format: 1
name: tiny
joints:
  - {name: shoulder, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
  - {name: elbow, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
  - {name: gripper, unit: rad, lower: -1.0, upper: 1.0, velocity: 2.0}
joint_states: [{topic: joint_states}]
cameras:
  - {name: top, topic: top/image_raw, width: 64, height: 48}
  - {name: wrist, topic: wrist/image_raw, width: WIDE, height: 48}
outputs: [{kind: float64_multi_array, topic: commands, joints: [shoulder, elbow, gripper]}]
"""
    path = tmp_path / 'tiny.yaml'
    path.write_text(text.replace('WIDE', '64'))
    assert match_robot(load_robot(path), bundle, tmp_path).cameras['wrist'].width == 64
    path.write_text(text.replace('WIDE', '80'))
    with pytest.raises(MatchError, match=r'cameras\[1\]'):
        match_robot(load_robot(path), bundle, tmp_path)
    # A policy whose images are resized takes any.
    match_robot(load_robot(path), tiny_spec('pi0'), tmp_path)


def test_a_robot_in_degrees_is_held_to_the_urdf_in_degrees(arm):
    robot = lift_with(arm, unit='deg', velocity=None, lower=None, upper=None)
    limits = match_robot(robot, SAME, 'bundle').limits
    index = limits.names.index('lift')
    assert limits.upper[index] == pytest.approx(np.rad2deg(1.0))
    assert limits.velocity[index] == pytest.approx(np.rad2deg(2.0))
    loose = lift_with(arm, unit='deg', lower=-70.0, upper=57.2, velocity=9.0)
    with pytest.raises(MatchError, match='only tighten'):
        match_robot(loose, SAME, 'bundle')


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'unit': 'percent'}, 'cannot be converted to percent'),
        ({'message_name': 'other'}, 'the URDF is without the joint'),
    ],
)
def test_a_joint_that_the_urdf_says_nothing_about_needs_limits_of_its_own(arm, changes, words):
    joints = (('turn', 'rad'), ('lift', '1'), ('hand', '1'))
    spec = policy(measured(*joints), absolute(*joints))
    own = {'zero': 0.0, 'one': 100.0, 'lower': 0.0, 'upper': 100.0, 'velocity': 50.0, **changes}
    limits = match_robot(lift_with(arm, **own), spec, 'bundle').limits
    index = limits.names.index('lift')
    assert (limits.upper[index], limits.velocity[index]) == (100.0, 50.0)
    with pytest.raises(MatchError, match=words):
        match_robot(lift_with(arm, **{**own, 'velocity': None}), spec, 'bundle')


# ------------------------------------------------------------ poses that the files name otherwise

TWIST_NAMES = ('vx', 'vy', 'vz', 'wx', 'wy', 'wz')
POSE_NAMES = ('x', 'y', 'z', 'rx', 'ry', 'rz')
UNITS = ('m',) * 3 + ('rad',) * 3
CART = TWIST_ARM.replace(
    'cameras:',
    ''.join(
        f'  - {{name: {name}, unit: {unit}, lower: -9, upper: 9, velocity: 9}}\n'
        for name, unit in zip(POSE_NAMES, UNITS, strict=True)
    )
    + 'cameras:',
)


def told(folder: Path, text: str, spec: BundleSpec) -> list[str]:
    with pytest.raises(MatchError) as caught:
        matched(folder, text, spec)
    return str(caught.value).splitlines()


def twist_policy(
    *, poses: tuple[PoseSpec, ...] = (), unit: str = '', names: tuple[str, ...] = POSE_NAMES
) -> BundleSpec:
    """A policy that measures a pose and says a twist; `unit`: of the state, m and rad without."""
    units = (unit,) * 6 if unit else UNITS
    rates = ('m/s',) * 3 + ('rad/s',) * 3
    return policy(
        measured(*zip(names, units, strict=True)),
        tuple(ActionSpec(*one, 'velocity') for one in zip(TWIST_NAMES, rates, strict=True)),
        poses=poses,
    )


CART_TWIST = PoseSpec('tool', TWIST_NAMES[:3], TWIST_NAMES[3:], 'axis_angle', 'velocity', 'base')


def test_a_twist_that_no_pose_holds_is_pointed_at_the_export_and_at_no_joint(tmp_path):
    joined = ','.join(TWIST_NAMES)
    (line,) = told(tmp_path, CART, twist_policy())
    assert f'--pose tool={joined} --pose-rotation axis_angle --velocity {joined}' in line
    assert 'did you mean' not in line
    # Where nothing measures the state, it is of the pose, too.
    names = tuple(f'tcp_{name}' for name in POSE_NAMES)
    lines = told(tmp_path, CART, twist_policy(names=names))
    assert [line.split(': ')[1] for line in lines] == ['actions[0].name', 'state[0].name']
    assert f'--pose-state {",".join(names)}' in lines[1]


def test_a_joint_that_is_called_a_little_otherwise_is_no_undeclared_pose(tmp_path):
    spec = policy(
        measured(('turn', 'rad')),
        absolute(*zip(('x', 'y', 'z', 'rx', 'ry', 'rz'), UNITS, strict=True)),
    )
    (line,) = told(tmp_path, CART.replace('name: rx', 'name: rxx'), spec)
    assert "no joint 'rx'" in line and "did you mean 'rxx'" in line


def test_a_measured_pose_that_the_bundle_takes_for_joints_is_pointed_at_the_export(tmp_path):
    names = tuple(f'tcp_{name}' for name in POSE_NAMES)
    (line,) = told(tmp_path, CART, twist_policy(poses=(CART_TWIST,), names=names))
    assert f'--pose-state {",".join(names)}' in line


@pytest.mark.parametrize('declared', [True, False])
def test_a_state_without_a_unit_that_is_named_as_a_pose_is_one_line_with_its_option(
    tmp_path, declared
):
    spec = twist_policy(poses=(CART_TWIST,) if declared else (), unit='1')
    lines = told(tmp_path, CART, spec)
    (line,) = [line for line in lines if ': state' in line]
    assert f'--pose-state {",".join(POSE_NAMES)}' in line and '--units' in line
    assert len(lines) == (1 if declared else 2)
    assert not any("'zero'" in line for line in lines)
    # Joints that say what 0 and 1 are measure it.
    ranged = CART.replace('upper: 9, velocity: 9}', 'upper: 9, velocity: 9, zero: 0, one: 2}')
    whole = twist_policy(poses=(CART_TWIST,), unit='1')
    match = matched(tmp_path, ranged, whole)
    assert match.state.to_robot(np.ones(6)) == pytest.approx([2.0] * 6)
    pose = replace(CART_TWIST, state_position=POSE_NAMES[:3], state_rotation=POSE_NAMES[3:])
    match = matched(tmp_path, CART, twist_policy(poses=(pose,)))
    assert match.measured_joints == POSE_NAMES


def test_a_pose_of_another_name_is_one_line_that_gives_the_alias(tmp_path):
    pose = replace(CART_TWIST, state_position=POSE_NAMES[:3], state_rotation=POSE_NAMES[3:])
    spec = twist_policy(poses=(pose,))
    other = CART.replace('name: tool', 'name: gripper_tip').replace(
        'pose: tool', 'pose: gripper_tip'
    )
    (line,) = told(tmp_path, other, spec)
    assert "the robot file's pose is 'gripper_tip': give it the alias 'tool'" in line
    mended = other.replace('name: gripper_tip', 'name: gripper_tip, aliases: [tool]')
    (tmp_path / 'arm.yaml').write_text(mended)
    assert match_robot(load_robot(tmp_path / 'arm.yaml'), spec, 'bundle').outputs[0].pose == pose
    # A robot without poses measures and moves none.
    bare = CART[: CART.index('poses:')] + CART[CART.index('outputs:') :]
    (line,) = told(
        tmp_path, bare.replace(POSE_OUTPUT.replace('pose_stamped', 'twist_stamped'), ''), spec
    )
    assert "no pose 'tool'" in line


def test_a_pose_that_no_output_carries_is_one_line(tmp_path):
    (line,) = told(tmp_path, ARM.replace(POSE_OUTPUT, ''), pose_policy())
    assert 'carried by none of the outputs' in line


# --- The workspace box of a twist: where its position is measured, and what is refused by name


def cart_matched(
    folder: Path, box: str = BOX, unit: str = 'm', kind: str = 'twist_stamped', **pose: object
) -> RobotMatch:
    path = folder / 'cart.yaml'
    path.write_text(ROBOT.replace('UNIT', unit).replace('BOX', box).replace('KIND', kind))
    spec = replace(SPEC, poses=(replace(CART_OWN_TWIST, **pose),))
    return match_robot(load_robot(path), spec, 'bundle')


def test_joints_of_the_bundles_state_measure_the_position(tmp_path):
    match = cart_matched(tmp_path, state_position=('px', 'py', 'pz'))
    (tool,) = match.tools
    assert tool.joints == ('px', 'py', 'pz') and tool.topic is None
    assert [match.observed_as(joint) for joint in tool.joints] == ['vx', 'vy', 'vz']
    assert match.limits.workspace_lower[:3] == pytest.approx([0.2, -0.4, 0.05])
    assert [column.feedback for column in match.columns] == [True] * 3 + [False] * 3


def test_a_topic_measures_the_position_along_the_bounded_axes(tmp_path):
    box = 'lower: [-1e9, -1e6, 0.05], upper: [1e9, 0.3, 1e9], topic: tcp_pose,'
    match = cart_matched(tmp_path, box, state_position=('px', 'py', 'pz'))
    (tool,) = match.tools
    assert (tool.topic, tool.frame_id, tool.joints) == ('tcp_pose', 'base', ())
    assert (tool.columns, tool.axes) == (('vy', 'vz'), (1, 2))
    assert match.observed_as('px') == 'px'
    assert [column.feedback for column in match.columns] == [False, True, True, *[False] * 3]
    assert match.limits.hard_lower[:3].tolist() == [-np.inf, -np.inf, 0.05]
    assert match.limits.hard_upper[:3].tolist() == [np.inf, 0.3, np.inf]


@pytest.mark.parametrize(
    ('unit', 'pose', 'field'),
    [
        ('m', {}, 'poses[0].topic'),
        ('mm', {'state_position': ('px', 'py', 'pz')}, 'poses[0].topic'),
        ('m', {'state_position': ('px', 'py', 'pz'), 'frame': 'tool'}, 'poses[0].frame'),
    ],
)
def test_a_box_that_cannot_be_held_is_refused_by_name(tmp_path, unit, pose, field):
    with pytest.raises(MatchError) as caught:
        cart_matched(tmp_path, unit=unit, **pose)
    assert field in str(caught.value) and "'tool'" in str(caught.value)
    # What mends it without a measurement.
    assert cart_matched(tmp_path, '', unit, **pose).tools == ()


def test_a_box_without_bounds_needs_no_measurement(tmp_path):
    match = cart_matched(tmp_path, 'lower: [-1e9, -1e9, -1e9], upper: [1e9, 1e9, 1e9],')
    assert match.tools == () and not any(column.feedback for column in match.columns)


@pytest.mark.parametrize(
    ('box', 'kind', 'field'),
    [
        ('', 'pose_stamped', 'poses[0].lower'),
        ('lower: [0, 0, 0],', 'twist_stamped', 'poses[0].upper'),
        (f'{BOX} topic: tcp_pose,', 'pose_stamped', 'poses[0].topic'),
        (f'{BOX} topic: servo/twist,', 'twist_stamped', 'poses[0].topic'),
    ],
)
def test_a_box_or_topic_that_makes_no_sense_is_refused_in_the_robot_file(
    tmp_path, box, kind, field
):
    with pytest.raises(RobotError) as caught:
        cart_matched(tmp_path, box, kind=kind)
    assert caught.value.field == field


def test_a_rail_that_is_called_as_an_action_is_not_taken_for_the_tool(tmp_path):
    path = tmp_path / 'cart.yaml'
    text = ROBOT.replace('UNIT', 'm').replace('KIND', 'twist_stamped')
    path.write_text(text.replace('BOX', f'{BOX} topic: tcp_pose,').replace('name: px', 'name: vx'))
    spec = replace(SPEC, state=(StateSpec('vx', 'm'),))
    match = match_robot(load_robot(path), spec, 'bundle')
    assert match.observed_as('vx') == ''
    assert match.state_joints == ('vx',)
