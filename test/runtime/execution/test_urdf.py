"""The robot file's limits within those of the URDF."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.limits import ColumnLimits, Limits, make_limits
from vla_runtime.execution.urdf import UrdfJoint, read_urdf_limits
from vla_runtime.execution.urdf import tighten_with_urdf as tighten

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


def tighten_with_urdf(limits: Limits) -> Limits:
    known = read_urdf_limits(URDF)
    return tighten(limits, {name: known[name].limits for name in limits.names if name in known})


def test_when_urdf_is_read_expect_limits_of_movable_joints_only() -> None:
    limits = read_urdf_limits(URDF)
    assert sorted(limits) == ['elbow', 'free', 'shoulder', 'slide', 'wrist']
    assert limits['shoulder'] == UrdfJoint('rad', ColumnLimits(-1.5, 1.5, 2.0))
    assert limits['wrist'] == UrdfJoint('rad', ColumnLimits(velocity=4.0))
    assert limits['free'] == UrdfJoint('rad', ColumnLimits())
    assert limits['slide'] == UrdfJoint('m', ColumnLimits(0.0, 0.2, 0.1))


def test_when_urdf_has_soft_limits_expect_the_tighter_ones() -> None:
    elbow = read_urdf_limits(URDF)['elbow'].limits
    assert (elbow.lower, elbow.upper) == (-1.8, 1.9)


def test_when_robot_file_is_tighter_expect_its_own_limits() -> None:
    mine = make_limits(['shoulder'], {'shoulder': ColumnLimits(-1.0, 1.2, 1.0, 5.0)})
    limits = tighten_with_urdf(mine)
    assert (limits.lower[0], limits.upper[0], limits.velocity[0]) == (-1.0, 1.2, 1.0)
    assert limits.acceleration[0] == 5.0


def test_when_robot_file_leaves_limits_out_expect_those_of_the_urdf() -> None:
    limits = tighten_with_urdf(make_limits(['shoulder', 'wrist']))
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
        tighten_with_urdf(make_limits(['shoulder'], {'shoulder': mine}))


def test_when_a_column_is_not_in_the_urdf_expect_its_own_limits() -> None:
    mine = {'shoulder': ColumnLimits(-1.0, 1.0, 1.0), 'x': ColumnLimits(-9.0, 9.0, 9.0)}
    limits = tighten_with_urdf(make_limits(['shoulder', 'x'], mine))
    assert (limits.upper.tolist(), limits.velocity.tolist()) == ([1.0, 9.0], [1.0, 9.0])


def test_when_the_robot_file_is_looser_by_a_rounding_expect_the_urdfs_limit() -> None:
    mine = {'shoulder': ColumnLimits(lower=-1.50005)}
    assert tighten_with_urdf(make_limits(['shoulder'], mine)).lower[0] == -1.5


def test_when_a_mapped_column_is_unknown_expect_error() -> None:
    with pytest.raises(ValueError, match="'j9'"):
        tighten(make_limits(['j1']), {'j9': ColumnLimits()})


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


def one_joint(inside: str, kind: str = 'revolute') -> UrdfJoint:
    urdf = f'<robot name="x"><joint name="a" type="{kind}">{inside}</joint></robot>'
    return read_urdf_limits(urdf)['a']


@pytest.mark.parametrize('kind', ['revolute', 'prismatic', 'continuous'])
@pytest.mark.parametrize('velocity', ['0', '0.0', '-0', '-1'])
def test_when_a_velocity_is_not_positive_expect_none(velocity: str, kind: str) -> None:
    joint = one_joint(f'<limit lower="-1" upper="1" velocity="{velocity}"/>', kind)
    assert joint.limits.velocity == np.inf
    assert 'velocity' in joint.why
    if kind != 'continuous':
        assert (joint.limits.lower, joint.limits.upper) == (-1.0, 1.0)


@pytest.mark.parametrize(
    'limit', ['lower="0" upper="0"', '', 'lower="0"', 'upper="0.0"', 'lower="1.5" upper="1.5"']
)
def test_when_there_is_no_way_between_the_bounds_expect_none(limit: str) -> None:
    joint = one_joint(f'<limit {limit} effort="0" velocity="2"/>')
    assert joint.limits == ColumnLimits(velocity=2.0)
    assert 'lower and upper' in joint.why


@pytest.mark.parametrize(
    ('soft', 'bounds'),
    [
        ('k_velocity="0"', (-1.5, 1.5)),
        ('k_position="0" k_velocity="0" soft_lower_limit="0" soft_upper_limit="0"', (-1.5, 1.5)),
        ('k_velocity="1" soft_lower_limit="2" soft_upper_limit="3"', (-1.5, 1.5)),
        ('k_velocity="1" soft_lower_limit="-1" soft_upper_limit="9"', (-1.0, 1.5)),
        ('k_velocity="1" soft_upper_limit="1"', (-1.5, 1.0)),
    ],
)
def test_when_soft_limits_leave_no_way_expect_the_hard_ones(
    soft: str, bounds: tuple[float, float]
) -> None:
    inside = f'<limit lower="-1.5" upper="1.5" velocity="2"/><safety_controller {soft}/>'
    limits = one_joint(inside).limits
    assert (limits.lower, limits.upper) == bounds


def test_when_bounds_are_the_wrong_way_round_expect_an_error() -> None:
    with pytest.raises(ValueError, match="'a'"):
        one_joint('<limit lower="1" upper="-1" velocity="2"/>')


def test_when_xacro_is_not_expanded_expect_the_error_to_say_so() -> None:
    with pytest.raises(ValueError, match='xacro'):
        one_joint('<limit lower="${-pi}" upper="${pi}" velocity="2"/>')
