"""Delays of the executor's ticks when other processes join the graph, leave it, or are killed.

Two real executors move the same robot side by side at 100 Hz: one on the profile of the cameras
(shared memory and UDP), one as shipped (UDP alone). A camera driver
publishes 480x640 images. Turn by turn clients of images and diagnostics come and end in order, or
come and are killed with -9, or only processes without ROS come and go. A third process sleeps and
wakes at 100 Hz and does nothing else: what stalls it too is the machine, not the graph.

A stall is a time of 0.25 s or more between two commands, by the executor's own stamps.

    python benchmark/newcomers.py [--turns 12]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measurement import write_result
from std_srvs.srv import Trigger
from three_cameras import PACKAGES, PROFILE_VARIABLES, ROOT, Graph, quiet_domain, use_profile

# Beside the helpers that three_cameras makes importable.
from tabletop_policy import write_tabletop_policy  # isort: skip
from velocity_robot import VelocityRobot, write_velocity_robot  # isort: skip

from vla_runtime.processes.parent_death import dies_with_this_process

CAMERA = '/cameras/top'
STALL_S = 0.25
TURNS = ('nobody joins', 'clients end in order', 'clients are killed')
CLIENTS = 5
# As the machine's other ROS programs must not join, the graph is one of this machine.
PROFILES = {'shared_memory': 'fastdds.xml', 'udp': 'fastdds_executor_localhost.xml'}

# Wakes at 100 Hz and prints the ROS time of each wake-up that came 0.25 s or more after the last.
IDLER = """
import time
last, due = time.time(), time.monotonic()
while True:
    due += 0.01
    time.sleep(max(0.0, due - time.monotonic()))
    now = time.time()
    if now - last >= 0.25:
        print(last, now, flush=True)
        due = time.monotonic()
    last = now
"""

# Forks a newcomer at each line of its input, so that none loads the machine with imports.
FORKER = """
import os, random, sys, time
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.qos import qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image

def live(kind):
    if kind == 'nobody joins':
        time.sleep(1000.0)
    import signal
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(1))
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node(f'client_{os.getpid()}')
    # As the command-line tools do: look at the graph for a while, then subscribe.
    end_s = time.monotonic() + 1.2 + random.random()
    while time.monotonic() < end_s:
        rclpy.spin_once(node, timeout_sec=0.05)
    node.create_subscription(Image, sys.argv[1], lambda _: None, qos_profile_sensor_data)
    node.create_subscription(DiagnosticArray, '/diagnostics', lambda _: None, 10)
    while not stop:
        rclpy.spin_once(node, timeout_sec=0.05)
    node.destroy_node()
    rclpy.shutdown()

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        live(line.strip())
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print('gone', flush=True)
"""


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
            'vla_runtime.ros.executor.node',
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


def take_turn(
    forkers: list[subprocess.Popen[str]], kind: str, seconds: float
) -> tuple[float, float]:
    """Processes come and go; from when to when, ROS time."""
    begin, pids = time.time(), []
    for forker in forkers:
        assert forker.stdin is not None and forker.stdout is not None
        forker.stdin.write(f'{kind}\n')
        forker.stdin.flush()
        pids.append(int(forker.stdout.readline()))
        time.sleep(0.1)
    time.sleep(seconds - 1.0)
    for pid in pids:
        os.kill(pid, signal.SIGINT if kind == 'clients end in order' else signal.SIGKILL)
    for forker in forkers:
        assert forker.stdout is not None
        forker.stdout.readline()
    time.sleep(1.0)
    return begin, time.time()


def stalls(ends: np.ndarray, turns: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Count the turns of each kind that had a stall, and list every stall.

    Args:
        ends: (n, 2) ROS time at which each stall began and was over.
    """
    figures = {}
    for kind in TURNS:
        mine = [(begin, end) for one, begin, end in turns if one == kind]
        lengths = [
            sorted(float(over - since) for since, over in ends if begin <= over <= end)
            for begin, end in mine
        ]
        figures[kind] = {
            'turns': len(mine),
            'turns_with_a_stall': sum(map(bool, lengths)),
            'stalls_s': [round(length, 3) for turn in lengths for length in turn],
        }
    return figures


def of_ticks(tick_ns: list[int]) -> np.ndarray:
    times = np.array(tick_ns) * 1e-9
    where = np.flatnonzero(np.diff(times) >= STALL_S)
    return np.stack([times[where], times[where + 1]], axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--turns', type=int, default=12, help='of each kind (default: 12)')
    parser.add_argument('--seconds', type=float, default=5.0, help='of each turn (default: 5)')
    parser.add_argument(
        '--newcomers',
        choices=('shipped', 'default'),
        default='default',
        help="the client's profile (default: Fast DDS's default, as in a terminal)",
    )
    parser.add_argument('--out', type=Path, help='instead of benchmark/results')
    arguments = parser.parse_args()
    load = [os.getloadavg()]
    with tempfile.TemporaryDirectory() as name, quiet_domain() as graph:
        folder = Path(name)
        write_tabletop_policy(folder / 'bundle', velocities=True)
        write_velocity_robot(folder / 'robot.yaml')
        robots = {one: start_executor(graph, one, folder) for one in PROFILES}
        use_profile(True)
        children = [
            subprocess.Popen(
                [sys.executable, str(ROOT / 'benchmark/camera_driver.py'), CAMERA],
                preexec_fn=dies_with_this_process(),
            ),
            idler := subprocess.Popen(
                [sys.executable, '-c', IDLER],
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=dies_with_this_process(),
            ),
        ]
        use_profile(arguments.newcomers == 'shipped')
        forkers = [
            subprocess.Popen(
                [sys.executable, '-c', FORKER, CAMERA],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=dies_with_this_process(),
            )
            for _ in range(CLIENTS)
        ]
        children += forkers
        turns = []
        try:
            for turn in range(arguments.turns * len(TURNS)):
                kind = TURNS[turn % len(TURNS)]
                turns.append((kind, *take_turn(forkers, kind, arguments.seconds)))
                load.append(os.getloadavg())
        finally:
            for child in children:
                child.kill()
                child.wait()
        assert idler.stdout is not None
        idle = np.array([line.split() for line in idler.stdout], dtype=np.float64).reshape(-1, 2)
        figures: dict[str, Any] = {
            'clients_profile': arguments.newcomers,
            'load_average_1min': [round(one[0], 1) for one in load],
            **{one: stalls(of_ticks(robots[one].tick_ns), turns) for one in PROFILES},
            'a process that only sleeps': stalls(idle, turns),
        }
    print('| who | turn | with a stall | longest, s |')
    print('|---|---|---:|---:|')
    for who in (*PROFILES, 'a process that only sleeps'):
        for kind, one in figures[who].items():
            print(
                f'| {who} | {kind} | {one["turns_with_a_stall"]} of {one["turns"]} '
                f'| {max(one["stalls_s"], default=0.0):.3f} |'
            )
    print(write_result('newcomers', figures, PACKAGES, arguments.out).name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
