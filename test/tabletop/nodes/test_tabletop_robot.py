"""Robot files of other robots are distinguished from the simulated one's, field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paths import ROOT

from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import JointCommand, Robot
from vla_tabletop.nodes.robot import require_tabletop
from vla_tabletop.sim.arm import JOINT_NAMES, joint_ranges_rad

ROBOTS = ROOT / 'config' / 'robots'


@pytest.fixture
def tabletop() -> Robot:
    return load_robot(ROBOTS / 'tabletop.yaml')


def with_joint(robot: Robot, index: int, **changes: object) -> Robot:
    joints = list(robot.joints)
    joints[index] = replace(joints[index], **changes)
    return replace(robot, joints=tuple(joints))


def test_its_own_file_passes_and_so_does_a_narrower_one(tabletop: Robot) -> None:
    require_tabletop(tabletop)
    require_tabletop(with_joint(tabletop, 0, lower=-0.5, upper=0.5))
    require_tabletop(with_joint(tabletop, 0, lower=None, upper=None))


@pytest.mark.parametrize('name', ['so101', 'so101_split', 'aloha', 'droid', 'ur5e'])
def test_another_robots_file_is_refused_with_what_mends_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf'{name}\.yaml: is of another robot') as error:
        require_tabletop(load_robot(ROBOTS / f'{name}.yaml'))
    assert 'start from its own file, config/robots/tabletop.yaml' in str(error.value)


@pytest.mark.parametrize(
    ('changes', 'told'),
    [
        ({'upper': 2.8}, "joints[2].upper: 2.8; the tabletop's 'elbow_flex' goes from 0.1 to 2.7"),
        ({'continuous': True}, 'joints[2].continuous: true'),
        ({'unit': 'deg'}, "joints[2].unit: 'deg'"),
        ({'command': JointCommand(unit='deg')}, 'joints[2].command: '),
        ({'name': 'elbow'}, "joints[2].name: no joint 'elbow'; did you mean 'elbow_flex'?"),
    ],
)
def test_a_joint_that_the_arm_has_not_is_named(tabletop: Robot, changes, told: str) -> None:
    with pytest.raises(ValueError) as error:
        require_tabletop(with_joint(tabletop, 2, **changes))
    assert told in str(error.value)


def test_everything_that_is_wrong_is_told_at_once(tabletop: Robot) -> None:
    camera = replace(tabletop.cameras[0], name='top')
    output = replace(tabletop.outputs[1], interface='velocity')
    robot = replace(
        with_joint(tabletop, 0, upper=3.0),
        cameras=(camera, *tabletop.cameras[1:]),
        outputs=(tabletop.outputs[0], output),
    )
    with pytest.raises(ValueError) as error:
        require_tabletop(robot)
    for field in ('joints[0].upper', 'cameras[0].name', 'outputs[1]'):
        assert f'field {field}: ' in str(error.value)


def test_the_end_stops_are_the_simulators() -> None:
    world = pytest.importorskip('vla_tabletop.sim.world', reason='needs mujoco')
    tabletop = world.Tabletop()
    lower, upper = zip(*(joint_ranges_rad()[name] for name in JOINT_NAMES), strict=True)
    assert lower == pytest.approx(tuple(tabletop.lower_rad))
    assert upper == pytest.approx(tuple(tabletop.upper_rad))
