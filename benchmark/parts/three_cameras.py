"""Shared by the node benchmarks: a tiny policy with three cameras, its robot, the policy node, and
executors that each keep to a Fast DDS profile.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / 'test'), str(ROOT / 'test' / 'runtime' / 'nodes')]

from graph import LATCHED, RELIABLE, SENSOR, Graph, Process, isolate  # noqa: E402
from sensor_msgs.msg import JointState  # noqa: E402
from std_msgs.msg import String  # noqa: E402
from std_srvs.srv import Trigger  # noqa: E402
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy  # noqa: E402
from trajectory_msgs.msg import JointTrajectory  # noqa: E402
from velocity_robot import VelocityRobot  # noqa: E402

from vla_runtime.bundle.schema import CameraSpec  # noqa: E402
from vla_runtime.messages.trajectories import plan_to_message  # noqa: E402
from vla_runtime.nodes.middleware import PROFILE_VARIABLES  # noqa: E402
from vla_runtime.types import PlanRequest  # noqa: E402

NODE = '/vla_policy'
CAMERAS = ('top', 'left', 'right')
PACKAGES = ('numpy', 'torch', 'ros-rclpy', 'ros-fastrtps')
STEP_TIME_S = 0.05
CAMERA = '/cameras/top'
# As the machine's other ROS programs must not join, the graph is one of this machine.
PROFILES = {'shared_memory': 'fastdds.xml', 'udp': 'fastdds_executor_localhost.xml'}


def use_profile(shipped: bool) -> None:
    """Let this process and its children use the shipped Fast DDS profile, or Fast DDS's default."""
    for variable in PROFILE_VARIABLES:
        if shipped:
            os.environ[variable] = str(ROOT / 'config' / 'fastdds.xml')
        else:
            os.environ.pop(variable, None)


def keep_others_out() -> None:
    """Run this process and its children before everything else (SCHED_FIFO, needs permission).

    For machines that are busy with other work: what is measured is then the node and not them.
    """
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))


@contextmanager
def quiet_domain():  # type: ignore[no-untyped-def]
    """A graph of its own, in a domain that the machine's other ROS programs do not use."""
    isolate()
    made = Graph('benchmark')
    try:
        yield made
    finally:
        made.close()


def start_policy_node(graph: Graph, folder: Path) -> Process:
    """Write bundle and robot file into a folder, start the node on them, configure and activate."""
    spec = tiny_spec()
    spec = replace(
        spec,
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        dims=replace(spec.dims, cameras=len(CAMERAS)),
    )
    bundle = write_tiny_policy(folder / 'bundle', spec)
    joints = [
        f'  - {{name: {name}, unit: rad, lower: -3.0, upper: 3.0, velocity: 10.0}}'
        for name in JOINTS
    ]
    cameras = [f'  - {{name: {name}, topic: {name}/image, depth: 5}}' for name in CAMERAS]
    lines = [
        *('format: 1', 'name: three_cameras', 'joints:', *joints, 'cameras:', *cameras),
        'outputs:',
        f'  - {{kind: joint_trajectory, topic: arm, joints: [{", ".join(JOINTS)}]}}',
    ]
    robot = folder / 'robot.yaml'
    robot.write_text('\n'.join(lines) + '\n', encoding='utf-8')
    process = graph.start(
        'vla_runtime.nodes.policy.node',
        '--ros-args',
        *('-p', f'bundle:={bundle}'),
        *('-p', f'robot:={robot}'),
    )
    for transition in ('configure', 'activate'):
        if not graph.transition(NODE, transition):
            raise RuntimeError(f'{transition} failed\n{process.output()}')
    return process


def start_executor(graph: Graph, name: str, folder: Path) -> VelocityRobot:
    """An executor in a namespace of its own, on a copy of a profile, so that it keeps to it."""
    profile = folder / f'{name}.xml'
    # Not the shipped file itself: the executor would take its own in its place.
    text = (ROOT / 'config' / PROFILES[name]).read_text(encoding='utf-8')
    profile.write_text(f'{text}<!-- {name} -->\n', encoding='utf-8')
    before = dict(os.environ)
    if name == 'udp':
        os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'SYSTEM_DEFAULT'
    os.environ.update(dict.fromkeys(PROFILE_VARIABLES, str(profile)))
    try:
        process = graph.start(
            'vla_runtime.nodes.executor.node',
            '--ros-args',
            *('-r', f'__ns:=/{name}'),
            *('-p', f'bundle:={folder / "bundle"}'),
            *('-p', f'robot:={folder / "robot.yaml"}'),
            # A busy machine must not stop the motion.
            *('-p', 'max_state_age_s:=5.0', '-p', 'tick_timeout_s:=1.0', '-p', 'clock_jump_s:=5.0'),
        )
    finally:
        os.environ.update(before)
    robot = VelocityRobot(graph, f'/{name}')
    for transition in ('configure', 'activate'):
        if not graph.transition(f'/{name}/vla_executor', transition):
            raise RuntimeError(f'{transition} failed:\n{process.output()}')

    def starts() -> bool:
        return bool(graph.call(Trigger, f'/{name}/vla_executor/start', Trigger.Request()).success)

    graph.wait_for(starts, 'a start')
    graph.wait_for(lambda: len(robot.tick_ns) > 100, 'commands')
    return robot


class Peers:
    """Joint states, instruction and requests, as the robot's driver and the executor give them."""

    def __init__(self, graph: Graph) -> None:
        node = graph.node
        self._clock = node.get_clock()
        self._joints = node.create_publisher(JointState, '/joint_states', SENSOR)
        self._plans = node.create_publisher(JointTrajectory, '/committed_plan', RELIABLE)
        self._instruction = node.create_publisher(String, f'{NODE}/instruction', LATCHED)
        self._instruction.publish(String(data='pick up the red cup'))

    def publish_joints(self) -> None:
        message = JointState(name=list(JOINTS), position=[0.1, 0.2, 0.3])
        message.header.stamp = self._clock.now().to_msg()
        self._joints.publish(message)

    def request(self) -> None:
        message: Any = plan_to_message(
            PlanRequest(
                [[0.1, 0.2, 0.3]] * 4,  # type: ignore[arg-type]
                JOINTS,
                ['position'] * len(JOINTS),
                STEP_TIME_S,
                stamp_ns=self._clock.now().nanoseconds,
                episode=0,
                certain=2,
            )
        )
        self._plans.publish(message)
