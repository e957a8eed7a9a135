"""Executed rows of a chunk at any control rate and speed, and the report of them."""

import numpy as np
import pytest
from execution_rig import STEP_NS, SWITCH, Rig, chunk_of, holding

from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.watchdog import WatchdogParameters
from vla_runtime.types import ChunkHeader

ROWS = [0.01 * (row + 1) for row in range(20)]


def executor_parameters(**changes: object) -> ExecutorParameters:
    values: dict[str, object] = {'replan_interval': 5, 'handover': SWITCH}
    return holding(**{**values, **changes})


@pytest.mark.parametrize('rate_hz', [25, 30, 50, 77, 100, 200, 500])
def test_when_control_rate_differs_expect_the_same_rows_at_the_same_times(rate_hz):
    rig = Rig(executor_parameters(replan_interval=8), period_ns=round(1e9 / rate_hz)).started()
    begun_ns = rig.ros_ns
    assert rig.submit(ROWS).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert [row for _, _, row in rig.executed()] == list(range(8))
    assert rig.command.setpoints == pytest.approx([ROWS[7]] * 2, abs=1e-12)
    for tick in rig.ticks:
        if tick.command.kind is CommandKind.TRACK:
            steps = min((tick.ros_ns - begun_ns) / STEP_NS, 8.0)
            assert tick.position == pytest.approx(0.01 * steps, abs=0.004)


def test_when_control_rate_is_slower_than_the_steps_expect_no_row_lost_to_the_count():
    patient = WatchdogParameters(tick_timeout_s=0.3, max_state_age_s=0.5)
    rig = Rig(executor_parameters(replan_interval=8), period_ns=100_000_000, watchdog=patient)
    rig.started().submit(ROWS)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.executor.counters.steps == 8


def test_when_cubic_expect_velocity_continuous_and_zero_at_the_end():
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


def test_when_linear_expect_straight_lines():
    rig = Rig(executor_parameters(interpolation='linear'), period_ns=10_000_000).started()
    rig.submit([0.04, 0.0, 0.04, 0.0, 0.04])
    rig.tick(8)
    found = [tick.position for tick in rig.ticks[-8:]]
    assert found == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.03, 0.02, 0.01, 0.0])
    assert rig.ticks[-3].command.velocities[0] == pytest.approx(-1.0)


def test_when_no_time_passes_between_ticks_expect_the_same_command():
    rig = Rig(executor_parameters()).started()
    rig.submit(ROWS)
    rig.tick(5)
    before = rig.command
    again = rig.tick_now()
    assert (again.setpoints == before.setpoints).all()
    assert (again.velocities == before.velocities).all()
    assert again.kind is CommandKind.TRACK and again.step == before.step


def test_when_tracking_expect_step_chunk_and_row_reported():
    rig = Rig(executor_parameters()).started()
    rig.submit(ROWS, number=7)
    rig.tick(6)
    assert (rig.command.step, rig.command.chunk, rig.command.row) == (1, 7, 1)
    status = rig.executor.status()
    assert (status.step, status.chunk, status.pending_chunk) == (1, 7, -1)
    rig.executor.stop()
    assert rig.tick().step == -1


def test_when_columns_come_in_another_order_expect_them_mapped_by_name():
    rig = Rig(executor_parameters()).started()
    rows = np.array([[0.05, 0.01]] * 6)
    assert rig.submit(chunk_of(rows, ('b', 'a'))).accepted
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.command.setpoints == pytest.approx([0.01, 0.05])


def test_when_velocity_column_expect_its_rows_commanded_and_zero_at_the_end():
    columns = (Column('a'), Column('w', kind='velocity'))
    rig = Rig(executor_parameters(replan_interval=4), columns).started()
    rig.submit(np.array([[0.01, 0.5]] * 6))
    rig.tick(10)
    assert rig.command.setpoints[1] == pytest.approx(0.5)
    rig.run_until(lambda command: command.step == -1)
    assert rig.command.setpoints == pytest.approx([0.01, 0.0])


def test_when_plan_is_asked_for_expect_past_rows_as_wanted_and_those_still_to_come():
    rig = Rig(executor_parameters()).started()
    plan = rig.executor.committed_plan(rig.ros_ns)
    assert plan.rows.shape == (0, 2) and plan.certain == 0
    rig.submit(ROWS)
    rig.tick(10)  # 2.5 steps
    plan = rig.executor.committed_plan(rig.ros_ns)
    assert plan.step == rig.executor.status().step == 2
    assert plan.rows[:, 0] == pytest.approx(ROWS[2:])
    assert plan.stamp_ns == rig.ros_ns - STEP_NS // 2
    assert plan.certain == 3 and plan.names == ('a', 'b')
    for past, step in ((1, 1), (50, 0)):
        plan = rig.executor.committed_plan(rig.ros_ns, past_steps=past)
        assert (plan.step, rig.executor.status().step) == (step, 2)
        assert plan.rows[:, 0] == pytest.approx(ROWS[step:])


