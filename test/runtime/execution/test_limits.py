"""Limits: a whole chunk against them, and the robot file's within those of the URDF."""

import numpy as np
import pytest

from vla_runtime.execution.columns import Column, CommandColumns, write_alike
from vla_runtime.execution.limits import ColumnLimits, LimitActions, Limits, check_rows, make_limits
from vla_runtime.execution.urdf import UrdfJoint, read_urdf_limits
from vla_runtime.execution.urdf import tighten_with_urdf as tighten

COLUMNS = CommandColumns([Column('arm'), Column('wheel', kind='velocity')])
ALL_REJECT = LimitActions('reject', 'reject', 'reject', 'reject', 'reject')


def limits_of(actions: LimitActions | None = None, **arm: float) -> Limits:
    return make_limits(COLUMNS.names, {'arm': ColumnLimits(**arm)}, actions=actions)


def rows_of(*arm: float) -> np.ndarray:
    return np.stack([np.array(arm), np.zeros(len(arm))], axis=1)


CASES = [
    ({'upper': 1.0}, rows_of(0.0, 0.5, 1.4), 'position', 'row 2: 1.4, allowed -inf to 1'),
    ({'lower': -1.0}, rows_of(-1.2, -0.5), 'position', 'row 0: -1.2'),
    ({'velocity': 2.0}, rows_of(0.0, 0.1, 0.5), 'velocity', 'row 2: 4 a second, allowed 2'),
    ({'acceleration': 9.0}, rows_of(0.0, 0.1, 0.3), 'acceleration', 'row 2: 10 a second²'),
]


@pytest.mark.parametrize(('arm', 'rows', 'kind', 'words'), CASES)
def test_when_limit_is_violated_and_rejects_expect_refusal_with_the_numbers(arm, rows, kind, words):
    check = check_rows(rows, 0.1, limits_of(ALL_REJECT, **arm), COLUMNS)
    assert check.rejected.startswith(f"{kind} of 'arm'")
    assert words in check.rejected
    assert not check.clamped


@pytest.mark.parametrize(('arm', 'rows', 'kind', 'words'), CASES[:3])
def test_when_limit_is_violated_and_clamps_expect_positions_inside_and_words(
    arm, rows, kind, words
):
    limits = limits_of(LimitActions(), **arm)
    before = rows.copy()
    check = check_rows(rows, 0.1, limits, COLUMNS)
    assert not check.rejected and kind in check.clamped and words in check.clamped
    assert (check.rows <= limits.upper).all() and (check.rows >= limits.lower).all()
    assert (rows == before).all()


@pytest.mark.parametrize(('arm', 'rows', 'kind', 'words'), CASES)
def test_when_limits_are_wide_enough_expect_rows_untouched(arm, rows, kind, words):
    wide = {name: 2.0 * value for name, value in arm.items()}
    check = check_rows(rows, 0.1, limits_of(ALL_REJECT, **wide), COLUMNS)
    assert not check.rejected and not check.clamped and check.rows is rows


def test_when_a_row_lies_exactly_on_the_limit_expect_it_accepted():
    check = check_rows(rows_of(1.0, 1.0), 0.1, limits_of(ALL_REJECT, upper=1.0), COLUMNS)
    assert not check.rejected


def test_when_one_kind_rejects_and_another_clamps_expect_rejection():
    actions = LimitActions(position='clamp', velocity='reject')
    check = check_rows(rows_of(0, 5), 0.1, limits_of(actions, upper=1.0, velocity=1.0), COLUMNS)
    assert 'velocity' in check.rejected


def test_when_outside_the_workspace_box_expect_rejection_by_default():
    limits = make_limits(COLUMNS.names, workspace={'arm': (0.0, 0.5)})
    assert 'workspace' in check_rows(rows_of(0.2, 0.6), 0.1, limits, COLUMNS).rejected


def test_when_the_workspace_clamps_expect_rows_inside_the_box():
    limits = make_limits(
        COLUMNS.names, workspace={'arm': (0.0, 0.5)}, actions=LimitActions(workspace='clamp')
    )
    assert check_rows(rows_of(0.2, 0.6), 0.1, limits, COLUMNS).rows[1, 0] == 0.5


def test_when_a_velocity_column_is_too_fast_expect_its_value_compared_with_the_limit():
    limits = make_limits(COLUMNS.names, {'wheel': ColumnLimits(velocity=1.0)}, actions=ALL_REJECT)
    rows = np.array([[0.0, 0.9], [0.0, -1.1]])
    assert "velocity of 'wheel' in row 1: 1.1" in check_rows(rows, 0.1, limits, COLUMNS).rejected


def test_when_a_velocity_column_changes_too_fast_expect_acceleration_named():
    limits = make_limits(
        COLUMNS.names, {'wheel': ColumnLimits(acceleration=5.0)}, actions=ALL_REJECT
    )
    rows = np.array([[0.0, 0.0], [0.0, 0.6]])
    assert "acceleration of 'wheel'" in check_rows(rows, 0.1, limits, COLUMNS).rejected


