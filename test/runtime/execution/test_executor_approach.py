"""Setting out: how near the first command has to be, and the way to where a plan begins."""

import numpy as np
import pytest
from execution_rig import SWITCH, TWO, Rig, alike, holding

from vla_runtime.execution.column_model import ColumnModel, StartParameters
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import ChunkRefusal, Command, CommandKind, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.watchdog import WatchdogParameters

PERIOD_S = 0.01


def rig_of(**config: object) -> Rig:
    return Rig(holding(replan_interval=20, handover=SWITCH), **config)


def speeds(rig: Rig) -> np.ndarray:
    """(ticks, columns) of all commands since the first that is more than idle."""
    given = [tick.command for tick in rig.ticks if tick.command.kind is not CommandKind.IDLE]
    return np.diff([command.setpoints for command in given], axis=0) / PERIOD_S


# ---------------------------------------------------------------- to the start of a plan


def test_when_chunk_starts_too_far_away_expect_refusal_with_the_distance():
    rig = rig_of(start=StartParameters(tolerance=0.1, on_too_far='refuse')).started()
    result = rig.submit([0.5] * 30)
    assert result.refusal is ChunkRefusal.START_TOO_FAR
    assert '0.5' in result.text and '0.1' in result.text
    assert rig.tick(5).kind is CommandKind.HOLD
    assert rig.command.setpoints.tolist() == [0.0, 0.0]


def test_when_the_arm_sags_below_its_command_expect_a_chunk_from_where_it_is_taken():
    rig = rig_of(start=StartParameters(tolerance=0.1, on_too_far='refuse')).started()
    rig.robot_follows = False
    rig.measured[:] = -0.12
    rig.tick(5)
    assert rig.submit([-0.2] * 30).refusal is None
    refused = rig_of(start=StartParameters(tolerance=0.1, on_too_far='refuse')).started()
    refused.robot_follows = False
    refused.measured[:] = -0.12
    refused.tick(5)
    text = refused.submit([-0.25] * 30).text
    assert 'the robot is at -0.12 and commanded to 0;' in text


def test_when_chunk_starts_too_far_away_expect_approach_at_the_set_speed_then_asking_anew():
    rig = rig_of(start=StartParameters(tolerance=0.1, approach_speed=0.5)).started()
    assert rig.executor.status().progress == ''
    row = np.array([[0.25, -0.5]] * 30)
    assert 'approaching' in rig.submit(row).text
    assert not rig.executor.wants_chunk
    rig.tick(50)
    assert rig.command.kind is CommandKind.APPROACH
    assert rig.command.setpoints == pytest.approx([0.125, -0.25])
    assert rig.command.velocities == pytest.approx([0.25, -0.5])
    assert rig.executor.status().progress == "'b' has 0.25 to go, to -0.5, for 0.5 s"
    assert rig.submit(row).refusal is ChunkRefusal.APPROACHING
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.command.setpoints == pytest.approx([0.25, -0.5])
    assert np.abs(speeds(rig)).max() <= 0.5 + 1e-9
    assert rig.executor.status().progress == '' and rig.executor.wants_chunk
    assert rig.submit(row).accepted


def test_a_start_is_judged_by_the_columns_range_unless_it_has_numbers_of_its_own():
    columns = CommandColumns((Column('arm'), Column('gripper'), Column('rail'), Column('turn')))
    limits = make_limits(
        columns.names,
        {
            'arm': ColumnLimits(lower=-1.5, upper=1.5, velocity=2.0),
            'gripper': ColumnLimits(lower=0.0, upper=0.036, velocity=0.2),
            'rail': ColumnLimits(
                lower=0.0, upper=1.0, velocity=1.0, start_tolerance=0.02, approach_speed=0.05
            ),
            'turn': ColumnLimits(velocity=0.1),
        },
    )
    model = ColumnModel(columns, limits, StartParameters(tolerance=0.2, approach_speed=0.3))
    assert model.tolerance == pytest.approx([0.2, 0.009, 0.02, 0.2])
    assert model.approach_speed == pytest.approx([0.3, 0.018, 0.05, 0.1])


