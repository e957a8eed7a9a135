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
import tempfile
import time
from pathlib import Path

from diagnostic_msgs.msg import DiagnosticArray
from parts.camera_driver import blank_image
from parts.measurement import percentiles, write_result
from parts.three_cameras import (
    CAMERAS,
    NODE,
    PACKAGES,
    SENSOR,
    Graph,
    Peers,
    keep_others_out,
    quiet_domain,
    start_policy_node,
    use_profile,
)
from sensor_msgs.msg import Image
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.diagnostics import values_of

_PERIOD_S = 1.0 / 30.0
_WARM_UP = 10
# Two of three rounds are frames only, so that inference and frames come in turn as on a robot.
_ROUNDS_A_REQUEST = 3


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
    use_profile(shipped=True)
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
