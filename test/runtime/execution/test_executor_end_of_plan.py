"""A plan that ends without a successor: the robot comes to rest within its limits, then holds."""

import numpy as np
import pytest
from execution_rig import SWITCH, Rig, alike, holding
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import EXAMPLES

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.limits import ColumnLimits
from vla_runtime.execution.stopping import StopActions

ACCELERATION = 5.0
ENDS = (Reason.STARVED, Reason.SYNCHRONOUS_WAIT)
FAST = [0.03 * (row + 1) for row in range(20)]  # 0.75 a second


def rig_of(
    columns: tuple[Column, ...] = (Column('a'), Column('b')),
    acceleration: float = ACCELERATION,
    on_stop: StopActions = StopActions(),  # noqa: B008 - frozen
    **parameters: object,
) -> Rig:
    names = tuple(column.name for column in columns)
    limit = ColumnLimits(velocity=2.0, acceleration=acceleration)
    wanted = {'replan_interval': 5, 'handover': SWITCH, **parameters}
    return Rig(holding(**wanted), columns, limits=alike(names, limit), on_stop=on_stop).started()


def largest_change(rig: Rig) -> float:
    """The largest change of speed from tick to tick, as a share of what is allowed."""
    values = np.array([tick.command.setpoints for tick in rig.ticks])
    moves = np.array([kind == 'position' for kind in rig.kinds])
    dt_s = rig.period_ns * 1e-9
    speeds = np.where(moves, np.diff(values, axis=0, prepend=values[:1]) / dt_s, values)
    return float(np.abs(np.diff(speeds, axis=0)).max()) / (ACCELERATION * dt_s)


@pytest.mark.parametrize('interpolation', ['linear', 'cubic'])
@pytest.mark.parametrize('replan_mode', ['asynchronous', 'synchronous'])
def test_when_a_plan_ends_in_motion_expect_braking_within_the_acceleration_and_then_a_hold(
    replan_mode, interpolation
):
    rig = rig_of(replan_mode=replan_mode, interpolation=interpolation)
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason in ENDS)
    assert rig.command.kind is CommandKind.HOLD and (rig.command.velocities == 0.0).all()
    assert any(tick.command.reason is Reason.BRAKING for tick in rig.ticks)
    assert largest_change(rig) <= 1.0 + 1e-6
    held = rig.command.setpoints.copy()
    assert (rig.tick(10).setpoints == held).all()


def test_when_braking_expect_the_shortest_way_to_rest_the_limit_allows():
    rig = rig_of(interpolation='linear')
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason is Reason.BRAKING)
    speed = (rig.ticks[-2].position - rig.ticks[-3].position) / 0.01
    assert speed >= 0.75 - 1e-9
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    braking = [tick for tick in rig.ticks if tick.command.reason is Reason.BRAKING]
    # The last change of speed ends in the hold.
    assert len(braking) == round(speed / (ACCELERATION * 0.01)) - 1
    assert {tick.command.step for tick in braking} == {4}
    assert rig.executor.counters.starved_ticks == len(braking) + 1
    assert rig.executor.counters.steps == 5


def test_when_nothing_limits_the_acceleration_expect_the_hold_at_once():
    rig = rig_of(acceleration=np.inf, interpolation='linear')
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason in ENDS)
    assert not any(tick.command.reason is Reason.BRAKING for tick in rig.ticks)
    assert rig.command.setpoints == pytest.approx([0.15, 0.15])


def test_when_a_chunk_comes_while_braking_expect_it_taken_up_within_the_limit():
    rig = rig_of()
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason is Reason.BRAKING)
    assert rig.submit([float(rig.command.setpoints[0])] * 20).accepted
    assert rig.tick().kind is CommandKind.TRACK
    rig.tick(60)
    assert largest_change(rig) <= 1.0 + 1e-6


def test_when_a_fault_comes_while_braking_expect_it_to_go_on_to_rest():
    rig = rig_of()
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason is Reason.BRAKING)
    rig.robot_follows = False
    rig.measured[0] = np.nan
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 50)
    assert rig.reason == 'state_not_finite'
    assert largest_change(rig) <= 1.0 + 1e-6


def test_when_a_fault_to_freeze_on_comes_while_braking_expect_the_hold_at_once():
    rig = rig_of(on_stop=StopActions(state_not_finite='freeze'))
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason is Reason.BRAKING)
    before = rig.command.setpoints.copy()
    rig.robot_follows = False
    rig.measured[0] = np.nan
    rig.tick()
    assert rig.command.kind is CommandKind.HOLD and rig.reason == 'state_not_finite'
    assert (rig.command.setpoints == before).all()


def test_when_frozen_while_braking_expect_the_hold_at_once():
    rig = rig_of()
    rig.submit(FAST)
    rig.run_until(lambda command: command.reason is Reason.BRAKING)
    before = rig.command.setpoints.copy()
    held = rig.executor.stop_at_once()
    assert held.kind is CommandKind.HOLD and (held.setpoints == before).all()


def test_when_a_velocity_column_ends_in_motion_expect_it_ramped_to_zero():
    rig = rig_of((Column('a'), Column('wheel', kind='velocity')))
    rig.submit(np.array([[0.0, 0.9]] * 20))
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.command.setpoints[1] == 0.0
    assert largest_change(rig) <= 1.0 + 1e-6


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.floats(-0.06, 0.06), min_size=6, max_size=12),
    st.sampled_from(['linear', 'cubic']),
    st.integers(1, 5),
)
def test_when_any_plan_ends_expect_rest_within_the_acceleration_and_in_bounded_time(
    steps, interpolation, interval
):
    rig = rig_of(interpolation=interpolation, replan_interval=interval)
    rig.submit(list(np.cumsum(steps)))
    rig.run_until(lambda command: command.reason is Reason.STARVED, 200)
    assert largest_change(rig) <= 1.0 + 1e-6
    # No faster than the limit, so no longer than that takes to brake from.
    braking = sum(tick.command.reason is Reason.BRAKING for tick in rig.ticks)
    assert braking <= 2.0 / (ACCELERATION * 0.01) + 1
