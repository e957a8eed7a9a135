"""Where a URDF's end effector is, and which link that is."""

from __future__ import annotations

import numpy as np
import pytest

from vla_tools.view.scene import tip_paths
from vla_tools.view.shape import RobotShape, ShapeError, in_urdf_units
from vla_tools.view.wire import Motion


def joint(name: str, kind: str, parent: str, child: str, more: str = '') -> str:
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
        f'<origin xyz="1 0 0" rpy="0 0 0"/><axis xyz="0 0 1"/>'
        f'<limit lower="-2" upper="2" effort="1" velocity="1"/>{more}</joint>'
    )


def urdf(*joints: str, visual: str = '') -> str:
    names = dict.fromkeys(name.split('"')[0] for one in joints for name in one.split('link="')[1:])
    links = ''.join(f'<link name="{name}">{visual}</link>' for name in names)
    return f'<robot name="r">{links}{"".join(joints)}</robot>'


ARM = (
    joint('pan', 'revolute', 'base', 'upper'),
    joint('slide', 'prismatic', 'upper', 'lower'),
    joint('fixed', 'fixed', 'lower', 'tool0'),
    joint('finger', 'prismatic', 'tool0', 'finger_link'),
)


def test_an_arm_is_where_its_joints_put_it():
    shape = RobotShape(urdf(*ARM), None)
    assert shape.tips == ('tool0',) and shape.root == 'base'
    # Turned by a quarter at x = 1, then one along y, one along z, and one along y.
    found = shape.positions('tool0', {'pan': np.array([0.0, np.pi / 2]), 'slide': np.full(2, 0.5)})
    np.testing.assert_allclose(found, [[3.0, 0.0, 0.5], [1.0, 2.0, 0.5]], atol=1e-12)


def test_a_mimicking_joint_follows_its_leader():
    mimic = joint(
        'finger', 'prismatic', 'tool0', 'finger_link', '<mimic joint="slide" multiplier="2"/>'
    )
    shape = RobotShape(urdf(*ARM[:3], mimic), None)
    assert shape.positions('finger_link', {'slide': np.array([0.5])})[0, 2] == pytest.approx(1.5)


def test_two_arms_have_two_ends():
    arms = [
        part
        for side in ('left', 'right')
        for part in (
            joint(f'{side}_pan', 'revolute', 'base', f'{side}_upper'),
            joint(f'{side}_lift', 'revolute', f'{side}_upper', f'{side}_tcp'),
        )
    ]
    assert sorted(RobotShape(urdf(*arms), None).tips) == ['left_tcp', 'right_tcp']


def test_a_named_link_is_drawn_and_one_that_is_not_there_is_refused_by_name():
    assert RobotShape(urdf(*ARM), None, tip='upper').tips == ('upper',)
    with pytest.raises(ShapeError, match=r"'elsewhere'.*tool0"):
        RobotShape(urdf(*ARM), None, tip='elsewhere')


@pytest.mark.parametrize('text', ['', 'no xml', '<robot name="r"/>', '<sdf/>'])
def test_what_is_no_urdf_is_refused(text):
    with pytest.raises(ShapeError):
        RobotShape(text, None)


def test_meshes_that_are_not_here_are_named_and_the_rest_is_shown(tmp_path):
    visual = '<visual><geometry><mesh filename="package://nobody/arm.stl"/></geometry></visual>'
    shape = RobotShape(urdf(*ARM, visual=visual), tmp_path)
    assert shape.missing_meshes == ['package://nobody/arm.stl']
    assert shape.joints == ('pan', 'slide', 'finger')


def test_what_never_moves_is_no_part_of_the_ghost():
    visual = '<visual><geometry><box size="1 1 1"/></geometry></visual>'
    shape = RobotShape(urdf(*ARM, visual=visual), None)
    assert len(shape.moving.scene.geometry) == len(shape.urdf.scene.geometry) - 1


def test_joints_that_a_motion_leaves_out_stay_where_they_are():
    shape = RobotShape(urdf(*ARM), None)
    motion = Motion(np.array([[0.0], [90.0]]), ('pan',), ('position',), 0, 0.1, 0)
    degrees = {'pan': np.pi / 180.0}
    (path,) = tip_paths(shape, degrees, {'slide': 0.5}, motion)
    np.testing.assert_allclose(path, [[3.0, 0.0, 0.5], [1.0, 2.0, 0.5]], atol=1e-12)
    assert tip_paths(shape, {}, {}, Motion(motion.rows, ('x',), ('position',), 0, 0.1, 0)) == []


def test_only_units_that_a_urdf_knows_are_converted(tmp_path):
    from recorded_bag import ROBOT

    from vla_runtime.robot.file import read_robot

    text = ROBOT.replace('{name: gripper, unit: rad', "{name: gripper, unit: '1'")
    robot = read_robot(text, tmp_path / 'tiny.yaml', lambda _: None)
    assert in_urdf_units(robot) == {'shoulder': pytest.approx(np.pi / 180.0), 'elbow': 1.0}
    assert in_urdf_units(None) == {}
