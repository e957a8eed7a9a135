"""A launch that is ended: the hold is the last command, and both nodes end with exit code 0.

For `launch_testing`: the first class runs while the nodes run, the second one after their end.
"""

from __future__ import annotations

import atexit
import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    'launch_testing', reason='launch_testing comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)

import launch_testing
import launch_testing.actions
from graph import Graph, graph
from launch import LaunchDescription
from launch_robot import FollowingRobot, write_files
from launch_testing.asserts import assertExitCodes
from launch_tools import included, start_motion, wait_active

# From before the launch until the last test after it; closed even when that is never reached.
KEPT = ExitStack()
atexit.register(KEPT.close)


@pytest.mark.launch_test
@pytest.mark.graph
def generate_test_description() -> tuple[LaunchDescription, dict[str, Any]]:
    files = write_files(Path(KEPT.enter_context(tempfile.TemporaryDirectory())))
    peer = KEPT.enter_context(graph())
    context = {'peer': peer, 'robot': FollowingRobot(peer)}
    runtime = included('vla.launch.py', **files.arguments(instruction='wave'))
    return LaunchDescription([runtime, launch_testing.actions.ReadyToTest()]), context


class WhileItRuns(unittest.TestCase):
    def test_the_robot_moves(self, peer: Graph, robot: FollowingRobot) -> None:
        wait_active(peer, '/vla_policy', '/vla_executor')
        start_motion(peer)
        peer.wait_for(lambda: robot.moves, 'motion')


@launch_testing.post_shutdown_test()
class AfterItsEnd(unittest.TestCase):
    @classmethod
    def tearDownClass(cls) -> None:
        KEPT.close()

    def test_both_nodes_end_with_exit_code_0(self, proc_info: Any) -> None:
        assert {name.rpartition('-')[0] for name in proc_info.process_names()} == {
            'policy_node',
            'executor_node',
        }
        assertExitCodes(proc_info)

    def test_neither_ends_in_an_exception(self, proc_output: Any) -> None:
        said = ''.join(event.text.decode() for event in proc_output)
        assert 'Traceback' not in said and '[FATAL]' not in said, said

    def test_the_hold_is_the_last_command(self, peer: Graph, robot: FollowingRobot) -> None:
        # Both publishers are gone, so nothing follows what has arrived when all of it has.
        node = peer.node
        for topic in ('/arm/joint_trajectory', '/gripper/rate'):
            peer.wait_for(lambda topic=topic: not node.count_publishers(topic), f'end of {topic}')
        peer.wait_for(lambda: robot.gripper[-1] == 0.0, 'a hold of the gripper', timeout_s=10.0)
        peer.wait_for(lambda: robot.arm[-1] == robot.arm[-2], 'a hold of the arm', timeout_s=10.0)
        # No jump on the way there: a step of 10 ms at the robot file's 10 rad/s.
        assert np.abs(np.diff(robot.arm[-50:], axis=0)).max() < 0.1
