"""Delays of the executor's ticks and of a camera while parameters are read beside a moving arm.

The graph stays on this machine (`LOCALHOST`). Two real executors move the same robot side by side
at 100 Hz: one with shared memory, as ROS 2 gives it there, one as shipped (UDP alone). A driver
publishes 480x640 images at 30 Hz to one listener. Turn by turn nobody calls, or a process joins as
`ros2 param get` does, reads a parameter of each executor and leaves, with ROS 2's own shared memory
or on the profile without it. Another process sleeps and wakes at 100 Hz and does nothing else: what
delays it too is the machine, not the graph.

A delay is a time of 40 ms or more between two commands, by the executor's own stamps: a tick that
is late by 30 ms or more. It counts as the machine's where the sleeper was late at the same time. A
held image is one that came 0.2 s or more after the image before it, by the driver's own stamps. Ten
turns are 200 calls, and take less than four minutes.

    python benchmark/live_changes.py [--turns 10]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from parts.measurement import write_result
from parts.three_cameras import (
    CAMERA,
    PACKAGES,
    PROFILE_VARIABLES,
    PROFILES,
    ROOT,
    quiet_domain,
    start_executor,
    use_profile,
)

# Beside the helpers that three_cameras makes importable.
from tabletop_policy import write_tabletop_policy  # isort: skip
from velocity_robot import write_velocity_robot  # isort: skip

from vla_runtime.processes.parent_death import dies_with_this_process

DELAY_S = 0.04
HELD_S = 0.2
IMAGES_HZ = 30.0
# A turn in which nobody calls.
QUIET_S = 4.0
TOOLS = {'with shared memory': '', 'by UDP': 'fastdds_executor_localhost.xml'}
TURNS = ('nobody calls', *TOOLS)

# Prints the ROS time of each wake-up that came so late, and of the one before.
IDLER = f"""
import time
last, due = time.time(), time.monotonic()
while True:
    due += 0.01
    time.sleep(max(0.0, due - time.monotonic()))
    now = time.time()
    if now - last >= {DELAY_S}:
        print(last, now, flush=True)
        due = time.monotonic()
    last = now
"""

# Prints when each image was stamped.
LISTENER = """
import sys
import rclpy
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image
rclpy.init()
node = rclpy.create_node('listener')
def on_image(message):
    print(message.header.stamp.sec + message.header.stamp.nanosec * 1e-9, flush=True)
node.create_subscription(Image, sys.argv[1], on_image, qos_profile_sensor_data)
rclpy.spin(node)
"""

# Forks a tool at each line of its input, which is a node's name, so that none loads the machine
# with imports; prints whether an answer came.
FORKER = """
import os, sys
import rclpy
from rcl_interfaces.srv import GetParameters

def call(name):
    rclpy.init()
    node = rclpy.create_node(f'tool_{os.getpid()}', start_parameter_services=False)
    client = node.create_client(GetParameters, f'{name}/get_parameters')
    client.wait_for_service(timeout_sec=10.0)
    answer = client.call_async(GetParameters.Request(names=['control_rate_hz']))
    rclpy.spin_until_future_complete(node, answer, timeout_sec=10.0)
    print(int(answer.done()), flush=True)
    node.destroy_node()
    rclpy.shutdown()

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        call(line.strip())
        os._exit(0)
    os.waitpid(pid, 0)
    print('gone', flush=True)
"""


def child(words: Sequence[str], *, piped: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE if piped else None,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=dies_with_this_process(),
    )


def start_tools(profile: str) -> subprocess.Popen[str]:
    before = dict(os.environ)
    use_profile(False)
    if profile:
        os.environ.update(dict.fromkeys(PROFILE_VARIABLES, str(ROOT / 'config' / profile)))
        os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'SYSTEM_DEFAULT'
    try:
        return child(['-c', FORKER], piped=True)
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_parameter(forker: subprocess.Popen[str], node: str) -> bool:
    """Let a tool join, call and leave; whether an answer came."""
    assert forker.stdin is not None and forker.stdout is not None
    forker.stdin.write(f'{node}\n')
    forker.stdin.flush()
    # A tool that could not join has nothing to say but that it is gone.
    answer = forker.stdout.readline().strip()
    if answer != 'gone':
        forker.stdout.readline()
    return answer == '1'


def pauses(times: np.ndarray, least_s: float) -> np.ndarray:
    """Pairs of times that follow one another and are at least so far apart."""
    return np.stack([times[:-1], times[1:]], axis=1)[np.diff(times) >= least_s]


def not_beside(pairs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Those of the pairs in whose time none of the others falls."""
    apart = (pairs[:, None, 1] < others[None, :, 0]) | (others[None, :, 1] < pairs[:, None, 0])
    return pairs[apart.all(axis=1)]


