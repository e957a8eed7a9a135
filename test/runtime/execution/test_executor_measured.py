"""Measured positions that stop the robot, and where its controllers say that they hold it."""

import math

import numpy as np
import pytest
from execution_rig import RAMP, SWITCH, TWO, Rig, assert_held, holding, moving, rig_of

from vla_runtime.execution.command import ChunkRefusal, CommandKind, Reason
from vla_runtime.execution.handover import HandoverParameters
from vla_runtime.execution.limits import ColumnLimits, LimitActions, make_limits
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.execution.state import OTHER_CLOCK, UNSTAMPED
from vla_runtime.execution.watchdog import WatchdogParameters


def test_when_joint_states_stop_expect_hold_within_the_period_that_makes_them_stale():
    rig = moving(watchdog=WatchdogParameters(max_state_age_s=0.1))
    rig.state_arrives = False
    rig.tick(10)
    assert rig.command.kind is CommandKind.TRACK
    rig.tick()
    assert_held(rig, Reason.STATE_STALE)
    assert "'a' and 'b'" in rig.executor.detail and '0.110 s' in rig.executor.detail
    assert not rig.executor.wants_chunk
    assert rig.submit(RAMP).refusal is ChunkRefusal.HOLDING


def test_when_the_stamps_of_joint_states_stand_still_expect_hold_until_they_go_on():
    rig = moving(watchdog=WatchdogParameters(max_state_age_s=0.1))
    rig.state_arrives = False
    place, stamp_ns = list(rig.measured), rig.ros_ns
    for _ in range(12):
        rig.executor.observe_state(['a', 'b'], place, stamp_ns)
        rig.tick()
    assert_held(rig, Reason.STATE_STALE)
    rig.state_arrives = True
    rig.tick()
    assert rig.reason != 'state_stale'


def test_when_joint_states_have_no_stamp_expect_that_said_and_no_age_of_decades():
    rig = rig_of()
    rig.executor.observe_state(['a', 'b'], [0.0, 0.0], 0)
    rig.tick(measure=False)
    result = rig.start()
    assert not result.started
    assert f"'a' and 'b': {UNSTAMPED}" in result.text
    assert ' s old' not in result.text


@pytest.mark.parametrize('away_s', [-1e9, -4000.0, 4000.0, 1e9])
def test_when_joint_states_are_of_another_clock_expect_that_said(away_s):
    rig = rig_of()
    rig.tick(2)
    rig.executor.observe_state(['a', 'b'], [0.0, 0.0], rig.ros_ns)
    now_ns = rig.ros_ns - round(away_s * 1e9)
    text = rig.executor.start(rig.now_s, now_ns).text
    assert text.endswith(f'; {OTHER_CLOCK}')
    near = rig.executor.start(rig.now_s, rig.ros_ns + 3_000_000_000_000).text
    assert '3000.000 s old' in near and OTHER_CLOCK not in near


def test_when_joint_states_return_expect_a_new_chunk_asked_for_and_executed():
    rig = moving()
    rig.state_arrives = False
    rig.run_until(lambda command: command.reason is Reason.STATE_STALE)
    rig.state_arrives = True
    rig.tick()
    assert_held(rig, Reason.WAITING_FOR_CHUNK)
    assert rig.executor.wants_chunk
    assert rig.submit([rig.ticks[-1].position] * 30).accepted
    assert rig.tick().kind is CommandKind.TRACK


def test_when_a_fault_comes_while_a_chunk_waits_expect_a_new_one_asked_for_after_it():
    rig = rig_of().started()
    assert rig.poll() is not None
    assert rig.submit(RAMP).accepted
    rig.now_s += 1.0
    rig.ros_ns += 1_000_000_000
    rig.tick()
    assert_held(rig, Reason.TICK_LATE)
    rig.tick()
    assert rig.executor.wants_chunk
    assert rig.executor.counters.dropped == 1


def test_when_a_fault_comes_while_an_answer_is_awaited_expect_to_ask_again_after_it():
    rig = rig_of().started()
    assert rig.poll() is not None
    rig.state_arrives = False
    rig.run_until(lambda command: command.reason is Reason.STATE_STALE)
    rig.state_arrives = True
    rig.tick()
    assert rig.executor.wants_chunk


def test_when_a_fault_stopped_an_ensemble_expect_older_chunks_forgotten():
    parameters = holding(replan_interval=4, handover=HandoverParameters('ensemble'))
    rig = Rig(parameters).started()
    rig.submit([0.1] * 30)
    rig.tick(8)
    rig.state_arrives = False
    rig.run_until(lambda command: command.reason is Reason.STATE_STALE)
    rig.state_arrives = True
    rig.tick()
    rig.submit([0.05] * 30)
    rig.run_until(lambda command: command.reason is Reason.STARVED)
    assert rig.command.setpoints == pytest.approx([0.05, 0.05])