def test_a_chunk_that_opens_a_closed_gripper_in_one_step_is_too_far_away():
    limits = make_limits(('a', 'grip'), {'grip': ColumnLimits(lower=0.0, upper=0.036)})
    rig = rig_of(
        columns=(Column('a'), Column('grip')),
        limits=limits,
        start=StartParameters(tolerance=0.2, on_too_far='refuse'),
    ).started()
    assert rig.submit(np.array([[0.0, 0.03]] * 30)).refusal is ChunkRefusal.START_TOO_FAR


def test_when_a_column_has_another_unit_expect_its_scale_in_the_tolerance():
    columns = (Column('a'), Column('grip', scale=100.0))
    rig = rig_of(
        columns=columns, start=StartParameters(tolerance=0.1, on_too_far='refuse')
    ).started()
    assert rig.submit(np.array([[0.0, 11.0]] * 30)).refusal is ChunkRefusal.START_TOO_FAR
    assert rig.submit(np.array([[0.0, 9.0]] * 30)).accepted


def test_when_the_velocity_limit_is_below_the_approach_speed_expect_the_limit():
    limits = make_limits(TWO, {'a': ColumnLimits(velocity=0.2)})
    rig = rig_of(limits=limits, start=StartParameters(tolerance=0.1, approach_speed=1.0)).started()
    rig.submit([0.5] * 30)
    rig.tick(20)
    assert rig.command.velocities == pytest.approx([0.2, 0.2])
    assert not rig.command.limited


@pytest.mark.parametrize('acceleration', [0.5, 5.0])
def test_when_arriving_expect_the_acceleration_limit_kept(acceleration):
    limit = ColumnLimits(velocity=2.0, acceleration=acceleration)
    limits = alike(TWO, limit)
    rig = rig_of(limits=limits, start=StartParameters(tolerance=0.1, approach_speed=0.5)).started()
    rig.submit([0.5] * 30)
    rig.tick()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.reason == 'waiting_for_chunk'
    assert np.abs(np.diff(speeds(rig), axis=0)).max() <= acceleration * PERIOD_S * (1 + 1e-6)
    assert rig.command.setpoints == pytest.approx([0.5, 0.5], abs=0.01)


# ---------------------------------------------------------------- against an obstacle


class _OneHeld(Rig):
    """A rig of which something holds the first joint; a robot that stands still is switched off."""

    held = False

    def tick_now(self) -> Command:
        at = float(self.measured[0])
        command = super().tick_now()
        if self.held:
            self.measured[0] = at
        return command


def blocked_rig(**start: object) -> _OneHeld:
    """On its way over 0.5 at 0.5 a second, and something holds a joint after a tenth of it."""
    limits = alike(TWO, ColumnLimits(step_from_measured=0.05))
    rig = _OneHeld(
        holding(replan_interval=20, handover=SWITCH),
        limits=limits,
        start=StartParameters(tolerance=0.1, approach_speed=0.5, **start),
        # Longer than any time-out here; `test_blocked_joints` has the usual one.
        watchdog=WatchdogParameters(blocked_after_s=60.0),
    ).started()
    rig.submit([0.5] * 30)
    rig.tick(10)
    assert rig.command.kind is CommandKind.APPROACH
    rig.held = True
    return rig


def test_when_no_joint_follows_an_approach_expect_a_stop_long_before_its_time_out():
    """Motors without power are no obstacle: the command must not go on without the robot."""
    rig = blocked_rig(approach_timeout_s=2.0)
    rig.robot_follows = False
    at = rig.measured.copy()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD, 50)
    assert rig.reason == 'tracking_error' and rig.executor.mode is Mode.STOPPED
    # At 0.5 a second for at most the 0.3 s in which a joint sets out.
    rig.tick(100)
    assert (
        np.abs(np.array([tick.command.setpoints for tick in rig.ticks]) - at).max() <= 0.05 + 1e-9
    )
    assert rig.command.setpoints == pytest.approx(at, abs=0.05 + 1e-9)


