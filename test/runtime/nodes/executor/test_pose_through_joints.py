"""A policy of LIBERO's convention on an arm that takes joints alone: both nodes, on a real graph.

The pose that the policy sees and the joints that it moves are the URDF's, through pinocchio.
"""

from __future__ import annotations

import array

import numpy as np
import pytest
from graph import LATCHED, RELIABLE, SENSOR, Graph, graph
from libero_folders import OPTIONS, POSE_OPTIONS, SCALE, write_libero_folder
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from test_kinematics import HOME, JOINTS, needs_pinocchio, pose_of, urdf

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.messages.trajectories import ns_to_stamp

pytestmark = [pytest.mark.graph, needs_pinocchio]

OTHERS = {'finger_1': 0.0, 'finger_2': 0.0, 'grip': 0.5}
STEP_M = np.array([0.001, -0.0015, 0.001])
MEAN = np.concatenate([STEP_M / SCALE[0], np.zeros(4)])
STD = np.full(7, 1e-7)
HOW_FAR_M = 0.05


class JointArm:
    """Joints that go where they are commanded at once, and cameras."""

    def __init__(self, made: Graph, cameras: tuple[str, ...]) -> None:
        self._clock = made.node.get_clock()
        self.joints = dict(zip(JOINTS, HOME.tolist(), strict=True)) | OTHERS
        self._states = made.node.create_publisher(JointState, 'joint_states', SENSOR)
        self._images = [
            made.node.create_publisher(Image, f'{name}/image', SENSOR) for name in cameras
        ]
        made.node.create_subscription(Float64MultiArray, 'arm/commands', self._move, RELIABLE)
        made.node.create_subscription(Float64MultiArray, 'gripper/commands', self._grip, RELIABLE)
        self.timer = made.node.create_timer(0.01, self._tick)
        self._ticks = 0

    def _move(self, message: Float64MultiArray) -> None:
        self.joints.update(zip(JOINTS, message.data, strict=True))

    def _grip(self, message: Float64MultiArray) -> None:
        self.joints['grip'] = message.data[0]

    def _tick(self) -> None:
        stamp = ns_to_stamp(self._clock.now().nanoseconds)
        message = JointState(name=list(self.joints), position=list(self.joints.values()))
        message.header.stamp = stamp
        self._states.publish(message)
        if self._ticks % 10 == 0:
            for publisher in self._images:
                image = Image(height=48, width=64, encoding='rgb8', step=192)
                image.header.stamp = stamp
                image.data = array.array('B', bytes(48 * 192))
                publisher.publish(image)
        self._ticks += 1

    def pose(self) -> tuple[np.ndarray, np.ndarray]:
        return pose_of(np.array([self.joints[name] for name in JOINTS]))


def robot_file(cameras: tuple[str, ...]) -> str:
    arm = '\n'.join(f'  - {{name: {name}, unit: rad, velocity: 2.0}}' for name in JOINTS)
    seen = '\n'.join(f'  - {{name: {name}, topic: {name}/image}}' for name in cameras)
    return f"""
format: 1
name: arm of joints
urdf: arm.urdf
joints:
{arm}
  - {{name: finger_1, unit: m, lower: 0.0, upper: 0.1, velocity: 0.1}}
  - {{name: finger_2, unit: m, lower: -0.1, upper: 0.1, velocity: 0.1}}
  - {{name: grip, unit: rad, lower: 0.0, upper: 1.0, velocity: 1.0, grips: true, zero: 0.5,
     one: 0.0}}
cameras:
{seen}
poses:
  - {{name: hand, aliases: [tool], frame_id: base, link: tool, lower: [-0.8, -0.8, 0.0],
     upper: [0.8, 0.8, 0.9], velocity: 0.5, angular_velocity: 1.0}}
outputs:
  - {{kind: float64_multi_array, topic: arm/commands, joints: [{', '.join(JOINTS)}]}}
  - {{kind: float64_multi_array, topic: gripper/commands, joints: [grip]}}
"""


def test_a_policy_of_steps_moves_the_tool_of_an_arm_that_takes_joints(tmp_path):
    folder, bundle = write_libero_folder(tmp_path / 'policy', MEAN, STD), tmp_path / 'bundle'
    words = ['export', str(folder), '--out', str(bundle), '--onnx-precision', 'none']
    assert main([*words, *OPTIONS, *POSE_OPTIONS]) == 0
    cameras = read_bundle(bundle).spec.camera_names
    (tmp_path / 'arm.urdf').write_text(urdf())
    path = tmp_path / 'arm.yaml'
    path.write_text(robot_file(cameras))
    with graph() as made:
        arm = JointArm(made, cameras)
        begin, turned = arm.pose()
        task = made.node.create_publisher(String, 'vla_policy/instruction', LATCHED)
        task.publish(String(data='put the bowl on the plate'))
        files = ('-p', f'bundle:={bundle}', '-p', f'robot:={path}', '-p', 'autostart:=true')
        made.start('vla_runtime.nodes.policy.node', '--ros-args', *files, '-p', 'torch_threads:=1')
        # A busy machine must not look like a fault here.
        patient = ('-p', 'max_state_age_s:=1.0', '-p', 'tick_timeout_s:=1.0')
        patient += ('-p', 'replan_interval:=4')
        made.start('vla_runtime.nodes.executor.node', '--ros-args', *files, *patient)
        start = lambda: made.call(Trigger, 'vla_executor/start', Trigger.Request()).success  # noqa: E731
        made.wait_for(start, 'a start')
        made.wait_for(
            lambda: np.linalg.norm(arm.pose()[0] - begin) > HOW_FAR_M, 'the tool to have moved'
        )
        place, held = arm.pose()
        arm.timer.cancel()
    way = place - begin
    # Along the policy's steps, and without turning.
    direction = STEP_M / np.linalg.norm(STEP_M)
    assert np.linalg.norm(way - (way @ direction) * direction) < 0.005
    np.testing.assert_allclose(held, turned, atol=0.03)
