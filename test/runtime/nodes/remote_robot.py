"""Policy and executor node with the policy on a server, and the arm that they move."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, statuses
from launch_robot import FollowingRobot, write_files
from std_srvs.srv import Trigger

from vla_runtime.messages.diagnostics import values_of

POLICY, EXECUTOR = '/vla_policy', '/vla_executor'
# A busy machine must not look like a fault of the robot.
PATIENT = {
    'policy': {'max_observation_age_s': 5.0, 'sync_tolerance_s': 1.0},
    'executor': {
        'max_state_age_s': 5.0,
        'tick_timeout_s': 1.0,
        'clock_jump_s': 5.0,
        'max_observation_age_s': 10.0,
    },
}


def start_node(made: Graph, role: str, robot: Path, url: str, **parameters: object) -> None:
    given = {'server': url, 'robot': robot, 'server_timeout_s': 1.0, **PATIENT[role], **parameters}
    words = [word for name, value in given.items() for word in ('-p', f'{name}:={value}')]
    module = f'vla_runtime.nodes.{role}.node'
    made.start(module, '--ros-args', *words, '-p', 'autostart:=true', name=role)


class Running:
    """Both nodes, the arm that they move, and what they say."""

    def __init__(self, made: Graph, robot: Path, url: str, **parameters: object) -> None:
        self.graph = made
        self.arm = FollowingRobot(made)
        self.diagnostics = made.collect(DiagnosticArray, '/diagnostics')
        start_node(made, 'policy', robot, url, backend='remote', instruction='wave', **parameters)
        start_node(made, 'executor', robot, url, replan_interval=4, **parameters)
        for node in (POLICY, EXECUTOR):
            made.wait_for(lambda node=node: made.state(node) == 'active', f'{node} to be active')

    def start(self) -> None:
        request = Trigger.Request()
        done = lambda: self.graph.call(Trigger, f'{EXECUTOR}/start', request).success  # noqa: E731
        self.graph.wait_for(done, 'a start')
        self.move()

    def move(self) -> None:
        """Wait until commands that come from now on move the arm."""
        self.arm.arm.clear()
        self.arm.gripper.clear()
        self.graph.wait_for(lambda: self.arm.moves, 'motion')

    def hold(self) -> None:
        """Wait until the last commands are all the same."""

        def still() -> bool:
            arm = np.array(self.arm.arm[-30:])
            return len(arm) == 30 and not np.ptp(arm, axis=0).any()

        self.arm.arm.clear()
        self.graph.wait_for(still, 'a hold')

    def say(self, node: str, condition: str, words: str) -> dict[str, str]:
        """Wait for a status with these words that comes from now on; its values."""
        self.diagnostics.clear()

        def found() -> dict[str, str] | None:
            said = list(statuses(self.diagnostics, f'{node}: {condition}'))
            status = next((one for one in said if words in one.message), None)
            return None if status is None else {**values_of(status), 'text': status.message}

        return self.graph.wait_for(found, f'{condition}: {words}')


def remote_files(folder: Path, outage_s: float = 600.0) -> tuple[Path, Path]:
    """Write a bundle, and a robot file with `restart_after_outage_s`; by default none is long."""
    files = write_files(folder)
    text = files.robot.read_text(encoding='utf-8')
    files.robot.write_text(f'{text}restart_after_outage_s: {outage_s}\n', encoding='utf-8')
    return files.bundle, files.robot
