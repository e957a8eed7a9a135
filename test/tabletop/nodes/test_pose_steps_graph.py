"""A policy of LIBERO's convention drives the simulated arm through `pose_stamped`, closed loop.

All of it is real: a SmolVLA folder through `vla_runtime export`, both nodes as processes, MuJoCo's
physics and images. The Cartesian controller behind the topic is the inverse kinematics of the
scripted expert.
"""

from __future__ import annotations

import array
import math

import numpy as np
import pytest
from geometry_msgs.msg import PoseStamped
from graph import LATCHED, RELIABLE, SENSOR, Graph, graph
from libero_folders import OPTIONS, POSE_OPTIONS, SCALE, STATE, write_libero_folder
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.messages.trajectories import chunk_type, ns_to_stamp
from vla_tabletop.sim.expert import Expert
from vla_tabletop.sim.world import JOINT_NAMES, Tabletop

pytestmark = pytest.mark.graph

PERIOD_S = 0.01
# Every chunk says the same steps, 20 a second: 3 cm/s forward, 2.4 up, and the gripper closed.
STEP_M = np.array([0.0015, 0.0, 0.0012])
MEAN = np.concatenate([STEP_M / SCALE[0], np.zeros(3), [1.0]])
STD = np.full(7, 1e-7)
HOW_FAR_M = 0.04


class CartesianArm:
    """The simulated arm, its cameras, and the Cartesian controller that takes poses."""

    def __init__(self, made: Graph, cameras: tuple[str, ...]) -> None:
        self._node, self._clock = made.node, made.node.get_clock()
        self._world, self._expert = Tabletop(1.0 / PERIOD_S), Expert()
        self._gripper = JOINT_NAMES.index('gripper')
        self._cameras = dict(zip(cameras, self._world.cameras, strict=False))
        self._ticks = 0
        # Upright, where the expert holds the tool.
        start = self._world.state()
        self._joints = self._expert.reach(start.tip_m, start.joint_rad)
        for _ in range(100):
            self._world.step(self._joints)
        self.begin_m = self._world.state().tip_m
        self.tip_m, self.grip_rad = self.begin_m, float(self._joints[self._gripper])
        self.poses: list[PoseStamped] = []
        self._states = made.node.create_publisher(JointState, 'joint_states', SENSOR)
        self._images = {
            name: made.node.create_publisher(Image, f'{name}/image', SENSOR) for name in cameras
        }
        made.node.create_subscription(PoseStamped, 'target_pose', self._take_pose, RELIABLE)
        made.node.create_subscription(
            Float64MultiArray, 'gripper/commands', self._take_grip, RELIABLE
        )
        self.timer = made.node.create_timer(PERIOD_S, self._tick)

    def _take_pose(self, message: PoseStamped) -> None:
        place = message.pose.position
        grip = self._joints[self._gripper]
        target = np.array([place.x, place.y, place.z])
        self._joints = self._expert.reach(target, self._joints, iterations=4)
        self._joints[self._gripper] = grip
        self.poses.append(message)

    def _take_grip(self, message: Float64MultiArray) -> None:
        self._joints[self._gripper] = message.data[0]

    def _tick(self) -> None:
        self._world.step(self._joints)
        state = self._world.state()
        self.tip_m, self.grip_rad = state.tip_m, float(state.joint_rad[self._gripper])
        stamp = ns_to_stamp(self._clock.now().nanoseconds)
        # The controller keeps the tool upright: no rotation in the frame of the base.
        numbers = [*state.tip_m.tolist(), 0.0, 0.0, 0.0, 0.0, 0.0, self.grip_rad]
        message = JointState(name=[*STATE, 'grip'], position=numbers)
        message.header.stamp = stamp
        self._states.publish(message)
        if self._ticks % 10 == 0:
            for name, camera in self._cameras.items():
                rgb = self._world.render(camera, 64, 48)
                image = Image(height=48, width=64, encoding='rgb8', step=192)
                image.header.stamp = stamp
                image.data = array.array('B', rgb.tobytes())
                self._images[name].publish(image)
        self._ticks += 1


