"""Each joint of the shipped robots is blocked in turn, through the real file and its match."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lagging_arm import LaggingArm
from shipped_robots import FILES

from vla_runtime.execution.command import Command, Reason
from vla_runtime.robot.file import Robot, load_robot


class BlockedArm(LaggingArm):
    """A robot with a joint that something stops on its way.

    Args:
        robot: of a robot file.
        joint: joint that the policy moves.
        way: distance after which it is blocked.
    """

    def __init__(self, robot: Robot, joint: str, way: float) -> None:
        super().__init__(robot, joints=[joint], smoothing_s=0.045, share=0.5)
        self.at = self.names.index(joint)
        self.blocked_at = self.positions[self.at] + way

    def _drive(self, command: np.ndarray, dt_s: float) -> None:
        super()._drive(command, dt_s)
        self.driven[self.at] = min(self.driven[self.at], self.blocked_at)
        self.positions = self.driven - self.sag

    def _answer(self, place: np.ndarray, request: int | None) -> None:
        """Plan from where the robot is, as a real policy does."""
        super()._answer(self.positions.copy(), request)

    def push(self, seconds: float) -> Command:
        """Let the policy go on for so long, or until the robot is stopped."""
        self.start()
        self.goal = self.places[1]
        self.run(seconds)
        assert self.command is not None
        return self.command


def grips(*, wanted: bool) -> list:
    """Every joint of every shipped robot that may, or may not, hold an object."""
    return [
        pytest.param(file, joint.name, id=f'{file.stem}-{joint.name}')
        for file in FILES
        for joint in load_robot(file).joints
        # The tabletop's gripper has no `grips`: max_step is its whole range.
        if joint.grips is wanted and (file.stem, joint.name) != ('tabletop', 'gripper')
    ]


@pytest.mark.parametrize(('file', 'joint'), grips(wanted=False))
def test_a_blocked_joint_stops_every_shipped_robot(file: Path, joint: str) -> None:
    robot = load_robot(file)
    arm = BlockedArm(robot, joint, way=0.05)
    assert arm.push(10.0).reason is Reason.TRACKING_ERROR
    assert f"'{joint}' is blocked" in arm.executor.detail
    for _ in range(100):
        arm.tick()
    assert arm.command is not None
    near = 0.05 * robot.joint(joint).max_step
    assert abs(arm.command.setpoints[arm.at] - arm.positions[arm.at]) <= near * (1 + 1e-6)


@pytest.mark.parametrize(('file', 'joint'), grips(wanted=True))
def test_a_gripper_that_holds_an_object_stops_no_shipped_robot(file: Path, joint: str) -> None:
    robot = load_robot(file)
    span = robot.joint(joint).upper - robot.joint(joint).lower
    arm = BlockedArm(robot, joint, way=0.1 * span)
    assert arm.push(5.0).reason is not Reason.TRACKING_ERROR, arm.executor.detail
