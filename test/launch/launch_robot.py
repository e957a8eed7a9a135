"""A robot without a simulator for launch tests: its files, and drivers that follow commands."""

from __future__ import annotations

import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from graph import RELIABLE, SENSOR, Graph
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray
from tiny_policy import JOINTS, tiny_dims, tiny_spec, write_tiny_policy
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.bundle.schema import ActionSpec
from vla_runtime.messages.trajectories import chunk_type, ns_to_stamp, plan_type

HORIZON = 24
# Positions for the arm and a velocity for the gripper: both kinds of hold.
_ROBOT = """
format: 1
name: follower
joints:
  - {name: shoulder, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
  - {name: elbow, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
  - {name: gripper, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}
cameras:
  - {name: top, topic: top/image}
  - {name: wrist, topic: wrist/image, type: compressed}
joint_states:
  - {topic: joint_states}
outputs:
  - {kind: joint_trajectory, topic: arm/joint_trajectory, joints: [shoulder, elbow]}
  - {kind: float64_multi_array, topic: gripper/rate, interface: velocity, joints: [gripper]}
"""
# A busy machine must not look like a fault of the robot.
_PATIENT = """
/**/vla_policy:
  ros__parameters: {max_observation_age_s: 5.0, sync_tolerance_s: 1.0}
/**/vla_executor:
  ros__parameters:
    {max_state_age_s: 5.0, tick_timeout_s: 1.0, clock_jump_s: 5.0, max_observation_age_s: 10.0}
"""
_STATE_PERIOD_S = 0.02
_FRAME_PERIOD_S = 0.05


@dataclass(frozen=True)
class Files:
    """Arguments of a launch of policy and executor: `bundle`, `robot`, `params_file`."""

    bundle: Path
    robot: Path
    params_file: Path

    def arguments(self, **others: str) -> dict[str, str]:
        """Launch arguments for these files, and any others."""
        own = {'bundle': self.bundle, 'robot': self.robot, 'params_file': self.params_file}
        return {**{name: str(path) for name, path in own.items()}, **others}


def write_files(folder: Path) -> Files:
    """Write a tiny policy that wanders slowly, its robot and patient parameters."""
    spec = tiny_spec(advantage='before_action')
    gripper = ActionSpec('gripper', 'rad/s', 'velocity')
    spec = replace(spec, dims=tiny_dims('pi05', HORIZON), actions=(*spec.actions[:2], gripper))
    files = Files(
        bundle=write_tiny_policy(folder / 'bundle', spec, action_scale=0.05),
        robot=folder / 'robot.yaml',
        params_file=folder / 'patient.yaml',
    )
    files.robot.write_text(_ROBOT, encoding='utf-8')
    files.params_file.write_text(_PATIENT, encoding='utf-8')
    return files


class FollowingRobot:
    """Drivers of the robot: two cameras, joint states, and an arm that is where it was commanded.

    Attributes:
        arm: (shoulder, elbow) that the arm was commanded, newest last; radians.
        gripper: velocity that the gripper was commanded, newest last; rad/s.
        plans: requests of the executor.
        chunks: answers of the policy.
    """

    def __init__(self, made: Graph, namespace: str = '') -> None:
        self.arm: list[list[float]] = []
        self.gripper: list[float] = []
        self._node = made.node
        self._namespace = f'/{namespace}' if namespace else ''
        self._positions = np.array([0.05, -0.05, 0.2])
        self._random = np.random.default_rng(0)
        self._states = self._publisher(JointState, 'joint_states')
        self._top = self._publisher(Image, 'top/image')
        self._wrist = self._publisher(CompressedImage, 'wrist/image')
        self.plans = made.collect(plan_type(), f'{self._namespace}/committed_plan')
        self.chunks = made.collect(chunk_type(), f'{self._namespace}/action_chunk')
        self._listen(JointTrajectory, 'arm/joint_trajectory', self._on_arm)
        self._listen(Float64MultiArray, 'gripper/rate', self._on_gripper)
        made.node.create_timer(_STATE_PERIOD_S, self._publish_states)
        made.node.create_timer(_FRAME_PERIOD_S, self._publish_frames)

    @property
    def moves(self) -> bool:
        """Return whether the newest ten commands differ from each other, on both outputs."""
        arm, gripper = np.array(self.arm[-10:]), np.array(self.gripper[-10:])
        return len(arm) == 10 == len(gripper) and bool(
            (np.abs(np.diff(arm, axis=0)).max(axis=1) > 0).all() and gripper.any()
        )

    def position(self) -> list[float]:
        """(2,) measured position of the arm, radians."""
        return self._positions[:2].tolist()

    def _publisher(self, message_type: type, topic: str) -> Any:
        return self._node.create_publisher(message_type, f'{self._namespace}/{topic}', SENSOR)

    def _listen(self, message_type: type, topic: str, callback: Any) -> None:
        self._node.create_subscription(
            message_type, f'{self._namespace}/{topic}', callback, RELIABLE
        )

    def _on_arm(self, message: JointTrajectory) -> None:
        self.arm.append(list(message.points[-1].positions))
        self._positions[:2] = self.arm[-1]

    def _on_gripper(self, message: Float64MultiArray) -> None:
        self.gripper.append(message.data[0])

    def _stamp(self) -> Any:
        return ns_to_stamp(self._node.get_clock().now().nanoseconds)

    def _publish_states(self) -> None:
        message = JointState(name=list(JOINTS), position=self._positions.tolist())
        message.header.stamp = self._stamp()
        self._states.publish(message)

    def _publish_frames(self) -> None:
        stamp = self._stamp()
        pixels = self._random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        top = Image(height=48, width=64, encoding='rgb8', step=192)
        top.header.stamp = stamp
        top.data = array.array('B', pixels.tobytes())
        self._top.publish(top)
        _, png = cv2.imencode('.png', pixels[:32, :32])
        wrist = CompressedImage(format='png', data=array.array('B', png.tobytes()))
        wrist.header.stamp = stamp
        self._wrist.publish(wrist)
