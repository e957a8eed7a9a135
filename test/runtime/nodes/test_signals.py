"""Ctrl-C, SIGTERM and a closed terminal on the real executables: the hold is the last command.

A terminal signals the whole process group, and `ros2 launch` then sends a SIGINT of its own. The
slow tests go through all sequences of signals until 20 were sent.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph import LATCHED, Graph, graph
from paths import ROOT
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import Trigger
from tabletop_policy import write_tabletop_policy
from trajectory_msgs.msg import JointTrajectory
from velocity_robot import VelocityRobot, write_velocity_robot

from vla_runtime.processes.parent_death import LAUNCH_VARIABLE, dies_with_this_process
from vla_tabletop.sim.world import JOINT_NAMES

pytestmark = pytest.mark.graph

EXECUTABLES = Path(sys.executable).parent
TIMEOUT_S = 60.0
# A busy machine must not look like a fault here.
PATIENT = ('-p', 'max_state_age_s:=2.0', '-p', 'tick_timeout_s:=1.0', '-p', 'clock_jump_s:=5.0')
ARM = JOINT_NAMES[:5]

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# Signals to the group and the pauses between them; None goes on every 5 ms to the end.
SEQUENCES: dict[str, tuple[Any, ...]] = {
    'twice, 50 ms apart': (INT, 0.05, INT),
    'without a pause to the end': (INT, None),
    'a closed terminal': (HUP, 0.0, HUP),
    'twice at once': (INT, 0.0, INT),
    'twice, 1 ms apart': (INT, 0.001, INT),
    'twice, 0.3 s apart': (INT, 0.3, INT),
    'SIGINT, then SIGTERM': (INT, 0.1, TERM),
}
# Turns of `./run test`, of `--all`, each sequence once, and of the slow tests.
BY_DEFAULT, EACH_ONCE, TURNS = 2, len(SEQUENCES), 20


def marks_of(turn: int) -> list[pytest.MarkDecorator]:
    if turn < BY_DEFAULT:
        return []
    return [pytest.mark.thorough if turn < EACH_ONCE else pytest.mark.slow]


class Group:
    """Executables in one process group, as one terminal has them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._id = 0
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, *arguments: str) -> None:
        leader = self._id
        tie = dies_with_this_process()
        with (self._logs / name).open('wb') as log:
            process = subprocess.Popen(
                [str(EXECUTABLES / name), '--ros-args', *arguments],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: (os.setpgid(0, leader), tie()),
            )
        self._id = leader or process.pid
        self._processes.append((name, process))

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._id, number)

    @property
    def running(self) -> bool:
        return any(process.poll() is None for _, process in self._processes)

    def go_through(self, sequence: tuple[Any, ...]) -> None:
        """Send the signals; what is a number between them is a pause."""
        for step in sequence:
            if isinstance(step, signal.Signals):
                self.signal(step)
            elif step is not None:
                time.sleep(step)
            else:
                end_s = time.monotonic() + TIMEOUT_S
                while self.running and time.monotonic() < end_s:
                    self.signal(INT)
                    time.sleep(0.005)

    def require_clean_ends(self) -> None:
        for name, process in self._processes:
            code = process.wait(TIMEOUT_S)
            said = (self._logs / name).read_text(encoding='utf-8')
            assert code == 0, f'{name}: exit code {code}\n{said}'
            assert 'Traceback' not in said, f'{name}\n{said}'
            assert 'Exception' not in said, f'{name}\n{said}'

    def kill(self) -> None:
        for _, process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    try:
        yield made
    finally:
        made.kill()


# ---------------------------------------------------------------- all three nodes


def files(bundle: Path, robot: str) -> tuple[str, ...]:
    return ('-p', f'bundle:={bundle}', '-p', f'robot:={robot}')


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tabletop_policy(tmp_path_factory.mktemp('bundle') / 'tabletop', reach_rad=0.2)


def activate(made: Graph, *nodes: str) -> None:
    for node in nodes:
        assert made.transition(node, 'configure')
        assert made.transition(node, 'activate')


def start_motion(made: Graph) -> None:
    def starts() -> bool:
        return bool(made.call(Trigger, '/vla_executor/start', Trigger.Request()).success)

    made.wait_for(starts, 'a start')


def positions(message: JointTrajectory) -> list[float]:
    return list(message.points[-1].positions)


def moves(rows: list[list[float]]) -> bool:
    """Return whether the newest commands differ from each other."""
    return len(rows) > 20 and bool((np.abs(np.diff(rows[-10:], axis=0)).max(axis=1) > 0).all())


