"""Where controllers say that they hold the robot: what a start and a stopped robot make of it."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import Rig
from stopping_rig import RAMP, SWITCH, TWO, moving, rig_of

from vla_runtime.execution.command import Reason
from vla_runtime.execution.limits import ColumnLimits, make_limits
from vla_runtime.execution.parameters import ExecutorParameters

RESTS_TICKS = 120


def test_a_start_sets_out_from_where_the_controller_holds_an_arm_that_sags() -> None:
    rig = rig_of().started()
    rig.executor.stop()
    rig.tick(RESTS_TICKS)
    held = rig.command.setpoints.copy()
    rig.robot_follows = False
    rig.measured = held - 0.03
    rig.tick(RESTS_TICKS)
    rig.executor.note_references(held)
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    # Without the reference it would begin 0.03 rad below, and the arm would drop by as much again.
    assert (rig.tick().setpoints == held).all()


def test_a_first_start_sets_out_from_where_the_controller_holds_the_arm() -> None:
    rig = rig_of()
    rig.measured = np.array([0.2, 0.3])
    rig.tick(2)
    rig.executor.note_references(rig.measured + 0.01)
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert np.allclose(rig.tick().setpoints, [0.21, 0.31], atol=1e-9)


def test_a_reference_far_from_the_robot_is_not_where_it_sets_out_from() -> None:
    rig = rig_of()
    rig.measured = np.array([0.2, 0.3])
    rig.tick(2)
    rig.executor.note_references(np.array([1.2, np.nan]))
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert rig.tick().setpoints.tolist() == [0.2, 0.3]


def test_nothing_is_sent_into_the_motion_that_another_node_commands_while_stopped() -> None:
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
    assert rig.executor.start(rig.now_s, rig.ros_ns).started
    assert np.allclose(rig.tick().setpoints, reference, atol=0.01)


def test_a_stopped_arm_that_a_person_moves_is_still_held_where_it_is_put() -> None:
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