def gaps(pairs: np.ndarray, turns: Sequence[tuple[str, float, float]]) -> dict[str, list[int]]:
    """Lengths of the pairs by the kind of turn in which they ended, ms."""
    return {
        kind: sorted(
            round(1e3 * (end - begin))
            for begin, end in pairs
            if any(one == kind and since <= end <= until for one, since, until in turns)
        )
        for kind in TURNS
    }


def missing(stamps: np.ndarray, turns: Sequence[tuple[str, float, float]]) -> dict[str, int]:
    """Images of each kind of turn that did not arrive."""
    return {
        kind: sum(
            max(
                0,
                int(IMAGES_HZ * (until - since))
                - int(((stamps >= since) & (stamps < until)).sum()),
            )
            for one, since, until in turns
            if one == kind
        )
        for kind in TURNS
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--turns', type=int, default=10, help='of each kind (default: 10)')
    parser.add_argument('--calls', type=int, default=10, help='of each turn (default: 10)')
    parser.add_argument('--out', type=Path, help='instead of benchmark/results')
    arguments = parser.parse_args()
    load, turns = [os.getloadavg()[0]], []
    answered = dict.fromkeys(TOOLS, 0)
    with tempfile.TemporaryDirectory() as name, quiet_domain() as graph:
        folder = Path(name)
        write_tabletop_policy(folder / 'bundle', velocities=True)
        write_velocity_robot(folder / 'robot.yaml')
        robots = {one: start_executor(graph, one, folder) for one in PROFILES}
        use_profile(True)
        children = [
            child(
                [str(ROOT / 'benchmark/parts/camera_driver.py'), CAMERA, '--rate', str(IMAGES_HZ)]
            ),
            idler := child(['-c', IDLER]),
        ]
        # A file, because nobody empties a pipe meanwhile.
        with open(folder / 'images', 'w', encoding='utf-8') as images:
            listener = subprocess.Popen(
                [sys.executable, '-c', LISTENER, CAMERA],
                stdout=images,
                preexec_fn=dies_with_this_process(),
            )
        forkers = {kind: start_tools(profile) for kind, profile in TOOLS.items()}
        children += [listener, *forkers.values()]
        graph.wait_for(lambda: (folder / 'images').stat().st_size, 'images')
        try:
            for turn in range(arguments.turns * len(TURNS)):
                kind, begin = TURNS[turn % len(TURNS)], time.time()
                if kind not in TOOLS:
                    time.sleep(QUIET_S)
                for call in range(arguments.calls if kind in TOOLS else 0):
                    node = f'/{list(PROFILES)[call % len(PROFILES)]}/vla_executor'
                    answered[kind] += read_parameter(forkers[kind], node)
                turns.append((kind, begin, time.time()))
                load.append(os.getloadavg()[0])
        finally:
            for one in children:
                one.kill()
                one.wait()
        assert idler.stdout is not None
        idle = np.array([line.split() for line in idler.stdout], dtype=np.float64).reshape(-1, 2)
        stamps = np.array((folder / 'images').read_text(encoding='utf-8').split(), dtype=np.float64)
        ticks = {one: pauses(np.array(robots[one].tick_ns) * 1e-9, DELAY_S) for one in PROFILES}
        figures: dict[str, Any] = {
            'calls of each kind': arguments.turns * arguments.calls,
            'calls': len(TOOLS) * arguments.turns * arguments.calls,
            'answered': answered,
            'seconds': {
                kind: round(sum(until - since for one, since, until in turns if one == kind))
                for kind in TURNS
            },
            'load_average_1min': [round(min(load), 1), round(max(load), 1)],
            'delays_ms': {
                **{f'executor, {one}': gaps(ticks[one], turns) for one in PROFILES},
                'a process that only sleeps': gaps(idle, turns),
            },
            'delays_that_the_sleeper_had_not_ms': {
                f'executor, {one}': gaps(not_beside(ticks[one], idle), turns) for one in PROFILES
            },
            'held_images_ms': gaps(pauses(stamps, HELD_S), turns),
            'images_missing': missing(stamps, turns),
        }
    alone = figures['delays_that_the_sleeper_had_not_ms']
    print('| who | turn | delays | which the sleeper had not | longest of these, ms |')
    print('|---|---|---:|---:|---:|')
    for who, by_kind in {**figures['delays_ms'], 'camera': figures['held_images_ms']}.items():
        for kind, found in by_kind.items():
            own = alone[who][kind] if who in alone else found
            print(f'| {who} | {kind} | {len(found)} | {len(own)} | {max(own, default=0)} |')
    print(figures['answered'], figures['images_missing'])
    print(write_result('live_changes', figures, PACKAGES, arguments.out).name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
