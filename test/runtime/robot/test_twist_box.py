"""The workspace box of a twist: where its position is measured, and what is refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twist_robot import BOX, ROBOT, SPEC, TWIST

from vla_runtime.bundle.schema import StateSpec
from vla_runtime.robot.file import RobotError, load_robot
from vla_runtime.robot.match import MatchError, RobotMatch, match_robot


def matched(
    folder: Path, box: str = BOX, unit: str = 'm', kind: str = 'twist_stamped', **pose: object
) -> RobotMatch:
    path = folder / 'cart.yaml'
    path.write_text(ROBOT.replace('UNIT', unit).replace('BOX', box).replace('KIND', kind))
    spec = replace(SPEC, poses=(replace(TWIST, **pose),))
    return match_robot(load_robot(path), spec, 'bundle')


def test_joints_of_the_bundles_state_measure_the_position(tmp_path):
    match = matched(tmp_path, state_position=('px', 'py', 'pz'))
    (tool,) = match.tools
    assert tool.joints == ('px', 'py', 'pz') and tool.topic is None
    assert [match.observed_as(joint) for joint in tool.joints] == ['vx', 'vy', 'vz']
    assert match.limits.workspace_lower[:3] == pytest.approx([0.2, -0.4, 0.05])
    assert [column.feedback for column in match.columns] == [True] * 3 + [False] * 3


def test_a_topic_measures_the_position_along_the_bounded_axes(tmp_path):
    box = 'lower: [-1e9, -1e6, 0.05], upper: [1e9, 0.3, 1e9], topic: tcp_pose,'
    match = matched(tmp_path, box, state_position=('px', 'py', 'pz'))
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
        matched(tmp_path, unit=unit, **pose)
    assert field in str(caught.value) and "'tool'" in str(caught.value)
    # What mends it without a measurement.
    assert matched(tmp_path, '', unit, **pose).tools == ()


def test_a_box_without_bounds_needs_no_measurement(tmp_path):
    match = matched(tmp_path, 'lower: [-1e9, -1e9, -1e9], upper: [1e9, 1e9, 1e9],')
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
        matched(tmp_path, box, kind=kind)
    assert caught.value.field == field


def test_a_rail_that_is_called_as_an_action_is_not_taken_for_the_tool(tmp_path):
    path = tmp_path / 'cart.yaml'
    text = ROBOT.replace('UNIT', 'm').replace('KIND', 'twist_stamped')
    path.write_text(text.replace('BOX', f'{BOX} topic: tcp_pose,').replace('name: px', 'name: vx'))
    spec = replace(SPEC, state=(StateSpec('vx', 'm'),))
    match = match_robot(load_robot(path), spec, 'bundle')
    assert match.observed_as('vx') == ''
    assert match.state_joints == ('vx',)