def test_when_one_joint_is_renamed_expect_hold_naming_it():
    rig = moving()
    for _ in range(25):
        rig.tick(measure=False)
        rig.executor.observe_state(['a', 'B'], list(rig.measured), rig.ros_ns)
    assert rig.reason == 'state_stale'
    assert "'b'" in rig.executor.detail


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_when_measured_position_is_not_a_number_expect_hold_naming_the_joint(value):
    rig = moving()
    rig.robot_follows = False
    rig.measured[1] = value
    rig.tick()
    assert_held(rig, Reason.STATE_NOT_FINITE)
    assert "'b'" in rig.executor.detail


def observe(rig: Rig, name: str, position: float, ahead_s: float = 0.0) -> None:
    rig.executor.observe_state([name], [position], rig.ros_ns + round(ahead_s * 1e9))


@pytest.mark.parametrize(('ahead_s', 'said'), [(0.5, '0.49'), (10.0, '9.99')])
def test_when_one_of_two_sources_is_ahead_expect_hold_naming_it(ahead_s, said):
    rig = moving()
    observe(rig, 'a', 0.0)
    observe(rig, 'b', 0.0, ahead_s)
    rig.tick(measure=False)
    assert_held(rig, Reason.STATE_FROM_FUTURE)
    assert f"'b' is stamped {said}" in rig.executor.detail
    assert 'use_sim_time' in rig.executor.detail


def test_when_a_source_was_ahead_and_its_clock_is_mended_expect_its_messages_taken():
    rig = moving()
    observe(rig, 'b', 0.0, ahead_s=30.0)
    rig.tick(measure=False)
    for tick in range(3):
        observe(rig, 'a', 0.0)
        observe(rig, 'b', 0.01 * tick)
        rig.tick(measure=False)
    assert rig.executor._guard.state.positions.tolist() == [0.0, 0.02]
    assert rig.reason != 'state_from_future'


def test_when_measured_position_jumps_expect_hold_until_started_again():
    rig = moving(watchdog=WatchdogParameters(max_tracking_error=0.3))
    rig.robot_follows = False
    rig.measured[1] = 0.8
    rig.tick()
    assert_held(rig, Reason.TRACKING_ERROR)
    assert "'b' is at 0.8" in rig.executor.detail
    rig.measured[1] = rig.command.setpoints[1]
    rig.tick(10)
    assert rig.reason == 'tracking_error' and "'b'" in rig.executor.detail
    assert rig.submit(RAMP).refusal is ChunkRefusal.NOT_RUNNING
    assert rig.start().started
    rig.tick()
    assert_held(rig, Reason.WAITING_FOR_CHUNK)


def test_when_robot_is_blocked_expect_hold_once_the_error_is_too_large():
    rig = moving(watchdog=WatchdogParameters(max_tracking_error=0.05))
    rig.robot_follows = False
    rig.run_until(lambda command: command.reason is Reason.TRACKING_ERROR)
    assert_held(rig, Reason.TRACKING_ERROR)
    assert np.abs(rig.command.setpoints - rig.measured).max() < 0.05 + 0.0026


def test_when_plan_leads_too_far_from_measured_and_rejects_expect_hold():
    limits = make_limits(
        TWO,
        {'a': ColumnLimits(step_from_measured=0.02)},
        actions=LimitActions(step_from_measured='reject'),
    )
    rig = rig_of(limits=limits).started()
    rig.submit(RAMP)
    rig.robot_follows = False
    rig.run_until(lambda command: command.reason is Reason.STEP_FROM_MEASURED)
    assert_held(rig, Reason.STEP_FROM_MEASURED)
    assert rig.command.setpoints[0] <= 0.02


def test_when_a_joint_is_named_twice_expect_hold_that_names_it():
    rig = moving(watchdog=WatchdogParameters(max_state_age_s=0.1))
    rig.state_arrives = False
    for _ in range(11):
        rig.executor.observe_state(['a', 'b', 'a'], [*rig.measured, 2.0], rig.ros_ns)
        rig.tick()
    assert_held(rig, Reason.STATE_STALE)
    assert "the message names 'a' twice" in rig.executor.detail


# --- Where controllers say that they hold the robot: what a start and a stopped robot make of it

RESTS_TICKS = 120


