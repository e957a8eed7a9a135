"""Units that limits, URDF, training or the measured state contradict; healthy robots pass."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot
from vla_runtime.robot.schema import Robot
from vla_runtime.robot.unit_slips import UnitCheck, trained_ranges

ROBOTS = sorted((ROOT / 'config' / 'robots').glob('*.yaml'))
# Without its home, which is in radians.
TABLETOP = (ROOT / 'config' / 'robots' / 'tabletop.yaml').read_text().partition('# Where ~/home')[0]
JOINTS = ('shoulder_pan', 'shoulder_lift', 'elbow_flex', 'wrist_flex', 'wrist_roll', 'gripper')
HOME_RAD = np.array([0.1, -0.3, 1.6, 1.7, 0.0, 0.2])
DEGREES = 180.0 / np.pi
FIELDS = re.compile(r'(lower|upper|velocity|acceleration|max_step): (-?[\d.]+)')


@pytest.fixture(scope='module')
def demo():
    return read_bundle(ROOT / 'engines' / 'demo', verify=False)


def robot_of(folder: Path, scale: float = 1.0, unit: str = 'rad', text: str = TABLETOP) -> Robot:
    """The tabletop's robot file with other limits, in another unit."""

    def scaled(match: re.Match[str]) -> str:
        return f'{match[1]}: {float(match[2]) * scale:.6f}'

    path = folder / 'robot.yaml'
    path.write_text(FIELDS.sub(scaled, text).replace('unit: rad', f'unit: {unit}'))
    return load_robot(path)


def check_of(robot: Robot, bundle: Bundle) -> UnitCheck:
    match = match_robot(robot, bundle.spec, bundle.folder)
    return UnitCheck(robot, match, trained_ranges(bundle.spec, bundle.statistics, match))


def state(positions: np.ndarray) -> dict[str, float]:
    return dict(zip(JOINTS, positions.tolist(), strict=True))


@pytest.mark.parametrize('path', ROBOTS, ids=lambda path: path.stem)
def test_the_robot_files_of_the_package_have_no_doubtful_unit(path):
    robot = load_robot(path)
    assert UnitCheck(robot).notes() == []
    middle = {joint.name: 0.5 * (joint.lower + joint.upper) for joint in robot.joints}
    assert UnitCheck(robot).why_not_start(middle) == ''


@pytest.fixture(scope='module', params=[1.0, DEGREES], ids=['rad', 'deg'])
def healthy(request, tmp_path_factory, demo):
    """The tabletop in either unit; the size of a radian in it, its file and its check."""
    unit = 'rad' if request.param == 1.0 else 'deg'
    robot = robot_of(tmp_path_factory.mktemp('robot'), request.param, unit)
    return request.param, robot, check_of(robot, demo)


@given(share=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6))
def test_a_robot_anywhere_in_its_training_starts_in_either_unit(healthy, demo, share):
    scale, _, check = healthy
    low, high = (demo.statistics[f'state.{name}'] for name in ('q01', 'q99'))
    positions = scale * (low + np.array(share) * (high - low))
    assert check.why_not_start(state(positions)) == ''


@given(share=st.lists(st.floats(0.05, 0.95), min_size=6, max_size=6))
def test_a_robot_anywhere_in_its_limits_starts_unless_it_is_all_but_at_zero(healthy, share):
    scale, robot, check = healthy
    joints = [robot.joint(name) for name in JOINTS]
    low, high = (np.array([getattr(one, key) for one in joints]) for key in ('lower', 'upper'))
    positions = low + np.array(share) * (high - low)
    near_zero = np.abs(positions[:5]).max() < 6.0 and scale != 1.0
    assert near_zero or check.why_not_start(state(positions)) == ''


def test_a_driver_in_radians_is_not_started_where_the_file_says_degrees(tmp_path, demo):
    check = check_of(robot_of(tmp_path, DEGREES, 'deg'), demo)
    refused = check.why_not_start(state(HOME_RAD))
    assert "'elbow_flex'" in refused and 'unit: deg' in refused and 'robot.yaml' in refused
    assert check.why_not_start(state(HOME_RAD * DEGREES)) == ''
    # ROS speaks radians, so that the files alone are worth a question.
    (note,) = check.notes()
    assert 'REP 103' in note


def test_one_joint_alone_may_be_chance_where_the_output_may_speak_degrees(tmp_path, demo):
    text = TABLETOP.replace('joint_trajectory\n', 'float64_multi_array\n')
    robot = robot_of(tmp_path, DEGREES, 'deg', text)
    check = check_of(robot, demo)
    assert check.notes() == []
    # One joint that was elsewhere in training, and all others near zero.
    positions = np.array([0.5, -0.3, 1.2, 60.0, 0.0, 0.2])
    assert check.why_not_start(state(positions)) == ''
    assert check.why_not_start(state(np.zeros(6))) == ''
    assert check.why_not_start(state(HOME_RAD)) != ''