@pytest.mark.parametrize(
    'sequence',
    [
        pytest.param(name, marks=marks_of(turn), id=f'{turn}-{name}')
        for turn, name in enumerate(itertools.islice(itertools.cycle(SEQUENCES), TURNS))
    ],
)
def test_all_three_nodes_end_cleanly_with_a_hold(bundle: Path, group: Group, sequence: str) -> None:
    with graph() as made:
        arm = made.collect(JointTrajectory, 'arm_controller/joint_trajectory')
        gripper = made.collect(Float64MultiArray, 'gripper_controller/commands')
        instruction = made.node.create_publisher(String, 'vla_policy/instruction', LATCHED)
        instruction.publish(String(data='touch the red block'))
        group.start('tabletop_node')
        policy, executor = (
            str(ROOT / 'config' / f'{name}.yaml') for name in ('policy', 'executor')
        )
        group.start('policy_node', '--params-file', policy, *files(bundle, 'tabletop'))
        group.start(
            'executor_node', '--params-file', executor, *files(bundle, 'tabletop'), *PATIENT
        )
        activate(made, '/vla_policy', '/vla_executor')
        start_motion(made)
        made.wait_for(lambda: moves([positions(m) for m in list(arm)]), 'motion')
        group.go_through(SEQUENCES[sequence])
        group.require_clean_ends()
        made.wait_for(lambda: positions(arm[-1]) == positions(arm[-2]), 'a hold', timeout_s=10.0)
        made.wait_for(lambda: gripper[-1].data == gripper[-2].data, 'a hold', timeout_s=10.0)


# ---------------------------------------------------------------- velocity and position outputs


def test_in_a_simulated_world_a_signal_brakes_velocities_within_their_limits(
    tmp_path: Path, group: Group
) -> None:
    robot = write_velocity_robot(tmp_path / 'rates.yaml')
    robot.write_text(robot.read_text('utf-8').replace('ration: 40.0', 'ration: 2.0'), 'utf-8')
    bundle = write_tabletop_policy(tmp_path / 'rates', velocities=True)
    with graph() as made:
        rates = VelocityRobot(made)
        clock = made.node.create_publisher(Clock, '/clock', 10)
        made.node.create_timer(
            0.01, lambda: clock.publish(Clock(clock=made.node.get_clock().now().to_msg()))
        )
        arguments = (*files(bundle, str(robot)), *PATIENT, '-p', 'use_sim_time:=true')
        group.start('executor_node', *arguments)
        activate(made, '/vla_executor')
        start_motion(made)
        made.wait_for(lambda: len(rates.arm) > 20 and rates.arm[-1][0] > 0.3, 'motion')
        before = len(rates.tick_ns) - 1
        group.go_through((signal.SIGINT,))
        group.require_clean_ends()
        made.wait_for(lambda: not any(rates.arm[-1]), 'zero velocity', timeout_s=10.0)
        made.wait_for(lambda: not any(rates.gripper[-1]), 'zero velocity', timeout_s=10.0)
    # Within the acceleration, however late a tick is on a busy machine; two ticks' time in doubt.
    slowed = -np.diff([row[0] for row in rates.gripper[before:]])
    most = 2.0 * (np.diff(rates.tick_ns[before:]) * 1e-9 + 0.02)
    assert len(slowed) > 1 and (slowed <= most).all()


# ---------------------------------------------------------------- a launch that is killed

# Starts a node as the launch files do, and prints its process id.
LAUNCH = f"""
import os, subprocess, sys
environment = {{**os.environ, '{LAUNCH_VARIABLE}': str(os.getpid())}}
node = subprocess.Popen(sys.argv[1:], env=environment, stdout=sys.stderr)
print(node.pid, flush=True)
node.wait()
"""


def test_nodes_of_a_launch_that_is_killed_end_with_a_hold(tmp_path: Path) -> None:
    robot = write_velocity_robot(tmp_path / 'rates.yaml')
    bundle = write_tabletop_policy(tmp_path / 'rates', velocities=True)
    command = [str(EXECUTABLES / 'executor_node'), '--ros-args', *files(bundle, str(robot))]
    with graph() as made, (tmp_path / 'log').open('w') as log:
        rates = VelocityRobot(made)
        launch = subprocess.Popen(
            [sys.executable, '-c', LAUNCH, *command, *PATIENT],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=dies_with_this_process(),
        )
        assert launch.stdout is not None
        node = os.pidfd_open(int(launch.stdout.readline()))
        try:
            activate(made, '/vla_executor')
            start_motion(made)
            made.wait_for(lambda: moves(list(rates.arm)), 'motion')
            launch.kill()
            launch.wait()
            ended, _, _ = select.select([node], [], [], TIMEOUT_S)
            assert ended, (tmp_path / 'log').read_text(encoding='utf-8')
            made.wait_for(lambda: not any(rates.arm[-1]), 'zero velocity', timeout_s=10.0)
        finally:
            launch.kill()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(node, signal.SIGKILL)
            os.close(node)
