"""Executed rows of a chunk at any control rate, and the report of them."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import STEP_NS, Rig, chunk_of, holding

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.watchdog import WatchdogParameters

SWITCH = HandoverParameters(mode='switch')
RAMP = [0.01 * (row + 1) for row in range(20)]


def executor_parameters(**changes: object) -> ExecutorParameters:
    values: dict[str, object] = {'replan_interval': 5, 'handover': SWITCH}
    return holding(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize('rate_hz', [25, 30, 50, 77, 100, 200, 500])
def test_when_control_rate_differs_expect_the_same_rows_at_the_same_times(rate_hz: int) -> None:
    rig = Rig(executor_parameters(replan_interval=8), period_ns=round(1e9 / rate_hz)).started()
    begun_ns = rig.ros_ns
    assert rig.submit(RAMP).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert [row for _, _, row in rig.executed()] == list(range(8))
    assert rig.command.setpoints == pytest.approx([RAMP[7]] * 2, abs=1e-12)
    for tick in rig.ticks:
        if tick.command.kind is CommandKind.TRACK:
            steps = min((tick.ros_ns - begun_ns) / STEP_NS, 8.0)
            assert tick.position == pytest.approx(0.01 * steps, abs=0.004)


def test_when_control_rate_is_slower_than_the_steps_expect_no_row_lost_to_the_count() -> None:
    patient = WatchdogParameters(tick_timeout_s=0.3, max_state_age_s=0.5)
    rig = Rig(executor_parameters(replan_interval=8), period_ns=100_000_000, watchdog=patient)
    rig.started().submit(RAMP)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.executor.counters.steps == 8


def test_when_cubic_expect_velocity_continuous_and_zero_at_the_end() -> None:
    rig = Rig(executor_parameters(), period_ns=2_000_000).started()
    rig.submit(np.sin(np.arange(20) * 0.4) * 0.1)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    tracked = [tick.command for tick in rig.ticks if tick.command.kind is CommandKind.TRACK]
    velocity = np.array([command.velocities[0] for command in tracked])
    positions = np.array([command.setpoints[0] for command in tracked])
    assert np.abs(np.diff(velocity, prepend=0.0)).max() < 0.25
    assert velocity[-1] == pytest.approx(0.0)
    # The velocity is the derivative of the position.
    middle = (velocity[1:] + velocity[:-1]) / 2
    assert np.diff(positions)[:-1] / 0.002 == pytest.approx(middle[:-1], abs=0.02)


def test_when_linear_expect_straight_lines() -> None:
    rig = Rig(executor_parameters(interpolation='linear'), period_ns=10_000_000).started()
    rig.submit([0.04, 0.0, 0.04, 0.0, 0.04])
    rig.tick(8)
    found = [tick.position for tick in rig.ticks[-8:]]
    assert found == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.03, 0.02, 0.01, 0.0])
    assert rig.ticks[-3].command.velocities[0] == pytest.approx(-1.0)


def test_when_no_time_passes_between_ticks_expect_the_same_command() -> None:
    rig = Rig(executor_parameters()).started()
    rig.submit(RAMP)
    rig.tick(5)
    before = rig.command
    again = rig.tick_now()
    assert (again.setpoints == before.setpoints).all()
    assert (again.velocities == before.velocities).all()
    assert again.kind is CommandKind.TRACK and again.step == before.step


def test_when_tracking_expect_step_chunk_and_row_reported() -> None:
    rig = Rig(executor_parameters()).started()
    rig.submit(RAMP, number=7)
    rig.tick(6)
    assert (rig.command.step, rig.command.chunk, rig.command.row) == (1, 7, 1)
    status = rig.executor.status()
    assert (status.step, status.chunk, status.pending_chunk) == (1, 7, -1)
    rig.executor.stop()
    assert rig.tick().step == -1


def test_when_columns_come_in_another_order_expect_them_mapped_by_name() -> None:
    rig = Rig(executor_parameters()).started()
    rows = np.array([[0.05, 0.01]] * 6)
    assert rig.submit(chunk_of(rows, ('b', 'a'))).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.command.setpoints == pytest.approx([0.01, 0.05])


def test_when_velocity_column_expect_its_rows_commanded_and_zero_at_the_end() -> None:
    columns = (Column('a'), Column('w', kind='velocity'))
    rig = Rig(executor_parameters(replan_interval=4), columns).started()
    rig.submit(np.array([[0.01, 0.5]] * 6))
    rig.tick(10)
    assert rig.command.setpoints[1] == pytest.approx(0.5)
    rig.run_until(lambda command: command.step == -1)
    assert rig.command.setpoints == pytest.approx([0.01, 0.0])


def test_when_plan_is_asked_for_expect_rows_still_to_come_and_time_of_the_first() -> None:
    rig = Rig(executor_parameters()).started()
    rig.submit(RAMP)
    rig.tick(10)  # 2.5 steps
    plan = rig.executor.committed_plan(rig.ros_ns)
    assert plan.step == rig.executor.status().step == 2
    assert plan.rows[:, 0] == pytest.approx(RAMP[2:])
    assert plan.stamp_ns == rig.ros_ns - STEP_NS // 2
    assert plan.certain == 3 and plan.names == ('a', 'b')


def test_when_past_steps_are_asked_for_expect_them_in_front() -> None:
    rig = Rig(executor_parameters()).started()
    rig.submit(RAMP)
    rig.tick(13)
    plan = rig.executor.committed_plan(rig.ros_ns, past_steps=2)
    assert (plan.step, rig.executor.status().step) == (1, 3)
    assert plan.rows[:, 0] == pytest.approx(RAMP[1:])
    plan = rig.executor.committed_plan(rig.ros_ns, past_steps=50)
    assert (plan.step, rig.executor.status().step) == (0, 3)


def test_when_holding_expect_an_empty_plan() -> None:
    rig = Rig(executor_parameters()).started()
    plan = rig.executor.committed_plan(rig.ros_ns)
    assert plan.rows.shape == (0, 2) and plan.certain == 0


def test_when_policy_follows_the_plan_expect_its_rows_to_lie_on_the_same_steps() -> None:
    """Real-time chunking rests on it: the plan's row for an observation is the chunk's row 0."""
    rig = Rig(executor_parameters(handover=HandoverParameters(mode='rtc'))).started()
    rig.submit(RAMP)
    rig.tick(9)
    plan = rig.executor.committed_plan(rig.ros_ns, past_steps=10)
    observed_ns = rig.ros_ns - 30_000_000
    at = (observed_ns - plan.stamp_ns) // STEP_NS
    result = rig.submit(plan.rows[at : at + 12], observation_ns=observed_ns)
    assert result.accepted
    rig.tick(20)
    assert rig.executor.handovers[-1].position_jump == pytest.approx([0.0, 0.0], abs=1e-12)


def test_when_a_continuous_joint_crosses_half_a_turn_expect_the_short_way() -> None:
    columns = (Column('a', continuous=True), Column('b'))
    rig = Rig(executor_parameters(), columns)
    rig.measured[:] = [3.1, 0.0]
    rig.started()
    rows = np.array([[3.12, 0.0], [-3.12, 0.0], [-3.1, 0.0], [-3.1, 0.0], [-3.1, 0.0]])
    assert rig.submit(rows).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.command.setpoints[0] == pytest.approx(2 * np.pi - 3.1)
    rig.robot_follows = False
    rig.measured[0] = -3.1
    assert rig.tick().reason is Reason.STARVED