def test_a_start_sets_out_from_where_the_controller_holds_an_arm_that_sags():
    rig = rig_of().started()
    rig.executor.stop()
    rig.tick(RESTS_TICKS)
    held = rig.command.setpoints.copy()
    rig.robot_follows = False
    rig.measured = held - 0.03
    rig.tick(RESTS_TICKS)
    rig.executor.note_references(held)
    assert rig.start().started
    # Without the reference it would begin 0.03 rad below, and the arm would drop by as much again.
    assert (rig.tick().setpoints == held).all()


@pytest.mark.parametrize(
    ('references', 'first'), [([0.21, 0.31], [0.21, 0.31]), ([1.2, np.nan], [0.2, 0.3])]
)
def test_a_first_start_sets_out_from_where_a_controller_near_it_holds_the_arm(references, first):
    rig = rig_of()
    rig.measured = np.array([0.2, 0.3])
    rig.tick(2)
    rig.executor.note_references(np.array(references))
    assert rig.start().started
    assert np.allclose(rig.tick().setpoints, first, rtol=0.0, atol=1e-9)


def test_nothing_is_sent_into_the_motion_that_another_node_commands_while_stopped():
    rig = moving()
    rig.executor.stop()
    rig.tick(RESTS_TICKS)
    assert rig.command.settled
    rig.robot_follows = False
    reference = rig.command.setpoints.copy()
    # A goal of 0.3 rad, whose end the arm rests at for longer than a hold takes to follow.
    for _ in range(60):
        reference = reference + 0.005
        rig.measured = reference - 0.002
        rig.executor.note_references(reference)
        assert rig.tick().settled
    for _ in range(RESTS_TICKS):
        assert rig.tick().settled
    # The command went along, unsent.
    assert np.allclose(rig.command.setpoints, rig.measured)
    assert rig.start().started
    assert np.allclose(rig.tick().setpoints, reference, atol=0.01)


def test_a_stopped_arm_that_a_person_moves_is_still_held_where_it_is_put():
    """Its controller holds the old command: only a new one keeps it from swinging back."""
    rig = moving()
    rig.executor.stop()
    rig.tick(RESTS_TICKS)
    held = rig.command.setpoints.copy()
    rig.executor.note_references(held)
    rig.robot_follows = False
    for _ in range(60):
        rig.measured = rig.measured + 0.005
        rig.tick()
    sent = []
    for _ in range(RESTS_TICKS):
        command = rig.tick()
        if not command.settled:
            sent.append(command.setpoints.copy())
    assert sent and np.allclose(sent[-1], rig.measured)


def switched_off(rig: Rig, *columns: bool) -> None:
    """The controllers of these columns are off: the robot no longer follows, the executor stops."""
    rig.robot_follows = False
    rig.executor.note_unsent(np.array(columns))
    rig.executor.stop(Reason.CONTROLLER)


def test_the_command_of_columns_that_nobody_is_sent_goes_where_the_robot_is_held():
    rig = moving()
    switched_off(rig, True, False)
    rig.measured = rig.command.setpoints - [0.2, 0.0]
    rig.tick(RESTS_TICKS)
    assert rig.command.setpoints[0] == pytest.approx(rig.measured[0])
    assert rig.executor.unsent_placed
    # Its controller is on again and holds it a little higher than it hangs.
    rig.executor.note_references(np.array([rig.measured[0] + 0.02, np.nan]))
    assert rig.tick().setpoints[0] == pytest.approx(rig.measured[0] + 0.02)
    # The other column is commanded as ever.
    assert rig.command.setpoints[1] == rig.measured[1]


def test_a_robot_that_is_not_measured_is_nowhere_for_what_nobody_is_sent():
    rig = moving()
    switched_off(rig, True, True)
    rig.state_arrives = False
    rig.tick(RESTS_TICKS)
    assert not rig.executor.unsent_placed
    rig.state_arrives = True
    rig.tick(RESTS_TICKS)
    assert rig.executor.unsent_placed


@pytest.mark.parametrize('holds_something', [True, False])
def test_a_gripper_whose_controller_was_off_keeps_what_it_holds_and_jumps_nowhere(holds_something):
    limits = make_limits(
        TWO, {'a': ColumnLimits(), 'b': ColumnLimits(-1.0, 9.0, 1.0, np.inf, np.inf, np.inf)}
    )
    rig = Rig(ExecutorParameters(replan_interval=20, handover=SWITCH), limits=limits).started()
    assert rig.submit(RAMP).accepted
    rig.tick(30)
    rig.robot_follows = not holds_something
    rig.tick(70)
    switched_off(rig, False, True)
    # It did not take the newest commands any more.
    rig.measured[1] -= 0.02
    rig.tick(10)
    command, measured = rig.command.setpoints[1], rig.measured[1]
    rig.tick(RESTS_TICKS)
    assert rig.command.setpoints[1] == pytest.approx(command if holds_something else measured)
