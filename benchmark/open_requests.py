"""Chunks a second that reach the robot with one and with two requests open, on a real graph.

The demo policy, the executor and an arm with two cameras are processes that talk to each other; the
executor would replan at every step. By turns: `pipeline: latency`; `throughput` with one request
open, as before a policy could say how many it takes; `throughput` with two. Between them stands a
relay, which in the second takes that word out of the chunks. Counted are chunks that took over, and
how old the observation behind the executed action was, by the executor's status.

    python benchmark/open_requests.py [--rounds 6] [--denoise-steps 4]
"""

from __future__ import annotations

import argparse
import array
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from parts.measurement import in_turn, median_interval, median_ratio, write_result
from parts.three_cameras import ROOT, quiet_domain

# Beside the helpers that three_cameras makes importable.
from executor_bench import Arm  # isort: skip
from graph import LATCHED, RELIABLE, SENSOR, Graph  # isort: skip

from diagnostic_msgs.msg import DiagnosticArray
from sensor_msgs.msg import Image
from std_msgs.msg import String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import chunk_to_message, message_to_chunk, ns_to_stamp

POLICY, EXECUTOR = '/vla_policy', '/vla_executor'
KINDS = ('latency', 'throughput, one request', 'throughput, two requests')
SETTLE_S, COUNT_S = 3.0, 8.0


class Bench:
    """The graph, and what the executor's status says."""

    def __init__(self, made: Graph, folder: Path, denoise_steps: int) -> None:
        self.graph = made
        self.arm = Arm(made)
        self.one_request = False
        self.taken_over = 0
        self.ages_ms: list[float] = []
        self.control = ''
        node = made.node
        self._chunks = node.create_publisher(JointTrajectory, 'action_chunk', RELIABLE)
        self._images = {
            name: node.create_publisher(Image, f'{name}/image_raw', SENSOR)
            for name in ('front', 'wrist')
        }
        self._random = np.random.default_rng(0)
        instruction = node.create_publisher(String, f'{POLICY}/instruction', LATCHED)
        instruction.publish(String(data='push the red cube to the left'))
        node.create_subscription(JointTrajectory, 'answers', self._relay, RELIABLE)
        node.create_subscription(DiagnosticArray, '/diagnostics', self._on_status, RELIABLE)
        node.create_timer(0.05, self._show)
        robot = folder / 'robot.yaml'
        text = (ROOT / 'config' / 'robots' / 'tabletop.yaml').read_text(encoding='utf-8')
        # However slow the policy, nobody needs to start the robot again.
        robot.write_text(f'{text}\nrestart_after_outage_s: 600.0\n', encoding='utf-8')
        files = (
            *('-p', f'bundle:={ROOT / "engines" / "demo"}'),
            *('-p', f'robot:={robot}'),
        )
        made.start(
            'vla_runtime.nodes.policy.node',
            '--ros-args',
            *files,
            *('-r', 'action_chunk:=answers'),
            *('-p', 'torch_threads:=1'),
            *('-p', 'backend:=torch'),
            *('-p', 'precision:=float32'),
            *('-p', 'max_observation_age_s:=10.0'),
            *('-p', 'sync_tolerance_s:=1.0'),
            *('-p', f'denoise_steps:={denoise_steps}'),
        )
        made.start(
            'vla_runtime.nodes.executor.node',
            '--ros-args',
            *files,
            *('-p', 'replan_interval:=1'),
            *('-p', 'max_overrun_steps:=16'),
            *('-p', 'max_state_age_s:=1.0'),
            *('-p', 'tick_timeout_s:=1.0'),
            *('-p', 'clock_jump_s:=5.0'),
            # Untrained for these images, the arm comes to its limits.
            *('-p', 'clamp_latch:=0'),
            *('-p', 'max_observation_age_s:=20.0'),
            *('-p', 'request_timeout_s:=20.0'),
        )
        for name in (POLICY, EXECUTOR):
            assert made.transition(name, 'configure') and made.transition(name, 'activate')
        start = lambda: made.call(Trigger, f'{EXECUTOR}/start', Trigger.Request())  # noqa: E731
        made.wait_for(lambda: start().success, 'the start')

    def _show(self) -> None:
        stamp = ns_to_stamp(self.arm.now_ns())
        for publisher in self._images.values():
            pixels = self._random.integers(0, 256, (240, 320, 3), dtype=np.uint8)
            image = Image(height=240, width=320, encoding='rgb8', step=960)
            image.header.stamp = stamp
            image.data = array.array('B', pixels.tobytes())
            publisher.publish(image)

    def _relay(self, message: JointTrajectory) -> None:
        if self.one_request:
            chunk, header = message_to_chunk(message)
            message = chunk_to_message(chunk, replace(header, open_requests=1))
        self._chunks.publish(message)

    def _on_status(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name.startswith(f'{EXECUTOR}: '):
                values = values_of(status)
                if status.name.endswith('control'):
                    self.control = status.message
                self.taken_over = int(values.get('taken_over', self.taken_over))
                if float(values.get('observation_age_ms', 0.0)):
                    self.ages_ms.append(float(values['observation_age_ms']))

    def turn(self, kind: str) -> tuple[float, float]:
        """Chunks a second that took over, and the median age of their observations (ms)."""
        self.one_request = kind == KINDS[1]
        pipeline = kind.split(',')[0]
        assert self.graph.set_parameter(POLICY, 'pipeline', pipeline).successful
        time.sleep(SETTLE_S)
        before, begin = self.taken_over, time.monotonic()
        self.ages_ms.clear()
        time.sleep(COUNT_S)
        rate_hz = (self.taken_over - before) / (time.monotonic() - begin)
        assert rate_hz > 1.0, self.control
        return rate_hz, float(np.median(self.ages_ms))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--rounds', type=int, default=6, help='(default: 6)')
    parser.add_argument('--denoise-steps', type=int, default=4, help='(default: 4)')
    parser.add_argument('--out', type=Path, help='instead of benchmark/results')
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ages: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name, quiet_domain() as made:
        bench = Bench(made, Path(name), arguments.denoise_steps)
        for round_ in range(arguments.rounds):
            for kind in in_turn(KINDS, round_):
                rate_hz, age_ms = bench.turn(kind)
                rates[kind].append(rate_hz)
                ages[kind].append(age_ms)
                print(f'{kind}: {rate_hz:.2f} chunks a second, {age_ms:.0f} ms old', flush=True)
        bench.arm.close()
    figures = {
        kind: {
            'chunks_a_second': float(np.median(rates[kind])),
            'interval': median_interval(np.array(rates[kind])),
            'observation_age_ms': float(np.median(ages[kind])),
            'of_one_request': median_ratio(rates[kind], rates[KINDS[1]]),
            'of_latency': median_ratio(rates[kind], rates[KINDS[0]]),
        }
        for kind in KINDS
    }
    write_result('open_requests', figures, ('torch', 'numpy'), out=arguments.out)
    for kind, found in figures.items():
        print(f'{kind}: {found["chunks_a_second"]:.2f} a second')
    return 0


if __name__ == '__main__':
    sys.exit(main())