def test_when_a_velocity_column_has_position_limits_expect_its_values_not_taken_for_positions():
    limits = make_limits(COLUMNS.names, {'wheel': ColumnLimits(-0.1, 0.1)}, actions=ALL_REJECT)
    assert not check_rows(np.array([[0.0, 3.0]]), 0.1, limits, COLUMNS).rejected


def test_when_acceleration_clamps_expect_the_chunk_left_to_the_motion_limiter():
    rows = rows_of(0.0, 0.1, 0.3)
    check = check_rows(rows, 0.1, limits_of(acceleration=1.0), COLUMNS)
    assert not check.rejected and not check.clamped and check.rows is rows


def test_columns_have_flags_labels_and_what_measures_them_in_the_order_of_the_command():
    columns = CommandColumns(
        [
            Column('lift', scale=2.0),
            Column('turn', continuous=True, measured_as='/pose'),
            Column('reach', feedback=False, measured_as='/pose'),
            *(Column(f'q{part}', quaternion='tool') for part in 'wxyz'),
            Column('wheel', 'velocity'),
        ]
    )
    assert columns.is_velocity.tolist() == [False] * 7 + [True] == (~columns.is_position).tolist()
    assert columns.has_feedback.tolist() == [True, True, False, *[True] * 5]
    assert columns.is_continuous.tolist() == [False, True, *[False] * 6]
    assert columns.in_rotation.tolist() == [False] * 3 + [True] * 4 + [False]
    assert [group.tolist() for group in columns.quaternions] == [[3, 4, 5, 6]]
    assert columns.labels == ('lift', 'turn', 'reach', *['tool.rotation'] * 4, 'wheel')
    assert columns.scale.tolist() == [2.0, *[1.0] * 7] and columns.count == 8
    assert columns.measured_by([0, 1, 2, 7]) == ['lift', '/pose', 'wheel']
    assert not any(array.flags.writeable for array in (columns.scale, *columns.quaternions))
    # A chunk may name them in another order; a rotation's distance is its angle.
    assert columns.order_of(columns.names[::-1]).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    start, end = np.zeros((2, 2, 8))
    start[:, 3], end[:, 3:5] = 1.0, [-np.cos(0.2), np.sin(0.2)]
    end[:, 0] = [3.0, -3.0]
    assert columns.distance(start, end) == pytest.approx(np.array([[3, 0, 0, *[0.4] * 4, 0]] * 2))


def test_when_angles_wrap_expect_the_short_way_and_the_nearest_turn():
    columns = CommandColumns([Column('a', continuous=True), Column('b')])
    rows = np.array([[3.0, 3.0], [-3.1, -3.1], [-2.9, -2.9]])
    result = write_alike(rows, columns, np.array([-3.2, 0.0]), at_row=1)
    turn = 2.0 * np.pi
    assert result[:, 0] == pytest.approx([3.0 - turn, -3.1, -2.9])
    assert (result[:, 1] == rows[:, 1]).all()


def test_when_quaternions_change_sign_expect_the_writing_near_the_reference():
    columns = CommandColumns([Column('x'), *(Column(name, quaternion='tool') for name in 'ijkw')])
    turning = np.array([[0.0, np.cos(a), np.sin(a), 0.0, 0.1] for a in (0.1, 0.2, 0.3, 0.4)])
    rows = turning * np.array([1.0, -1.0, 1.0, 1.0])[:, None]
    for sign in (1.0, -1.0):
        result = write_alike(rows, columns, sign * turning[2], at_row=2)
        assert result == pytest.approx(sign * turning)


def test_when_a_position_scatters_around_its_limit_expect_it_clamped_and_not_counted():
    rows = rows_of(0.0, -0.015, 0.01)
    check = check_rows(rows, 0.1, limits_of(lower=0.0, upper=0.8), COLUMNS)
    assert check.clamped == '' and check.rejected == ''
    assert check.rows.min() >= 0.0
    farther = check_rows(rows_of(0.0, -0.02), 0.1, limits_of(lower=0.0, upper=0.8), COLUMNS)
    assert "position of 'arm' in row 1: -0.02" in farther.clamped
    strict = check_rows(rows, 0.1, limits_of(ALL_REJECT, lower=0.0, upper=0.8), COLUMNS)
    assert 'position' in strict.rejected


def test_braking_takes_the_longest_of_speed_over_acceleration_where_both_are_limited():
    columns = {
        'slow': ColumnLimits(velocity=1.0, acceleration=0.25),
        'quick': ColumnLimits(velocity=2.0, acceleration=20.0),
        'free': ColumnLimits(acceleration=0.1),
        'jumpy': ColumnLimits(velocity=5.0),
    }
    assert make_limits(tuple(columns), columns).braking_s == 4.0
    assert make_limits(('free',), {'free': columns['free']}).braking_s == 0.0


# --- The robot file's limits within those of the URDF

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