def test_when_policy_follows_the_plan_expect_its_rows_to_lie_on_the_same_steps():
    """Real-time chunking rests on it: the plan's row for an observation is the chunk's row 0."""
    rig = Rig(executor_parameters(handover=HandoverParameters(mode='rtc'))).started()
    rig.submit(ROWS)
    rig.tick(9)
    plan = rig.executor.committed_plan(rig.ros_ns, past_steps=10)
    observed_ns = rig.ros_ns - 30_000_000
    at = (observed_ns - plan.stamp_ns) // STEP_NS
    result = rig.submit(plan.rows[at : at + 12], observation_ns=observed_ns)
    assert result.accepted
    rig.tick(20)
    assert rig.executor.handovers[-1].position_jump == pytest.approx([0.0, 0.0], abs=1e-12)


# --- Plan time follows the speed scaling within the limits of acceleration

PERIOD_S, STEP_S, SPEED, ACCELERATION = 0.01, 0.05, 0.8, 8.0


class Ramp(Rig):
    """A robot on a ramp of `SPEED`."""

    def __init__(self) -> None:
        limits = make_limits(('j',), {'j': ColumnLimits(-9.0, 9.0, 1.5, ACCELERATION, 0.5)})
        parameters, columns = ExecutorParameters(), (Column('j'),)
        super().__init__(parameters, columns, limits=limits, control_period_s=PERIOD_S)
        self.started()

    def run(self, seconds: float) -> np.ndarray:
        """Go on, each request answered; return the speed of every tick."""
        begin = len(self.ticks) - 1
        for _ in range(round(seconds / PERIOD_S)):
            self.tick()
            request = self.poll()
            if request is None:
                continue
            step = SPEED * STEP_S
            place = request.rows[0, 0] if len(request.rows) else self.ticks[-1].position + step
            rows = place + step * np.arange(30)
            self.number += 1
            header = ChunkHeader(self.ros_ns, 0, self.number, request=request.request)
            self.offer(chunk_of(rows, ('j',), step_time_s=STEP_S), header)
        return np.diff([tick.position for tick in self.ticks[begin:]]) / PERIOD_S


@pytest.mark.parametrize('factor', [0.7, 0.3, 0.05])
def test_a_plan_is_followed_at_the_share_of_its_speed(factor):
    robot = Ramp()
    assert robot.run(2.0)[-50:].mean() == pytest.approx(SPEED, rel=0.02)
    robot.executor.set_speed_scaling(factor)
    robot.run(0.5)
    assert robot.run(2.0).mean() == pytest.approx(factor * SPEED, rel=0.05)
    robot.executor.set_speed_scaling(1.0)
    robot.run(1.0)
    assert robot.run(1.0).mean() == pytest.approx(SPEED, rel=0.02)


def test_zero_holds_without_a_jump_and_goes_on_where_it_was():
    robot = Ramp()
    robot.run(2.0)
    robot.executor.set_speed_scaling(0.0)
    speeds = np.concatenate([robot.run(1.0), robot.run(30.0)])
    assert robot.executor.status().reason is Reason.SPEED_SCALED_TO_ZERO
    assert np.abs(np.diff(speeds) / PERIOD_S).max() <= ACCELERATION * 1.001
    assert speeds.min() > -1e-9 and not speeds[50:].any()
    at = robot.ticks[-1].position
    robot.executor.set_speed_scaling(1.0)
    speeds = robot.run(2.0)
    assert np.abs(np.diff(speeds) / PERIOD_S).max() <= ACCELERATION * 1.001
    assert speeds.min() > -1e-9 and speeds[-20:].mean() == pytest.approx(SPEED, rel=0.05)
    assert robot.ticks[-1].position > at + 1.0


def test_a_stop_is_not_scaled():
    robot = Ramp()
    robot.run(2.0)
    robot.executor.set_speed_scaling(0.3)
    robot.run(1.0)
    robot.executor.stop()
    assert not robot.run(0.5)[-30:].any()


@pytest.mark.parametrize('said', [float('nan'), -1.0])
def test_what_is_no_share_holds(said):
    robot = Ramp()
    robot.run(1.0)
    robot.executor.set_speed_scaling(said)
    robot.run(1.0)
    assert robot.executor.status().reason is Reason.SPEED_SCALED_TO_ZERO
