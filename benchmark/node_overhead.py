"""Time that the policy node adds to an inference, with three raw 480x640 cameras at 30 Hz.

Two figures, both without the time spent in the policy:
- in the node: from the moment that the newest frame and the request are both there, to the
  published chunk (the node's own `overhead_ms`);
- outside: from the last frame and the request published, to the chunk received: two transports
  more.

The target is a median of 5 ms in the node.

    python benchmark/node_overhead.py [--chunks 200]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from parts.camera_drivers import blank_image
from parts.graph_rig import (
    LATCHED,
    PACKAGES,
    RELIABLE,
    ROOT,
    SENSOR,
    Graph,
    Process,
    keep_others_out,
    quiet_domain,
)
from parts.measurement import percentiles, write_result
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

# Beside the helpers that graph_rig makes importable.
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy  # isort: skip

from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import plan_to_message
from vla_runtime.nodes.middleware import PROFILE_VARIABLES
from vla_runtime.types import PlanRequest

NODE = '/vla_policy'
CAMERAS = ('top', 'left', 'right')
STEP_TIME_S = 0.05

_PERIOD_S = 1.0 / 30.0
_WARM_UP = 10
# Two of three rounds are frames only, so that inference and frames come in turn as on a robot.
_ROUNDS_A_REQUEST = 3


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


def measure(graph: Graph, folder: Path, chunks: int) -> dict[str, list[float]]:
    """Milliseconds per chunk, by figure."""
    start_policy_node(graph, folder)
    peers = Peers(graph)
    publishers = [graph.node.create_publisher(Image, f'/{name}/image', SENSOR) for name in CAMERAS]
    arrivals: list[float] = []
    graph.node.create_subscription(
        JointTrajectory, '/action_chunk', lambda _: arrivals.append(time.monotonic()), 10
    )
    reports = graph.collect(DiagnosticArray, f'{NODE}/report')
    message = blank_image()
    sent: list[float] = []
    due = time.monotonic()
    while len(reports) < chunks + _WARM_UP:
        for index in range(_ROUNDS_A_REQUEST):
            peers.publish_joints()
            for publisher in publishers:
                message.header.stamp = graph.node.get_clock().now().to_msg()
                publisher.publish(message)
            if index == 0 and len(sent) == len(reports):
                sent.append(time.monotonic())
                peers.request()
            due += _PERIOD_S
            time.sleep(max(0.0, due - time.monotonic()))
    reports = [values_of(report.status[0]) for report in reports[_WARM_UP:]]
    totals = [float(report['ms.total']) for report in reports]
    return {
        'in_node_ms': [float(report['overhead_ms']) for report in reports],
        'outside_ms': [
            (arrival - start) * 1e3 - total
            for start, arrival, total in zip(
                sent[_WARM_UP:], arrivals[_WARM_UP:], totals, strict=False
            )
        ],
        'policy_ms': totals,
        'newest_frame_age_ms': [
            min(float(report[f'age_ms.{name}']) for name in CAMERAS) for report in reports
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--chunks', type=int, default=200, help='measured chunks (default: 200)')
    parser.add_argument('--realtime', action='store_true', help='keep other programs out of it')
    arguments = parser.parse_args()
    if arguments.realtime:
        keep_others_out()
    # As a robot's processes have it.
    for variable in PROFILE_VARIABLES:
        os.environ[variable] = str(ROOT / 'config' / 'fastdds.xml')
    with tempfile.TemporaryDirectory() as folder, quiet_domain() as graph:
        samples = measure(graph, Path(folder), arguments.chunks)
    figures = {name: percentiles(values) for name, values in samples.items()}
    for name, shown in figures.items():
        print(
            f'{name:20s} median {shown["median"]:7.2f}   p95 {shown["p95"]:7.2f}   '
            f'max {shown["max"]:7.2f}'
        )
    print('wrote', write_result('node_overhead', figures, PACKAGES))


if __name__ == '__main__':
    main()
