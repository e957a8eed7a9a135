"""A draft of a robot file loads, guesses little, and marks every guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_runtime.robot.draft import (
    MARK,
    SeenCamera,
    SeenJoints,
    SeenOutput,
    Survey,
    write_draft,
)
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.limits import urdf_limits
from vla_runtime.robot.schema import Robot

URDF = """<robot name="arm">
  <link name="a"/><link name="b"/><link name="c"/><link name="d"/>
  <joint name="shoulder" type="revolute"><parent link="a"/><child link="b"/>
    <limit lower="-1.5" upper="1.5" velocity="0.3" effort="1"/></joint>
  <joint name="slide" type="prismatic"><parent link="b"/><child link="c"/>
    <limit lower="0" upper="0.4" velocity="2" effort="1"/></joint>
  <joint name="roll" type="continuous"><parent link="c"/><child link="d"/></joint>
</robot>"""
POSITIONS = {'shoulder': 0.25, 'slide': 0.125, 'roll': 2.0, 'finger_joint': 0.01}
STILL = SeenJoints('joint_states', POSITIONS, {name: (at, at) for name, at in POSITIONS.items()})
ARM = SeenOutput('joint_trajectory', 'arm/joint_trajectory', ('roll', 'shoulder', 'slide'))


def drafted(folder: Path, survey: Survey, name: str = 'my_arm') -> tuple[Robot, str]:
    urdf = 'my_arm.urdf' if survey.urdf else ''
    text = write_draft(name, survey, urdf, 'a test')
    (folder / 'my_arm.yaml').write_text(text)
    if survey.urdf:
        (folder / urdf).write_text(survey.urdf)
    return load_robot(folder / 'my_arm.yaml'), text


def test_without_a_urdf_a_joint_moves_a_little_around_where_it_stood(tmp_path: Path) -> None:
    robot, text = drafted(tmp_path, Survey((STILL,)))
    for joint in robot.joints:
        assert joint.lower is not None and joint.upper is not None
        assert joint.lower < POSITIONS[joint.name] < joint.upper
        assert joint.upper - joint.lower <= 0.21
    assert [joint.name for joint in robot.joints if joint.grips] == ['finger_joint']
    # No output was seen, and one is needed.
    assert robot.outputs[0].joints == tuple(POSITIONS)
    numbers = [line for line in text.splitlines() if line.startswith('    ') and '.' in line]
    assert numbers and all(MARK in line for line in numbers)


def test_a_urdf_gives_units_and_limits_and_says_who_turns_for_ever(tmp_path: Path) -> None:
    robot, text = drafted(tmp_path, Survey((STILL,), outputs=(ARM,), urdf=URDF))
    joints = {joint.name: joint for joint in robot.joints}
    assert joints['slide'].unit == 'm' and joints['shoulder'].unit == 'rad'
    assert joints['shoulder'].lower is None and urdf_limits(robot)['shoulder'].lower == -1.5
    # Slower than the URDF allows, and never faster.
    assert joints['shoulder'].velocity == 0.3 and joints['slide'].velocity == 0.5
    assert joints['roll'].continuous
    # In the controller's order.
    assert robot.outputs[0].joints == ARM.joints
    assert 'finger_joint' in text.partition('no output takes')[2]


@pytest.mark.parametrize('urdf', [None, URDF])
def test_what_a_hand_showed_narrows_the_limits(tmp_path: Path, urdf: str | None) -> None:
    moved = SeenJoints('joint_states', POSITIONS, {**STILL.spans, 'shoulder': (-0.5, 9.0)})
    robot, _ = drafted(tmp_path, Survey((moved,), urdf=urdf))
    assert robot.joints[0].lower == -0.5
    assert robot.joints[0].upper == (1.5 if urdf else 9.0)


def test_two_topics_each_name_their_joints_and_a_gripper_has_its_own_output(
    tmp_path: Path,
) -> None:
    arm = SeenJoints('joint_states', {'shoulder': 0.0, 'elbow': 1.0}, {})
    gripper = SeenJoints('gripper/joint_states', {'gripper': 0.5}, {}, stamped=False)
    outputs = (
        SeenOutput('joint_trajectory', 'arm_controller/joint_trajectory'),
        SeenOutput('float64_multi_array', 'gripper_controller/commands', interface='velocity'),
        SeenOutput('joint_trajectory', 'other/joint_trajectory', ('wheel',)),
    )
    robot, text = drafted(tmp_path, Survey((arm, gripper), outputs=outputs))
    assert [source.joints for source in robot.joint_states] == [('shoulder', 'elbow'), ('gripper',)]
    assert [source.stamp for source in robot.joint_states] == ['header', 'receive']
    assert [output.joints for output in robot.outputs] == [('shoulder', 'elbow'), ('gripper',)]
    # Where velocities command it, no position holds an object.
    assert robot.outputs[1].interface == 'velocity' and not robot.joints[2].grips
    assert 'other/joint_trajectory' in text


def test_cameras_are_called_as_their_topics_and_have_what_came(tmp_path: Path) -> None:
    cameras = (
        SeenCamera('wrist/color/image_raw', 'raw', 640, 480, '8UC3', 29.9, stamped=False),
        SeenCamera('camera/image/compressed', 'compressed', rate_hz=15.2),
        SeenCamera('top/image_raw', 'raw'),
    )
    robot, _ = drafted(tmp_path, Survey((STILL,), cameras), name='7')
    wrist, other, top = robot.cameras
    assert (wrist.name, wrist.width, wrist.encoding, wrist.rate_hz) == ('wrist', 640, 'bgr8', 30.0)
    assert wrist.stamp == 'receive'
    assert (other.name, other.rate_hz) == ('camera', 15.0)
    assert (top.name, top.rate_hz) == ('top', None)
    # A name that YAML would take for a number.
    assert robot.name == '7'


def test_a_robot_of_which_no_joint_was_seen_is_refused() -> None:
    with pytest.raises(ValueError, match='joint states'):
        write_draft('arm', Survey(()), '', 'a test')
