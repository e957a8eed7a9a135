"""The launch files on the real `launch` and `launch_ros`, with the real nodes.

They come with an installed ROS 2 and are not on the package index, so these tests are skipped in
an environment of wheels. What the launch files show is tested there by starting the same
executables with the same parameter files as plain processes.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from graph import SENSOR, Graph, graph
from sensor_msgs.msg import JointState

pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)
from launch import LaunchContext
from launch.actions import DeclareLaunchArgument
from launch.launch_description_sources import get_launch_description_from_python_launch_file

ROOT = Path(__file__).parents[2]
DEMO = ROOT / 'engines' / 'demo'
PROFILES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')


@contextmanager
def launched(file: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The launch file in a session of its own, ended by Ctrl-C and never left behind."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name('launch_file.py')), file, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            press_ctrl_c(process)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """As in a terminal: the launch process and all nodes get the signal."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.fixture
def peer() -> Iterator[Graph]:
    with graph() as made:
        yield made


def wait_active(peer: Graph, *nodes: str) -> None:
    for node in nodes:
        # Loading PyTorch alone can take a busy machine half a minute.
        peer.wait_for(
            lambda node=node: peer.state(node) == 'active',
            f'{node} to be active',
            timeout_s=120.0,
        )


def load(name: str) -> Any:
    file = ROOT / 'launch' / name
    spec = importlib.util.spec_from_file_location(file.stem.replace('.', '_'), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize('file', ['vla.launch.py', 'demo.launch.py'])
def test_arguments_are_declared_with_a_description(file: str) -> None:
    description = get_launch_description_from_python_launch_file(str(ROOT / 'launch' / file))
    arguments = {a.name: a for a in description.entities if isinstance(a, DeclareLaunchArgument)}
    wanted = {
        'bundle',
        'backend',
        'params_file',
        'namespace',
        'use_sim_time',
        'replan_interval',
        'cfg_beta',
        'autostart',
    }
    assert set(arguments) == wanted | ({'robot'} if file == 'vla.launch.py' else set())
    assert all(argument.description for argument in arguments.values())


@pytest.mark.parametrize(
    ('environment', 'is_set'),
    [
        ({}, True),
        ({'RMW_IMPLEMENTATION': 'rmw_fastrtps_dynamic_cpp'}, True),
        ({'RMW_IMPLEMENTATION': 'rmw_cyclonedds_cpp'}, False),
        ({'FASTDDS_DEFAULT_PROFILES_FILE': 'mine.xml'}, False),
        ({'FASTRTPS_DEFAULT_PROFILES_FILE': 'mine.xml'}, False),
    ],
)
def test_profile_is_set_unless_the_user_has_one_or_another_middleware(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_set: bool
) -> None:
    for name in (*PROFILES, 'RMW_IMPLEMENTATION'):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    context = LaunchContext()
    for action in load('vla.launch.py').lossless_images(context):
        action.execute(context)
    set_to = {name: context.environment.get(name, '') for name in PROFILES}
    assert all(value.endswith('config/fastdds.xml') for value in set_to.values()) == is_set
    assert {k: v for k, v in context.environment.items() if k in environment} == environment


needs_demo = pytest.mark.skipif(
    not (DEMO / 'policy.yaml').is_file(), reason='this checkout has no engines/demo'
)


@pytest.mark.graph
@needs_demo
def test_demo_brings_up_robot_policy_and_executor(peer: Graph) -> None:
    states = peer.collect(JointState, 'joint_states', SENSOR)
    with launched('demo.launch.py', 'replan_interval:=3') as process:
        wait_active(peer, '/vla_policy', '/vla_executor')
        peer.wait_for(lambda: states, 'joint states of the tabletop')
        press_ctrl_c(process)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.count('process has finished cleanly') == 3, output


@pytest.mark.graph
@needs_demo
def test_nodes_are_put_into_the_namespace(peer: Graph) -> None:
    with launched('vla.launch.py', f'bundle:={DEMO}', 'robot:=tabletop', 'namespace:=left'):
        wait_active(peer, '/left/vla_policy', '/left/vla_executor')


@pytest.mark.graph
def test_without_autostart_nodes_wait_unconfigured(peer: Graph) -> None:
    with launched('vla.launch.py', f'bundle:={DEMO}', 'robot:=tabletop', 'autostart:=false'):
        assert peer.state('/vla_policy') == 'unconfigured'
        assert peer.state('/vla_executor') == 'unconfigured'


@pytest.mark.graph
def test_a_bundle_that_is_not_there_ends_the_launch_and_says_so(tmp_path: Path) -> None:
    missing = tmp_path / 'no_bundle'
    with launched('vla.launch.py', f'bundle:={missing}', 'robot:=tabletop') as process:
        output, _ = process.communicate(timeout=120)
    assert 'could not be configured; its own error is above' in output
    assert str(missing) in output


@pytest.mark.graph
@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('robot:=so100',), "did you mean 'so101'?"),
        (('robot:=so101', 'replan_interval:=many'), 'replan_interval:=many: expected a whole'),
        (('robot:=so101', 'autostart:=maybe'), 'autostart:=maybe: expected true or false'),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple[str, ...], message: str) -> None:
    with launched('vla.launch.py', 'bundle:=.', *arguments) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert message in output