@pytest.mark.parametrize('scale', [1.0, DEGREES], ids=['limits in rad', 'limits in deg'])
def test_a_driver_in_degrees_is_not_started_where_the_file_says_radians(tmp_path, demo, scale):
    check = check_of(robot_of(tmp_path, scale, 'rad'), demo)
    refused = check.why_not_start(state(HOME_RAD * DEGREES))
    assert 'deg' in refused and 'unit: rad' in refused
    assert check.why_not_start(state(HOME_RAD)) == ''
    assert any('turns' in note for note in check.notes()) == (scale != 1.0)


def test_limits_in_another_unit_than_the_training_are_noted(tmp_path, demo):
    for scale, unit in ((DEGREES, 'rad'), (1.0, 'deg')):
        notes = check_of(robot_of(tmp_path, scale, unit), demo).notes()
        assert any('in training' in note and "'shoulder_pan'" in note for note in notes)
    assert check_of(robot_of(tmp_path), demo).notes() == []


def arm(folder: Path, joint: str, output: str = 'float64_multi_array', urdf: str = '') -> Robot:
    path = folder / 'arm.yaml'
    path.write_text(
        f'format: 1\nname: arm\njoints:\n  - {{name: a, velocity: 1.0, {joint}}}\n'
        f'outputs: [{{kind: {output}, topic: t, joints: [a]}}]\n'
        + ('urdf: arm.urdf\n' if urdf else '')
    )
    (folder / 'arm.urdf').write_text(
        f'<robot name="arm"><joint name="a" type="revolute"><limit {urdf}/></joint></robot>'
    )
    return load_robot(path)


@pytest.mark.parametrize(
    ('joint', 'wrong', 'right'),
    [
        ('unit: m, lower: 0.0, upper: 0.08', 40.0, 0.04),
        ('unit: m, lower: 0.0, upper: 0.08, grips: true', 79.0, 0.0),
        ("unit: '1', lower: 0.0, upper: 1.0", 50.0, 1.0),
        ('unit: rad, lower: -1.9, upper: 1.9', -68.0, -1.2),
        ('unit: mm, lower: 20.0, upper: 80.0', None, 0.04),
        ('unit: percent, lower: -100.0, upper: 100.0', None, 0.5),
        ('unit: mm, lower: 0.0, upper: 80.0, grips: true', None, 0.04),
        # Nobody's other unit.
        ('unit: rad, lower: -1.9, upper: 1.9', None, 900.0),
        ('unit: rad, lower: -1.9, upper: 1.9', None, 2.2),
        ('unit: rad, continuous: true', None, 900.0),
    ],
)
def test_a_state_that_fits_in_another_unit_alone_is_refused(tmp_path, joint, wrong, right):
    check = UnitCheck(arm(tmp_path, joint))
    assert check.why_not_start({'a': right}) == ''
    assert wrong is None or "'a'" in check.why_not_start({'a': wrong})
    assert check.why_not_start({}) == ''


def test_a_motor_that_really_turns_far_says_so_by_its_urdf_or_its_training(tmp_path):
    joint = 'unit: rad, lower: -166.0, upper: 166.0'
    alone = UnitCheck(arm(tmp_path, joint))
    assert len(alone.notes()) == 1 and 'turns' in alone.why_not_start({'a': 95.0})
    assert alone.why_not_start({'a': 1.0}) == ''
    urdf = 'lower="-200" upper="200" velocity="9"'
    told = UnitCheck(arm(tmp_path, joint, urdf=urdf))
    assert told.notes() == [] and told.why_not_start({'a': 95.0}) == ''
    assert (
        UnitCheck(arm(tmp_path, joint), trained={'a': (-20.0, 120.0)}).why_not_start({'a': 95.0})
        == ''
    )
    wheel = arm(tmp_path, joint, 'float64_multi_array, interface: velocity')
    assert UnitCheck(wheel).why_not_start({'a': 95.0}) == ''


@pytest.mark.parametrize(
    ('joint', 'urdf', 'noted'),
    [
        ('unit: rad, lower: -110.0, upper: 110.0', 'lower="-1.92" upper="1.92"', True),
        ('unit: deg, lower: -1.92, upper: 1.92', 'lower="-1.92" upper="1.92"', True),
        ('unit: deg, lower: -110.0, upper: 110.0', 'lower="-1.92" upper="1.92"', False),
        ('unit: rad, lower: -0.5, upper: 0.5', 'lower="-3.1" upper="3.1"', False),
    ],
)
def test_limits_that_differ_from_the_urdf_by_a_unit_are_noted(tmp_path, joint, urdf, noted):
    notes = UnitCheck(arm(tmp_path, joint, urdf=f'{urdf} velocity="9"')).notes()
    assert any('URDF' in note for note in notes) is noted


def test_a_policy_without_ranges_says_nothing_of_its_training(tmp_path, demo):
    robot = robot_of(tmp_path)
    spec = replace(demo.spec, normalisation=replace(demo.spec.normalisation, state='identity'))
    match = match_robot(robot, spec, demo.folder)
    assert trained_ranges(spec, {}, match) == {}
