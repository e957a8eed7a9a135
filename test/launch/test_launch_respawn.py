"""`respawn:=true`: a policy node that dies is started again, and the robot moves on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip(
    'launch_pytest', reason='launch_pytest comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)

import launch_pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, graph
from launch import LaunchDescription
from launch_pytest.actions import ReadyToTest
from launch_robot import FollowingRobot, write_files
from launch_tools import children, included, newest_values, start_motion, wait_active

pytestmark = pytest.mark.graph


@launch_pytest.fixture(scope='module')
def respawning(tmp_path_factory: pytest.TempPathFactory) -> LaunchDescription:
    files = write_files(tmp_path_factory.mktemp('launch'))
    runtime = included('vla.launch.py', **files.arguments(instruction='wave', respawn='true'))
    return LaunchDescription([runtime, ReadyToTest()])


@pytest.fixture(scope='module')
def peer(respawning: Any) -> Iterator[Graph]:
    with graph() as made:
        yield made


@pytest.mark.launch(fixture=respawning)
def test_the_robot_holds_without_a_policy_and_moves_on_with_the_next_one(peer: Graph) -> None:
    robot = FollowingRobot(peer)
    diagnostics = peer.collect(DiagnosticArray, '/diagnostics')
    wait_active(peer, '/vla_policy', '/vla_executor')
    start_motion(peer)
    peer.wait_for(lambda: robot.moves, 'motion')
    (first,) = children('policy_node')
    os.kill(first, signal.SIGKILL)
    peer.wait_for(lambda: robot.gripper[-10:] == [0.0] * 10, 'a hold')
    peer.wait_for(lambda: robot.arm[-10:] == [robot.arm[-1]] * 10, 'a hold')
    peer.wait_for(lambda: (now := children('policy_node')) and now != [first], 'another one')
    # No second `~/start`: the chunks of the new one are executed as they come.
    peer.wait_for(lambda: robot.moves, 'motion')
    status = newest_values(diagnostics, '/vla_executor: chunks')
    peer.wait_for(
        lambda: newest_values(diagnostics, '/vla_executor: chunks')['policy_restarts'] == '1',
        f'the restart to be counted: {status}',
    )
