"""A whole chunk against the limits: rejected, clamped or left alone."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.execution.columns import Column, CommandColumns, write_alike
from vla_runtime.execution.limits import ColumnLimits, LimitActions, Limits, check_rows, make_limits

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
def test_when_limit_is_violated_and_rejects_expect_refusal_with_the_numbers(
    arm: dict[str, float], rows: np.ndarray, kind: str, words: str
) -> None:
    check = check_rows(rows, 0.1, limits_of(ALL_REJECT, **arm), COLUMNS)
    assert check.rejected.startswith(f"{kind} of 'arm'")
    assert words in check.rejected
    assert not check.clamped


@pytest.mark.parametrize(('arm', 'rows', 'kind', 'words'), CASES[:3])
def test_when_limit_is_violated_and_clamps_expect_positions_inside_and_words(
    arm: dict[str, float], rows: np.ndarray, kind: str, words: str
) -> None:
    limits = limits_of(LimitActions(), **arm)
    before = rows.copy()
    check = check_rows(rows, 0.1, limits, COLUMNS)
    assert not check.rejected and kind in check.clamped and words in check.clamped
    assert (check.rows <= limits.upper).all() and (check.rows >= limits.lower).all()
    assert (rows == before).all()


@pytest.mark.parametrize(('arm', 'rows', 'kind', 'words'), CASES)
def test_when_limits_are_wide_enough_expect_rows_untouched(
    arm: dict[str, float], rows: np.ndarray, kind: str, words: str
) -> None:
    wide = {name: 2.0 * value for name, value in arm.items()}
    check = check_rows(rows, 0.1, limits_of(ALL_REJECT, **wide), COLUMNS)
    assert not check.rejected and not check.clamped and check.rows is rows


def test_when_a_row_lies_exactly_on_the_limit_expect_it_accepted() -> None:
    check = check_rows(rows_of(1.0, 1.0), 0.1, limits_of(ALL_REJECT, upper=1.0), COLUMNS)
    assert not check.rejected


def test_when_one_kind_rejects_and_another_clamps_expect_rejection() -> None:
    actions = LimitActions(position='clamp', velocity='reject')
    check = check_rows(rows_of(0, 5), 0.1, limits_of(actions, upper=1.0, velocity=1.0), COLUMNS)
    assert 'velocity' in check.rejected


def test_when_outside_the_workspace_box_expect_rejection_by_default() -> None:
    limits = make_limits(COLUMNS.names, workspace={'arm': (0.0, 0.5)})
    assert 'workspace' in check_rows(rows_of(0.2, 0.6), 0.1, limits, COLUMNS).rejected


def test_when_the_workspace_clamps_expect_rows_inside_the_box() -> None:
    limits = make_limits(
        COLUMNS.names, workspace={'arm': (0.0, 0.5)}, actions=LimitActions(workspace='clamp')
    )
    assert check_rows(rows_of(0.2, 0.6), 0.1, limits, COLUMNS).rows[1, 0] == 0.5


def test_when_a_velocity_column_is_too_fast_expect_its_value_compared_with_the_limit() -> None:
    limits = make_limits(COLUMNS.names, {'wheel': ColumnLimits(velocity=1.0)}, actions=ALL_REJECT)
    rows = np.array([[0.0, 0.9], [0.0, -1.1]])
    assert "velocity of 'wheel' in row 1: 1.1" in check_rows(rows, 0.1, limits, COLUMNS).rejected


def test_when_a_velocity_column_changes_too_fast_expect_acceleration_named() -> None:
    limits = make_limits(
        COLUMNS.names, {'wheel': ColumnLimits(acceleration=5.0)}, actions=ALL_REJECT
    )
    rows = np.array([[0.0, 0.0], [0.0, 0.6]])
    assert "acceleration of 'wheel'" in check_rows(rows, 0.1, limits, COLUMNS).rejected


def test_when_a_velocity_column_has_position_limits_expect_its_values_not_taken_for_positions() -> (
    None
):
    limits = make_limits(COLUMNS.names, {'wheel': ColumnLimits(-0.1, 0.1)}, actions=ALL_REJECT)
    assert not check_rows(np.array([[0.0, 3.0]]), 0.1, limits, COLUMNS).rejected


@pytest.mark.parametrize(
    ('bad', 'words'),
    [
        ({'lower': 1.0, 'upper': 1.0}, 'lower must be smaller than upper'),
        ({'lower': float('nan')}, 'lower'),
        ({'velocity': 0.0}, 'velocity must be larger than 0'),
        ({'acceleration': -1.0}, 'acceleration must be larger'),
        ({'step_from_measured': float('nan')}, 'step_from_measured'),
    ],
)
def test_when_a_limit_makes_no_sense_expect_error_naming_column_and_field(
    bad: dict[str, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        limits_of(**bad)
    assert "'arm'" in str(raised.value)


def test_when_a_limit_is_for_an_unknown_column_expect_error_naming_it() -> None:
    with pytest.raises(ValueError, match='elbow'):
        make_limits(COLUMNS.names, {'elbow': ColumnLimits()})


def test_when_the_box_lies_outside_the_limits_expect_error() -> None:
    with pytest.raises(ValueError, match='no room'):
        make_limits(COLUMNS.names, {'arm': ColumnLimits(-1, 1)}, workspace={'arm': (2.0, 3.0)})


def test_when_the_action_is_unknown_expect_error_naming_the_kind() -> None:
    with pytest.raises(ValueError, match=r'on_violation\.velocity'):
        LimitActions(velocity='shrug')  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ('columns', 'words'),
    [
        ([], 'none given'),
        ([Column('a'), Column('a')], 'more than once'),
        ([Column('a', kind='torque')], 'torque'),  # type: ignore[arg-type]
        ([Column('a', scale=0.0)], 'scale'),
    ],
)
def test_when_columns_make_no_sense_expect_error(columns: list[Column], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CommandColumns(columns)


def test_when_acceleration_clamps_expect_the_chunk_left_to_the_motion_limiter() -> None:
    rows = rows_of(0.0, 0.1, 0.3)
    check = check_rows(rows, 0.1, limits_of(acceleration=1.0), COLUMNS)
    assert not check.rejected and not check.clamped and check.rows is rows


def test_when_angles_wrap_expect_the_short_way_and_the_nearest_turn() -> None:
    columns = CommandColumns([Column('a', continuous=True), Column('b')])
    rows = np.array([[3.0, 3.0], [-3.1, -3.1], [-2.9, -2.9]])
    result = write_alike(rows, columns, np.array([-3.2, 0.0]), at_row=1)
    turn = 2.0 * np.pi
    assert result[:, 0] == pytest.approx([3.0 - turn, -3.1, -2.9])
    assert (result[:, 1] == rows[:, 1]).all()


def test_when_quaternions_change_sign_expect_the_writing_near_the_reference() -> None:
    columns = CommandColumns([Column('x'), *(Column(name, quaternion='tool') for name in 'ijkw')])
    turning = np.array([[0.0, np.cos(a), np.sin(a), 0.0, 0.1] for a in (0.1, 0.2, 0.3, 0.4)])
    rows = turning * np.array([1.0, -1.0, 1.0, 1.0])[:, None]
    for sign in (1.0, -1.0):
        result = write_alike(rows, columns, sign * turning[2], at_row=2)
        assert result == pytest.approx(sign * turning)


def test_when_a_quaternion_lacks_a_column_expect_error_naming_those_it_has() -> None:
    with pytest.raises(ValueError, match="'tool'"):
        CommandColumns([Column('i', quaternion='tool'), Column('j', quaternion='tool')])


def test_when_a_position_scatters_around_its_limit_expect_it_clamped_and_not_counted() -> None:
    rows = rows_of(0.0, -0.015, 0.01)
    check = check_rows(rows, 0.1, limits_of(lower=0.0, upper=0.8), COLUMNS)
    assert check.clamped == '' and check.rejected == ''
    assert check.rows.min() >= 0.0
    farther = check_rows(rows_of(0.0, -0.02), 0.1, limits_of(lower=0.0, upper=0.8), COLUMNS)
    assert "position of 'arm' in row 1: -0.02" in farther.clamped
    strict = check_rows(rows, 0.1, limits_of(ALL_REJECT, lower=0.0, upper=0.8), COLUMNS)
    assert 'position' in strict.rejected


def test_braking_takes_the_longest_of_speed_over_acceleration_where_both_are_limited() -> None:
    columns = {
        'slow': ColumnLimits(velocity=1.0, acceleration=0.25),
        'quick': ColumnLimits(velocity=2.0, acceleration=20.0),
        'free': ColumnLimits(acceleration=0.1),
        'jumpy': ColumnLimits(velocity=5.0),
    }
    assert make_limits(tuple(columns), columns).braking_s == 4.0
    assert make_limits(('free',), {'free': columns['free']}).braking_s == 0.0
