"""Each joint of the shipped robots is blocked in turn, through the real file and its match."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reported_states import report
from shipped_robots import FILES, matched

from vla_runtime.execution.command import Command, CommandKind, Reason
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.robot.file import Robot, load_robot
from vla_runtime.types import ActionChunk, ChunkHeader

PERIOD_NS = 10_000_000
STEP_S = 0.05
HORIZON = 16
RISE = 0.8  # of a chunk from where the robot is, in rad


class BlockedArm:
    """A robot whose joints follow with lag until something stops them; and its policy.

    The policy plans from where the robot is, as a real one does, always further the same way.

    Args:
        robot: of a robot file.
        joints: joints that the policy moves, from a tenth of their range to its end.
        way: distance after which they are blocked; infinite where they are not.
    """

    def __init__(self, robot: Robot, *joints: str, way: float = np.inf) -> None:
        match = matched(robot)
        self.executor = ChunkExecutor(
            ExecutorConfig(
                columns=match.columns,
                limits=match.limits,
                start=robot.start,
                on_stop=robot.on_stop,
                control_period_s=PERIOD_NS * 1e-9,
            ),
            ExecutorParameters(),
        )
        self.columns = self.executor.columns
        self.at = [self.columns.names.index(joint) for joint in joints]
        lower, upper = match.limits.lower, match.limits.upper
        # Exactly zero is what a driver says that has not heard from its robot.
        self.positions = 0.501 * upper + 0.499 * lower
        self.positions[self.at] = lower[self.at] + 0.1 * (upper[self.at] - lower[self.at])
        self.goal = upper[self.at]
        self.blocked_at = self.positions[self.at] + way
        self.now_s, self.ros_ns, self.number = 10.0, 10**18, 0

    def tick(self) -> Command:
        self.now_s += PERIOD_NS * 1e-9
        self.ros_ns += PERIOD_NS
        executor = self.executor
        executor.observe_state(self.columns.names, self.positions.tolist(), self.ros_ns)
        command = executor.tick(self.now_s, self.ros_ns)
        if command.kind is not CommandKind.IDLE:
            self.positions += 0.2 * (command.setpoints - self.positions)
            self.positions[self.at] = np.minimum(self.positions[self.at], self.blocked_at)
        request = executor.poll_request(self.now_s, self.ros_ns)
        if request is not None:
            self.answer(request.request)
        return command

    def answer(self, request: int) -> None:
        rows = np.tile(self.positions, (HORIZON, 1))
        rise = RISE * np.arange(1, HORIZON + 1)[:, None] / HORIZON
        rows[:, self.at] = np.minimum(rows[:, self.at] + rise, self.goal)
        chunk = ActionChunk(
            rows, self.columns.names, self.columns.kinds, STEP_S, np.zeros((HORIZON, 0), np.float32)
        )
        self.number += 1
        self.executor.submit_chunk(
            chunk,
            ChunkHeader(self.ros_ns, self.executor.episode, self.number, request=request),
            self.now_s,
            self.ros_ns,
        )

    def run(self, seconds: float) -> Command:
        """Tick until the robot is stopped, or for so long."""
        for _ in range(round(seconds * 1e9 / PERIOD_NS)):
            command = self.tick()
            if command.reason is Reason.TRACKING_ERROR:
                break
        return command

    def start(self) -> None:
        positions = self.positions.tolist()
        report(self.executor.observe_state, self.columns.names, positions, self.ros_ns)
        self.tick()
        self.tick()
        result = self.executor.start(self.now_s, self.ros_ns)
        assert result.started, result.text


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
    arm.start()
    assert arm.run(10.0).reason is Reason.TRACKING_ERROR
    assert f"'{joint}' is blocked" in arm.executor.detail
    for _ in range(100):
        command = arm.tick()
    near = 0.05 * robot.joint(joint).max_step
    assert np.abs(command.setpoints - arm.positions)[arm.at] <= near * (1 + 1e-6)


@pytest.mark.parametrize('file', FILES, ids=lambda file: file.stem)
def test_joints_that_follow_with_lag_stop_no_shipped_robot(file: Path) -> None:
    robot = load_robot(file)
    arm = BlockedArm(robot, *(joint.name for joint in robot.joints))
    arm.start()
    # The policy rises by 1 rad a second, and twice as long is enough for every robot.
    way = float(np.max(arm.goal - arm.positions[arm.at]))
    assert arm.run(max(8.0, 2.0 * way)).reason is not Reason.TRACKING_ERROR, arm.executor.detail
    assert arm.positions[arm.at] == pytest.approx(arm.goal, abs=0.05)


@pytest.mark.parametrize(('file', 'joint'), grips(wanted=True))
def test_a_gripper_that_holds_an_object_stops_no_shipped_robot(file: Path, joint: str) -> None:
    robot = load_robot(file)
    span = robot.joint(joint).upper - robot.joint(joint).lower
    arm = BlockedArm(robot, joint, way=0.1 * span)
    arm.start()
    assert arm.run(5.0).reason is not Reason.TRACKING_ERROR, arm.executor.detail
