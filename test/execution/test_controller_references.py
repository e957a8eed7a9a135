"""Where controllers say that they hold the robot: what a start and a stopped robot make of it."""

from __future__ import annotations

import numpy as np
from stopping_rig import moving, rig_of

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