def test_when_the_approach_is_blocked_expect_a_hold_that_says_so_after_the_time_out():
    rig = blocked_rig(approach_timeout_s=2.0)
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    # A second for the way, and the two of the time-out.
    assert (len(rig.ticks) - 3) * PERIOD_S == pytest.approx(3.0, abs=0.03)
    assert rig.reason == 'approach_timeout'
    assert "'a'" in rig.executor.detail and 'approach_timeout_s' in rig.executor.detail
    assert rig.executor.mode is Mode.STOPPED
    assert np.abs(rig.command.setpoints - rig.measured).max() <= 0.05 + 1e-9
    assert not rig.executor.wants_chunk
    rig.tick(5)
    assert rig.reason == 'approach_timeout' and rig.command.kind is CommandKind.HOLD


def test_when_the_obstacle_goes_away_in_time_expect_the_approach_to_arrive():
    rig = blocked_rig(approach_timeout_s=2.0)
    rig.tick(200)
    assert rig.command.kind is CommandKind.APPROACH
    rig.held = False
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.reason == 'waiting_for_chunk'
    assert rig.command.setpoints == pytest.approx([0.5, 0.5], abs=0.001)


def test_when_started_again_after_the_time_out_expect_a_new_approach():
    rig = blocked_rig(approach_timeout_s=0.5)
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    rig.held = False
    assert rig.start().started
    rig.run_until(lambda command: command.reason is Reason.WAITING_FOR_CHUNK, 50)
    assert 'approach_timeout_s' not in rig.executor.detail
    assert 'approaching' in rig.submit([0.5] * 30).text


# ---------------------------------------------------------------- back inside the limits


def outside_rig(start: StartParameters, at: float = 1.05, **config: object) -> Rig:
    rig = rig_of(limits=make_limits(TWO, {'a': ColumnLimits(-1, 1, 2.0)}), start=start, **config)
    rig.measured[:] = [at, 0.0]
    rig.tick(2)
    return rig


@pytest.mark.parametrize('at', [1.15, -1.15])
def test_when_started_just_outside_a_limit_expect_the_way_back_at_the_set_speed(at):
    rig = outside_rig(StartParameters(approach_speed=0.5), at)
    assert rig.start().started
    assert 'outside' in rig.executor.detail
    # The first tick after a start only takes the time.
    rig.tick(2)
    assert rig.command.kind is CommandKind.APPROACH
    assert abs(rig.command.setpoints[0] - at) <= 0.5 * PERIOD_S + 1e-12
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.reason == 'waiting_for_chunk'
    assert rig.command.setpoints == pytest.approx([np.sign(at), 0.0])
    assert np.abs(speeds(rig)).max() <= 0.5 + 1e-9
    # Each command is nearer to the limits than the one before it.
    assert (np.diff(np.abs([tick.command.setpoints[0] for tick in rig.ticks[2:]])) <= 0.0).all()
    assert rig.submit(np.array([[np.sign(at) * 0.95, 0.0]] * 30)).accepted
    rig.tick(100)
    assert abs(rig.command.setpoints[0]) <= 1.0


@pytest.mark.parametrize(('at', 'on_too_far'), [(1.05, 'refuse'), (1.3, 'approach')])
def test_when_started_too_far_outside_a_limit_expect_refusal(at, on_too_far):
    rig = outside_rig(StartParameters(on_too_far=on_too_far), at)
    result = rig.start()
    assert not result.started and f"'a' is at {at}" in result.text and 'on_too_far' in result.text
    assert rig.tick().kind is CommandKind.IDLE


@pytest.mark.parametrize('on_too_far', ['refuse', 'approach'])
def test_when_started_outside_by_a_hair_expect_a_command_inside_at_once(on_too_far):
    rig = outside_rig(StartParameters(on_too_far=on_too_far), at=1.0 + 1e-4)
    assert rig.start().started
    assert rig.tick().setpoints.tolist() == [1.0, 0.0]


def test_when_stopped_on_the_way_back_inside_expect_hold_where_it_is():
    rig = outside_rig(StartParameters(approach_speed=0.5))
    rig.start()
    rig.tick(3)
    before = rig.command.setpoints.copy()
    held = rig.executor.stop_at_once()
    assert held.kind is CommandKind.HOLD and (held.setpoints == before).all()


