"""A leader arm and a policy brought together: which columns it leads, and its numbers in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_runtime.execution.leader import LeaderParameters
from vla_runtime.robot.match import RobotMatch
from vla_runtime.robot.schema import LeaderJoint, Robot, leader_scaling


def led_joints(robot: Robot, match: RobotMatch) -> tuple[LeaderJoint, ...]:
    """Return the joints of the leader that this policy commands the positions of."""
    kinds = {column.name: column.kind for column in match.columns}
    joints = () if robot.leader is None else robot.leader.joints
    return tuple(item for item in joints if kinds.get(item.joint) == 'position')


def leader_parameters(robot: Robot, match: RobotMatch) -> LeaderParameters | None:
    """Return how the leader leads this policy's columns; None where it leads none of them."""
    leader, led = robot.leader, led_joints(robot, match)
    if leader is None or not led:
        return None
    columns = tuple(item.joint for item in led)
    return LeaderParameters(columns, leader.mode, leader.engage, leader.timeout_s)


class LeaderPositions:
    """Reads the joints of a leader out of its messages, in the robot's units.

    Args:
        led: joints that it leads, in the order of `LeaderParameters.columns`.
    """

    def __init__(self, robot: Robot, led: Sequence[LeaderJoint]) -> None:
        joints = [robot.joint(item.joint) for item in led]
        self._names = [
            item.name or joint.in_messages for item, joint in zip(led, joints, strict=True)
        ]
        pairs = [leader_scaling(item, joint) for item, joint in zip(led, joints, strict=True)]
        self._scale, self._offset = np.array(pairs).reshape(-1, 2).T

    def read(self, names: Sequence[str], positions: Sequence[float]) -> np.ndarray:
        """Return the positions (led,); fewer where a joint is missing, or the message is broken."""
        given = dict(zip(names, positions, strict=False))
        found = [given[name] for name in self._names if name in given]
        broken = len(positions) != len(names) or len(given) != len(names)
        if broken or len(found) != len(self._names):
            return np.zeros(0)
        return (np.array(found, dtype=np.float64) - self._offset) / self._scale
