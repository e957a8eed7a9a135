"""`home` and `leader` of a robot file: what is refused by which field, and the leader's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from paths import ROOT

from vla_runtime.robot.file import RobotError, load_robot
from vla_runtime.robot.leader import LeaderPositions
from vla_runtime.robot.schema import Robot

TABLETOP = yaml.safe_load((ROOT / 'config' / 'robots' / 'tabletop.yaml').read_text())
LEADER = {'topic': 'leader/joint_states', 'joints': [{'joint': 'elbow_flex'}]}
URDF = """<robot name="one"><link name="a"/><link name="b"/>
<joint name="turn" type="revolute"><parent link="a"/><child link="b"/>
<limit lower="-0.5" upper="0.5" velocity="1" effort="1"/></joint></robot>"""


def robot_of(tmp_path: Path, **changes: object) -> Robot:
    path = tmp_path / 'robot.yaml'
    path.write_text(yaml.safe_dump(TABLETOP | changes))
    return load_robot(path)


@pytest.mark.parametrize(
    ('home', 'field'),
    [
        ({'elbow': 1.0}, 'home'),
        ({'elbow_flex': 3.0}, 'home.elbow_flex'),
        ({'elbow_flex': 'up'}, 'home.elbow_flex'),
        ({'elbow_flex': float('nan')}, 'home.elbow_flex'),
        ([1.0], 'home'),
    ],
)
def test_a_home_that_cannot_be_is_refused_by_its_field(tmp_path, home, field):
    with pytest.raises(RobotError) as refused:
        robot_of(tmp_path, home=home)
    assert refused.value.field == field


def test_a_home_outside_the_urdfs_limits_is_refused(tmp_path):
    (tmp_path / 'arm.urdf').write_text(URDF)
    changes = {
        'urdf': 'arm.urdf',
        'joints': [{'name': 'turn', 'unit': 'deg'}],
        'cameras': [],
        'outputs': [{'kind': 'joint_trajectory', 'topic': 'arm', 'joints': ['turn']}],
    }
    assert robot_of(tmp_path, home={'turn': 28.0}, **changes).home == {'turn': 28.0}
    with pytest.raises(RobotError) as refused:
        robot_of(tmp_path, home={'turn': 29.0}, **changes)
    assert refused.value.field == 'home.turn'


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'topic': 'a topic'}, 'leader.topic'),
        ({'topic': 'joint_states'}, 'leader.topic'),
        ({'topic': 'vla_executor/report'}, 'leader.topic'),
        ({'joints': []}, 'leader.joints'),
        ({'joints': [{'joint': 'elbow'}]}, 'leader.joints[0].joint'),
        ({'joints': [{'joint': 'elbow_flex'}] * 2}, 'leader.joints[1].joint'),
        (
            {'joints': [{'joint': 'elbow_flex'}, {'joint': 'gripper', 'name': 'elbow_flex'}]},
            'leader.joints[1].name',
        ),
        ({'joints': [{'joint': 'elbow_flex', 'unit': 'mm'}]}, 'leader.joints[0].unit'),
        ({'joints': [{'joint': 'elbow_flex', 'zero': 1.0}]}, 'leader.joints[0].one'),
        ({'joints': [{'joint': 'elbow_flex', 'zero': 1.0, 'one': 1.0}]}, 'leader.joints[0].one'),
        ({'joints': [{'joint': 'elbow_flex', 'zero': 0.0, 'one': 1.0}]}, 'leader.joints[0].zero'),
        ({'mode': 'relative'}, 'leader.mode'),
        ({'engage': 'voice'}, 'leader.engage'),
        ({'engage': 'button'}, 'leader.button'),
        ({'button': {'topic': 'joy'}}, 'leader.button'),
        ({'engage': 'button', 'button': {'topic': 'leader/joint_states'}}, 'leader.button.topic'),
        ({'timeout_s': 0.0}, 'leader.timeout_s'),
        ({'timeout_s': 30.0}, 'leader.timeout_s'),
    ],
)
def test_a_leader_that_cannot_be_is_refused_by_its_field(tmp_path, changes, field):
    with pytest.raises(RobotError) as refused:
        robot_of(tmp_path, leader={**LEADER, **changes})
    assert refused.value.field == field


def test_numbers_of_a_leader_are_read_by_name_in_the_robots_units(tmp_path):
    joints = [dict(joint) for joint in TABLETOP['joints']]
    joints[5] |= {'zero': 0.0, 'one': 0.8}
    led = [
        {'joint': 'elbow_flex', 'name': 'elbow', 'unit': 'deg'},
        {'joint': 'gripper', 'name': 'trigger', 'zero': 100.0, 'one': 0.0},
    ]
    robot = robot_of(tmp_path, joints=joints, leader={**LEADER, 'joints': led})
    assert robot.leader is not None
    positions = LeaderPositions(robot, robot.leader.joints)
    read = positions.read(['trigger', 'other', 'elbow'], [25.0, 9.0, 90.0])
    assert np.allclose(read, [np.pi / 2.0, 0.6])


@pytest.mark.parametrize(
    ('names', 'numbers'),
    [
        (['trigger'], [1.0]),
        (['elbow_flex', 'elbow_flex'], [1.0, 2.0]),
        (['elbow_flex', 'gripper'], [1.0]),
        ([], []),
    ],
)
def test_a_message_without_a_joint_or_a_number_for_each_name_gives_nothing(
    tmp_path, names, numbers
):
    robot = robot_of(tmp_path, leader=LEADER)
    assert robot.leader is not None
    assert len(LeaderPositions(robot, robot.leader.joints).read(names, numbers)) == 0
