"""A robot that takes joint velocities, with the executor's files for it and a policy by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from executor_bench import HOME, chunk_message
from graph import RELIABLE, SENSOR, Graph
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from tabletop_policy import HORIZON, STEP_TIME_S

from vla_runtime.messages.trajectories import (
    chunk_type,
    message_to_plan,
    ns_to_stamp,
    plan_type,
    stamp_to_ns,
)
from vla_runtime.types import ChunkHeader
from vla_tabletop.sim.world import JOINT_NAMES

VELOCITY_ROBOT = """\
format: 1
name: rates
joints:
{joints}
joint_states:
  - {{topic: joint_states}}
cameras:
  - {{name: front, topic: front/image_raw, width: 320, height: 240}}
  - {{name: wrist, topic: wrist/image_raw, width: 320, height: 240}}
outputs:
  - {{kind: float64_multi_array, topic: arm/rates, interface: velocity, joints: [{arm}]}}
  - {{kind: joint_state, topic: gripper/rates, interface: velocity, joints: [gripper]}}
"""
JOINT = (
    '  - {{name: {name}, unit: rad, lower: -100.0, upper: 100.0, velocity: 3.0,'
    ' acceleration: 40.0, max_step: 0.5}}'
)


def write_velocity_robot(path: Path) -> Path:
    joints = '\n'.join(JOINT.format(name=name) for name in JOINT_NAMES)
    path.write_text(
        VELOCITY_ROBOT.format(joints=joints, arm=', '.join(JOINT_NAMES[:5])), encoding='utf-8'
    )
    return path


class VelocityRobot:
    """Joint states that stand still, and chunks that let every joint swing for ever.

    Attributes:
        arm: messages of the arm's output, newest last.
        gripper: messages of the gripper's output, newest last.
        tick_ns: when the executor made each command of the gripper, its own ROS clock.
    """

    def __init__(self, made: Graph, namespace: str = '') -> None:
        self.arm: list[list[float]] = []
        self.gripper: list[list[float]] = []
        self.tick_ns: list[int] = []
        self._made = made
        self._number = itertools.count()
        self._states = made.node.create_publisher(JointState, f'{namespace}/joint_states', SENSOR)
        self._chunks = made.node.create_publisher(
            chunk_type(), f'{namespace}/action_chunk', RELIABLE
        )
        for message_type, topic, call in (
            (Float64MultiArray, 'arm/rates', self._on_arm),
            (JointState, 'gripper/rates', self._on_gripper),
            (plan_type(), 'committed_plan', self._answer),
        ):
            made.node.create_subscription(message_type, f'{namespace}/{topic}', call, RELIABLE)
        made.node.create_timer(0.02, self._publish_state)

    def _now_ns(self) -> int:
        return int(self._made.node.get_clock().now().nanoseconds)

    def _on_arm(self, message: Float64MultiArray) -> None:
        self.arm.append(list(message.data))

    def _on_gripper(self, message: JointState) -> None:
        self.gripper.append(list(message.velocity))
        self.tick_ns.append(stamp_to_ns(message.header.stamp))

    def _publish_state(self) -> None:
        message = JointState(name=list(JOINT_NAMES), position=HOME.tolist())
        message.header.stamp = ns_to_stamp(self._now_ns())
        self._states.publish(message)

    def _answer(self, request: Any) -> None:
        now_ns = self._now_ns()
        times_s = now_ns * 1e-9 + STEP_TIME_S * np.arange(1, HORIZON + 1)
        actions = np.tile(0.5 + 0.3 * np.sin(times_s)[:, None], (1, len(JOINT_NAMES)))
        episode, number = message_to_plan(request).episode, next(self._number)
        header = ChunkHeader(now_ns, episode, number, tied=False)
        self._chunks.publish(chunk_message(actions, header, kind='velocity'))