@pytest.mark.parametrize('acceleration', [2.0, 20.0, np.inf])
@pytest.mark.parametrize('cause', ['joint states', 'reset', 'stop and start'])
def test_when_the_way_back_inside_is_interrupted_expect_the_rest_of_it_at_the_set_speed(
    cause, acceleration
):
    limits = make_limits(TWO, {'a': ColumnLimits(-1, 1, 2.0, acceleration)})
    rig = rig_of(limits=limits, start=StartParameters(approach_speed=0.5))
    rig.measured[:] = [1.15, 0.0]
    rig.started().tick(8)
    assert rig.command.kind is CommandKind.APPROACH
    if cause == 'reset':
        rig.executor.reset(1)
    elif cause == 'stop and start':
        rig.executor.stop()
        rig.tick()
        assert rig.start().started
    else:
        rig.state_arrives = False
        rig.run_until(lambda command: command.reason.value == 'state_stale')
        rig.state_arrives = True
    # A chunk that is near is not taken, whenever it comes: it would be followed at full speed.
    near, asked, ticks = np.array([[0.95, 0.0]] * 30), 0, 0
    while rig.command.setpoints[0] > 1.0:
        result = rig.submit(near, episode=rig.executor.episode)
        assert result.refusal in (ChunkRefusal.APPROACHING, ChunkRefusal.HOLDING), result.text
        asked += rig.poll() is not None
        rig.tick()
        ticks += 1
        assert ticks < 200, rig.executor.detail
    assert not asked and np.abs(speeds(rig)).max() <= 0.5 + 1e-9
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.command.setpoints == pytest.approx([1.0, 0.0]) and not rig.executor.detail
    assert rig.submit(near, episode=rig.executor.episode).accepted


def test_when_a_position_outside_is_unknown_expect_no_way_inside_without_it():
    columns = (Column('a'), Column('x', feedback=False))
    limits = make_limits(('a', 'x'), {'a': ColumnLimits(-1, 1), 'x': ColumnLimits(0.5, 1)})
    rig = rig_of(columns=columns, limits=limits).started()
    assert rig.tick(5).kind is CommandKind.IDLE


def test_when_an_unmeasured_column_was_never_commanded_expect_no_way_back_without_it():
    columns = (Column('a'), Column('x', feedback=False))
    rig = rig_of(columns=columns, limits=make_limits(('a', 'x'), {'a': ColumnLimits(-1, 1)}))
    rig.measured[:] = [1.05, 0.0]
    rig.tick(2)
    result = rig.start()
    assert not result.started and "nothing measures 'x'" in result.text
    assert rig.tick().kind is CommandKind.IDLE


def test_when_blocked_outside_a_limit_expect_the_time_out():
    watchdog = WatchdogParameters(max_tracking_error=0.5)
    start = StartParameters(approach_speed=0.5, approach_timeout_s=0.5)
    rig = rig_of(
        limits=make_limits(TWO, {'a': ColumnLimits(-1, 1, step_from_measured=0.01)}),
        start=start,
        watchdog=watchdog,
    )
    rig.robot_follows = False
    rig.measured[:] = [1.1, 0.0]
    rig.started()
    rig.run_until(lambda command: command.kind is CommandKind.HOLD)
    assert rig.reason == 'approach_timeout'
    assert 1.09 - 1e-9 <= rig.command.setpoints[0] <= 1.1


def test_when_the_time_runs_out_in_motion_expect_braking_within_the_acceleration():
    # A slow robot holds the command back by `step_from_measured`, and it still moves at the end.
    limits = make_limits(('a',), {'a': ColumnLimits(-3.0, 3.0, 1.0, 4.0, step_from_measured=0.05)})
    rig = Rig(
        holding(replan_interval=5),
        columns=(Column('a'),),
        limits=limits,
        start=StartParameters(tolerance=0.1, approach_speed=0.8, approach_timeout_s=0.5),
    ).started()
    rig.robot_follows = False
    rig.submit([1.5] * 20)
    velocities, at = [], 0.0
    for _ in range(400):
        rig.measured += np.clip(rig.command.setpoints - rig.measured, -0.004, 0.004)
        rig.tick()
        velocities.append((rig.command.setpoints[0] - at) / 0.01)
        at = float(rig.command.setpoints[0])
    assert rig.reason == 'approach_timeout'
    assert np.abs(np.diff(velocities, prepend=0.0)).max() / 0.01 <= 4.0 * (1 + 1e-6)