def test_when_urdf_is_read_expect_limits_of_movable_joints_only():
    limits = read_urdf_limits(URDF)
    assert sorted(limits) == ['elbow', 'free', 'shoulder', 'slide', 'wrist']
    assert limits['shoulder'] == UrdfJoint('rad', ColumnLimits(-1.5, 1.5, 2.0))
    assert limits['wrist'] == UrdfJoint('rad', ColumnLimits(velocity=4.0))
    assert limits['free'] == UrdfJoint('rad', ColumnLimits())
    assert limits['slide'] == UrdfJoint('m', ColumnLimits(0.0, 0.2, 0.1))


def test_when_urdf_has_soft_limits_expect_the_tighter_ones():
    elbow = read_urdf_limits(URDF)['elbow'].limits
    assert (elbow.lower, elbow.upper) == (-1.8, 1.9)


def test_when_robot_file_is_tighter_expect_its_own_limits():
    mine = make_limits(['shoulder'], {'shoulder': ColumnLimits(-1.0, 1.2, 1.0, 5.0)})
    limits = tighten_with_urdf(mine)
    assert (limits.lower[0], limits.upper[0], limits.velocity[0]) == (-1.0, 1.2, 1.0)
    assert limits.acceleration[0] == 5.0


def test_when_robot_file_leaves_limits_out_expect_those_of_the_urdf():
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
def test_when_robot_file_is_looser_expect_error_with_both_numbers(mine, words):
    with pytest.raises(ValueError, match=words):
        tighten_with_urdf(make_limits(['shoulder'], {'shoulder': mine}))


def test_when_a_column_is_not_in_the_urdf_expect_its_own_limits():
    mine = {'shoulder': ColumnLimits(-1.0, 1.0, 1.0), 'x': ColumnLimits(-9.0, 9.0, 9.0)}
    limits = tighten_with_urdf(make_limits(['shoulder', 'x'], mine))
    assert (limits.upper.tolist(), limits.velocity.tolist()) == ([1.0, 9.0], [1.0, 9.0])


def test_when_the_robot_file_is_looser_by_a_rounding_expect_the_urdfs_limit():
    mine = {'shoulder': ColumnLimits(lower=-1.50005)}
    assert tighten_with_urdf(make_limits(['shoulder'], mine)).lower[0] == -1.5


def test_when_a_mapped_column_is_unknown_expect_error():
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
def test_when_urdf_is_broken_expect_error_saying_where(urdf, words):
    with pytest.raises(ValueError, match=words):
        read_urdf_limits(urdf)


@pytest.mark.parametrize('field', ['lower', 'upper', 'velocity'])
@pytest.mark.parametrize('value', ['nan', 'inf', '-inf', '1e999'])
def test_when_a_limit_is_not_finite_expect_error_naming_joint_and_field(field, value):
    limit = ' '.join(f'{name}="{value if name == field else 1}"' for name in LIMIT_FIELDS)
    urdf = f'<robot><joint name="a" type="revolute"><limit {limit}/></joint></robot>'
    with pytest.raises(ValueError, match=rf"joint 'a' <limit {field}='{value}'> is not finite"):
        read_urdf_limits(urdf)


def one_joint(inside: str, kind: str = 'revolute') -> UrdfJoint:
    urdf = f'<robot name="x"><joint name="a" type="{kind}">{inside}</joint></robot>'
    return read_urdf_limits(urdf)['a']


@pytest.mark.parametrize('kind', ['revolute', 'prismatic', 'continuous'])
@pytest.mark.parametrize('velocity', ['0', '0.0', '-0', '-1'])
def test_when_a_velocity_is_not_positive_expect_none(velocity, kind):
    joint = one_joint(f'<limit lower="-1" upper="1" velocity="{velocity}"/>', kind)
    assert joint.limits.velocity == np.inf
    assert 'velocity' in joint.why
    if kind != 'continuous':
        assert (joint.limits.lower, joint.limits.upper) == (-1.0, 1.0)


@pytest.mark.parametrize(
    'limit', ['lower="0" upper="0"', '', 'lower="0"', 'upper="0.0"', 'lower="1.5" upper="1.5"']
)
def test_when_there_is_no_way_between_the_bounds_expect_none(limit):
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
def test_when_soft_limits_leave_no_way_expect_the_hard_ones(soft, bounds):
    inside = f'<limit lower="-1.5" upper="1.5" velocity="2"/><safety_controller {soft}/>'
    limits = one_joint(inside).limits
    assert (limits.lower, limits.upper) == bounds


def test_when_bounds_are_the_wrong_way_round_expect_an_error():
    with pytest.raises(ValueError, match="'a'"):
        one_joint('<limit lower="1" upper="-1" velocity="2"/>')


def test_when_xacro_is_not_expanded_expect_the_error_to_say_so():
    with pytest.raises(ValueError, match='xacro'):
        one_joint('<limit lower="${-pi}" upper="${pi}" velocity="2"/>')