def robot_file(cameras: tuple[str, ...], upper_m: np.ndarray) -> str:
    joints = '\n'.join(
        f'  - {{name: {name}, unit: {"rad" if name.startswith("r") else "m"}, lower: -4.0, '
        'upper: 4.0, velocity: 2.0}'
        for name in STATE
    )
    seen = '\n'.join(f'  - {{name: {name}, topic: {name}/image}}' for name in cameras)
    upper = ', '.join(f'{number:.9f}' for number in upper_m)
    return f"""
format: 1
name: cartesian arm
joints:
{joints}
  # LIBERO's gripper says -1 open and 1 closed, so 0 is in the middle.
  - {{name: grip, unit: rad, lower: -0.2, upper: 1.2, velocity: 1.0, grips: true, zero: 0.5,
     one: 0.1}}
cameras:
{seen}
poses:
  - {{name: hand, aliases: [tool], frame_id: base, lower: [-1.0, -1.0, 0.0], upper: [{upper}],
     velocity: 0.5, angular_velocity: 1.0, angular_acceleration: 8.0}}
outputs:
  - {{kind: pose_stamped, topic: target_pose, pose: hand}}
  - {{kind: float64_multi_array, topic: gripper/commands, joints: [grip]}}
on_violation: {{workspace: clamp}}
"""


def test_a_policy_of_steps_moves_the_arm_to_the_edge_of_its_workspace(tmp_path):
    folder, bundle = write_libero_folder(tmp_path / 'policy', MEAN, STD), tmp_path / 'bundle'
    words = ['export', str(folder), '--out', str(bundle), '--onnx-precision', 'none']
    assert main([*words, *OPTIONS, *POSE_OPTIONS]) == 0
    spec = read_bundle(bundle).spec
    with graph() as made:
        arm = CartesianArm(made, spec.camera_names)
        edge_m = arm.begin_m + HOW_FAR_M
        path = tmp_path / 'arm.yaml'
        path.write_text(robot_file(spec.camera_names, edge_m))
        task = made.node.create_publisher(String, 'vla_policy/instruction', LATCHED)
        task.publish(String(data='put the bowl on the plate'))
        chunks = made.collect(chunk_type(), 'action_chunk')
        files = ('-p', f'bundle:={bundle}', '-p', f'robot:={path}', '-p', 'autostart:=true')
        made.start('vla_runtime.nodes.policy.node', '--ros-args', *files, '-p', 'torch_threads:=1')
        # A busy machine must not look like a fault here.
        patient = ('-p', 'max_state_age_s:=1.0', '-p', 'tick_timeout_s:=1.0')
        patient += ('-p', 'replan_interval:=4', '-p', 'clamp_latch:=0')
        made.start('vla_runtime.nodes.executor.node', '--ros-args', *files, *patient)
        start = lambda: made.call(Trigger, 'vla_executor/start', Trigger.Request()).success  # noqa: E731
        made.wait_for(start, 'a start')
        # Forward and up it ends where the workspace does; aside it never went.
        made.wait_for(
            lambda: np.abs((arm.tip_m - edge_m)[[0, 2]]).max() < 0.008,
            'the tip at the edge of the workspace',
        )
        made.wait_for(lambda: abs(arm.grip_rad - 0.1) < 0.05, 'a closed gripper')
        sent = np.array([[*map(float, _place(message))] for message in arm.poses])
        arm.timer.cancel()
    assert len(chunks) > 2
    assert (sent <= edge_m + 1e-6).all()
    assert abs(arm.tip_m[1] - arm.begin_m[1]) < 0.01
    assert all(math.isclose(abs(one.pose.orientation.w), 1.0, abs_tol=1e-6) for one in arm.poses)
    assert np.abs(np.diff(sent, axis=0)).max() < 0.5 * PERIOD_S * 3


def _place(message: PoseStamped) -> tuple[float, float, float]:
    place = message.pose.position
    return place.x, place.y, place.z
