"""`record:=FOLDER`: what a launch records is replayed bit for bit once it has ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    'launch_pytest', reason='launch_pytest comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)
pytest.importorskip('rosbags', reason='recording needs the Python package rosbags')

import launch_pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, graph
from launch import LaunchDescription
from launch_pytest.actions import ReadyToTest
from launch_robot import FollowingRobot, write_files
from launch_tools import included, newest_values, start_motion, wait_active

pytestmark = pytest.mark.graph

CHUNKS = 5


@pytest.fixture(scope='module')
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('recordings') / 'first'


@launch_pytest.fixture(scope='module')
def recorded(tmp_path_factory: pytest.TempPathFactory, bag: Path) -> LaunchDescription:
    files = write_files(tmp_path_factory.mktemp('launch'))
    runtime = included('vla.launch.py', **files.arguments(instruction='wave', record=str(bag)))
    return LaunchDescription([runtime, ReadyToTest()])


@pytest.fixture(scope='module')
def peer(recorded: Any) -> Iterator[Graph]:
    with graph() as made:
        yield made


@pytest.mark.launch(fixture=recorded)
def test_the_recorder_writes_while_the_robot_moves(peer: Graph) -> None:
    robot = FollowingRobot(peer)
    diagnostics = peer.collect(DiagnosticArray, '/diagnostics')
    wait_active(peer, '/vla_policy', '/vla_executor')
    peer.wait_for(lambda: recorder(diagnostics), 'the recorder')
    start_motion(peer)
    peer.wait_for(lambda: robot.moves, 'motion')
    # Chunks alone do not replay: the recorder hears best-effort cameras, two frames a chunk.
    begun = int(recorder(diagnostics)['frames_used'])
    peer.wait_for(
        lambda: int(recorder(diagnostics)['frames_used']) >= begun + 2 * (CHUNKS + 1),
        f'{CHUNKS} chunks with frames in the bag',
    )


def recorder(diagnostics: list[DiagnosticArray]) -> dict[str, str]:
    return newest_values(diagnostics, '/vla_recorder: recording')


@pytest.mark.launch(fixture=recorded, shutdown=True)
def test_the_bag_is_closed_and_every_inference_in_it_is_repeated(bag: Path) -> None:
    assert (bag / 'metadata.yaml').is_file()
    done = subprocess.run(
        [sys.executable, '-m', 'vla_runtime', 'replay', str(bag)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    replayed, compared, same = (
        int(words.split()[-1]) for words in done.stdout.splitlines()[1].split(',')
    )
    assert replayed == compared == same > CHUNKS, done.stdout
