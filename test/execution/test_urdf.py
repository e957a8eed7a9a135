"""The robot file's limits within those of the URDF."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.urdf import read_urdf_limits, tighten_with_urdf

URDF = """<?xml version="1.0"?>
<robot name="arm">
  <link name="base"/>
  <joint name="shoulder" type="revolute">
    <limit lower="-1.5" upper="1.5" effort="10" velocity="2.0"/>
  </joint>
  <joint name="wrist" type="continuous"><limit effort="1" velocity="4.0"/></joint>
  <joint name="elbow" type="revolute">
    <limit lower="-2.0" upper="2.0" effort="10" velocity="3.0"/>
    <safety_controller soft_lower_limit="-1.8" soft_upper_limit="1.9" k_velocity="1"/>
  </joint>
  <joint name="free" type="continuous"/>
  <joint name="slide" type="prismatic"><limit upper="0.2" effort="1" velocity="0.1"/></joint>
  <joint name="camera" type="fixed"/>
</robot>"""

LIMIT_FIELDS = ('lower', 'upper', 'velocity')


def test_when_urdf_is_read_expect_limits_of_movable_joints_only() -> None:
    limits = read_urdf_limits(URDF)
    assert sorted(limits) == ['elbow', 'free', 'shoulder', 'slide', 'wrist']
    assert limits['shoulder'] == ColumnLimits(lower=-1.5, upper=1.5, velocity=2.0)
    assert limits['wrist'] == ColumnLimits(velocity=4.0)
    assert limits['free'] == ColumnLimits()
    assert limits['slide'] == ColumnLimits(lower=0.0, upper=0.2, velocity=0.1)


def test_when_urdf_has_soft_limits_expect_the_tighter_ones() -> None:
    elbow = read_urdf_limits(URDF)['elbow']
    assert (elbow.lower, elbow.upper) == (-1.8, 1.9)


def test_when_robot_file_is_tighter_expect_its_own_limits() -> None:
    mine = make_limits(['shoulder'], {'shoulder': ColumnLimits(-1.0, 1.2, 1.0, 5.0)})
    limits = tighten_with_urdf(mine, URDF)
    assert (limits.lower[0], limits.upper[0], limits.velocity[0]) == (-1.0, 1.2, 1.0)
    assert limits.acceleration[0] == 5.0


def test_when_robot_file_leaves_limits_out_expect_those_of_the_urdf() -> None:
    limits = tighten_with_urdf(make_limits(['shoulder', 'wrist']), URDF)
    assert limits.lower.tolist() == [-1.5, -np.inf]
    assert limits.upper.tolist() == [1.5, np.inf]
    assert limits.velocity.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ('mine', 'words'),
    [
        (ColumnLimits(lower=-1.6), r'lower -1.6 allows more than the URDF.s -1.5'),
        (ColumnLimits(upper=1.7), r'upper 1.7'),
        (ColumnLimits(velocity=2.5), r'velocity 2.5'),
    ],
)
def test_when_robot_file_is_looser_expect_error_with_both_numbers(
    mine: ColumnLimits, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tighten_with_urdf(make_limits(['shoulder'], {'shoulder': mine}), URDF)


def test_when_a_joint_has_another_name_in_the_urdf_expect_it_mapped() -> None:
    limits = tighten_with_urdf(make_limits(['j1', 'x']), URDF, {'j1': 'shoulder'})
    assert limits.upper.tolist() == [1.5, np.inf]


def test_when_a_joint_is_missing_from_the_urdf_expect_error_naming_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"no movable joint 'gripper'.*shoulder"):
        tighten_with_urdf(make_limits(['gripper']), URDF)


def test_when_a_mapped_column_is_unknown_expect_error() -> None:
    with pytest.raises(ValueError, match="'j9' is not commanded"):
        tighten_with_urdf(make_limits(['j1']), URDF, {'j9': 'shoulder'})


@pytest.mark.parametrize(
    ('urdf', 'words'),
    [
        ('', 'URDF: is empty; expected XML'),
        ('<robot', 'not valid XML'),
        (f'<{"x" * 5000}/>', r'\(5000 characters\), expected <robot>'),
        (f'<robot><joint name="{"x" * 5000}" type="revolute"/></robot>', r"'x{30}' … .*<limit>"),
        ('<sdf/>', 'expected <robot>'),
        ('<robot><joint name="a" type="revolute"/></robot>', 'has no <limit>'),
        (
            '<robot><joint name="a" type="revolute"><limit lower="x"/></joint></robot>',
            'is not a number',
        ),
    ],
)
def test_when_urdf_is_broken_expect_error_saying_where(urdf: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_urdf_limits(urdf)


@pytest.mark.parametrize('field', ['lower', 'upper', 'velocity'])
@pytest.mark.parametrize('value', ['nan', 'inf', '-inf', '1e999'])
def test_when_a_limit_is_not_finite_expect_error_naming_joint_and_field(
    field: str, value: str
) -> None:
    limit = ' '.join(f'{name}="{value if name == field else 1}"' for name in LIMIT_FIELDS)
    urdf = f'<robot><joint name="a" type="revolute"><limit {limit}/></joint></robot>'
    with pytest.raises(ValueError, match=rf"joint 'a' <limit {field}='{value}'> is not finite"):
        read_urdf_limits(urdf)
