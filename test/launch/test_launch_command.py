"""`ros2 launch` as a person runs it: its arguments, what it refuses, and Ctrl-C in its terminal.

Launch runs in a process group of its own here. What the nodes do once they run is in the other
modules of this folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from graph import LATCHED, SENSOR, Graph, graph
from pages import text_of
from paths import ROOT
from rcl_interfaces.srv import GetParameters
from rclpy.parameter import parameter_value_to_python
from sensor_msgs.msg import JointState
from std_msgs.msg import String

pytest.importorskip(
    'launch_ros', reason='launch_ros comes with an installed ROS 2, not with the wheels'
)
from launch import LaunchContext
from launch.actions import DeclareLaunchArgument
from launch.launch_description_sources import get_launch_description_from_python_launch_file
from launch_robot import FollowingRobot, write_files
from launch_tools import newest_values, start_motion, wait_active

from vla_runtime.nodes.middleware import PROFILE_VARIABLES
from vla_runtime.nodes.parameter_table import ParameterError

DEMO = ROOT / 'engines' / 'demo'


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
        'server',
        'server_key_file',
        'server_ca_file',
        'backend',
        'device',
        'instruction',
        'params_file',
        'namespace',
        'use_sim_time',
        'replan_interval',
        'cfg_beta',
        'dry_run',
        'autostart',
        'respawn',
        'record',
        'record_images',
        'tasks',
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
    for name in (*PROFILE_VARIABLES, 'RMW_IMPLEMENTATION'):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    context = LaunchContext()
    for action in load('vla.launch.py').set_profile(context):
        action.execute(context)
    set_to = {name: context.environment.get(name, '') for name in PROFILE_VARIABLES}
    assert all(value.endswith('config/fastdds.xml') for value in set_to.values()) == is_set
    assert {k: v for k, v in context.environment.items() if k in environment} == environment


@pytest.mark.graph
@pytest.mark.parametrize(
    ('argument', 'words'),
    # What is said of every name and value is in `test_launch_arguments`.
    [
        ('replan_intervall:=4', ("did you mean 'replan_interval'?",)),
        ('record_images:=all', ('give record:=true too',)),
        ('dry_run:=maybe', ('dry_run:=maybe: expected true or false',)),
    ],
)
def test_an_argument_that_would_do_nothing_ends_the_launch_before_anything_starts(
    argument: str, words: tuple[str, ...]
) -> None:
    with launched('vla.launch.py', 'bundle:=.', 'robot:=tabletop', argument) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert all(word in output for word in words), output
    assert 'process started' not in output


@pytest.mark.graph
def test_the_demo_takes_no_other_robot() -> None:
    with launched('demo.launch.py', 'robot:=so101') as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and 'the demo drives tabletop' in output


def test_arguments_of_a_persons_own_launch_file_are_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_file, context, warned = load('vla.launch.py'), LaunchContext(), []
    monkeypatch.setattr(sys, 'argv', ['ros2', 'launch', 'my_lab', 'lab.launch.py'])
    monkeypatch.setattr(launch_file, 'get_logger', lambda _: SimpleNamespace(warning=warned.append))
    for argument in launch_file.ARGUMENTS:
        context.launch_configurations[argument.name] = ''
    context.launch_configurations.update(
        robot='tabletop', respawn='false', lab='3', replan_intervall='4'
    )
    launch_file.start(context)
    assert len(warned) == 1 and "did you mean 'replan_interval'?" in warned[0]
    context.launch_configurations['max_state_age_s'] = '0.1'
    with pytest.raises(ValueError, match='forwarding=False'):
        launch_file.start(context)


@pytest.mark.parametrize(
    ('section', 'words'),
    [
        ('/vla_executor', "vla_executor is /left/vla_executor here; write '/**/vla_executor'"),
        ('/left/vla_executor', ''),
    ],
)
def test_a_namespace_that_is_pushed_by_a_launch_file_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, words: str
) -> None:
    file = tmp_path / 'mine.yaml'
    file.write_text(f'{section}: {{ros__parameters: {{replan_interval: 3}}}}', encoding='utf-8')
    launch_file, context, warned = load('vla.launch.py'), LaunchContext(), []
    logger = SimpleNamespace(warning=warned.append)
    monkeypatch.setattr(launch_file, 'get_logger', lambda _: logger)
    # What PushRosNamespace leaves to what is included below it.
    context.launch_configurations['ros_namespace'] = 'left'
    for argument in launch_file.ARGUMENTS:
        context.launch_configurations[argument.name] = ''
    context.launch_configurations.update(robot='tabletop', respawn='false')
    context.launch_configurations['params_file'] = str(file)
    with pytest.raises(ParameterError, match=re.escape(words)) if words else nullcontext():
        launch_file.start(context)
    assert warned == []


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
def test_ctrl_c_ends_both_nodes_cleanly_and_the_hold_is_the_last_command(
    peer: Graph, tmp_path: Path
) -> None:
    robot = FollowingRobot(peer)
    arguments = write_files(tmp_path).arguments(instruction='wave')
    with launched('vla.launch.py', *(f'{key}:={value}' for key, value in arguments.items())) as run:
        wait_active(peer, '/vla_policy', '/vla_executor')
        start_motion(peer)
        peer.wait_for(lambda: robot.moves, 'motion')
        # Nodes get the terminal's signal and one of launch's own, then an impatient person's.
        press_ctrl_c(run)
        press_ctrl_c(run)
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert output.count('process has finished cleanly') == 2, output
    peer.wait_for(lambda: robot.gripper[-1] == 0.0, 'a hold of the gripper', timeout_s=10.0)
    peer.wait_for(lambda: robot.arm[-1] == robot.arm[-2], 'a hold of the arm', timeout_s=10.0)


@pytest.mark.graph
def test_without_autostart_nodes_wait_unconfigured(peer: Graph) -> None:
    arguments = (f'bundle:={DEMO}', 'robot:=tabletop', 'autostart:=false', 'instruction:=no')
    with launched('vla.launch.py', *arguments):
        assert peer.state('/vla_policy') == 'unconfigured'
        assert peer.state('/vla_executor') == 'unconfigured'
        request = GetParameters.Request(names=['instruction'])
        answer = peer.call(GetParameters, '/vla_policy/get_parameters', request)
        # YAML alone would read it as false.
        assert answer.values[0].string_value == 'no'


@pytest.mark.graph
@needs_demo
def test_arguments_and_the_parameter_file_are_in_force_in_every_node(
    peer: Graph, tmp_path: Path
) -> None:
    """The file wins over defaults, and an argument over the file."""
    pytest.importorskip('rosbags', reason='recording needs the Python package rosbags')
    file = tmp_path / 'mine.yaml'
    file.write_text(
        '/**/vla_executor: {ros__parameters: {autostart: false, replan_interval: 3}}\n'
        '/**/vla_policy: {ros__parameters: {autostart: false, backend: torch}}\n'
        '/**/tabletop: {ros__parameters: {seed: 5}}\n',
        encoding='utf-8',
    )
    task = 'touch the red block'
    diagnostics = peer.collect(DiagnosticArray, '/diagnostics')
    arguments = [f'params_file:={file}', 'replan_interval:=5', 'device:=cuda:7', 'dry_run:=true']
    arguments += [f'record:={tmp_path / "bag"}', 'record_images:=reduced', f'instruction:={task}']
    with launched('demo.launch.py', *arguments):
        for node, expected in {
            'vla_executor': {'autostart': False, 'replan_interval': 5, 'dry_run': True},
            'vla_policy': {'backend': 'torch', 'device': 'cuda:7'},
            'vla_recorder': {'record_images': 'reduced'},
            'tabletop': {'seed': 5},
        }.items():
            request = GetParameters.Request(names=list(expected))
            answer = peer.call(GetParameters, f'/{node}/get_parameters', request)
            found = [parameter_value_to_python(value) for value in answer.values]
            assert found == list(expected.values())
        peer.wait_for(lambda: judged_by(diagnostics) == task, 'the simulated robot to have it')


def judged_by(diagnostics: list[DiagnosticArray]) -> str:
    """The instruction that the tabletop judges by, in its newest status."""
    return newest_values(diagnostics, '/tabletop: instructions').get('current', '')


@pytest.mark.graph
@needs_demo
def test_a_simulator_that_cannot_start_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where no OSMesa is installed and no GPU is there.
    monkeypatch.setenv('MUJOCO_GL', 'nothing')
    with launched('demo.launch.py', 'autostart:=false') as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert 'tabletop, the simulated robot, ended with exit code' in output
    assert 'MUJOCO_GL' in output


@pytest.mark.graph
@needs_demo
def test_the_pages_way_to_instruct_reaches_every_listener(peer: Graph) -> None:
    pytest.importorskip('ros2topic', reason='ros2cli comes with an installed ROS 2')
    page = text_of('docs/howto/launch.md')
    (line,) = (line for line in page.splitlines() if line.startswith('ros2 topic pub --once'))
    # Another listener, as a recorder is: `--once` leaves as soon as it has met one of them.
    heard = peer.collect(String, 'vla_policy/instruction', LATCHED)
    told = peer.collect(String, 'vla_policy/current_instruction', LATCHED)
    with launched('demo.launch.py', 'autostart:=false'):
        assert peer.state('/vla_policy') == 'unconfigured'
        ros2 = 'import sys; from ros2cli.cli import main; sys.exit(main())'
        subprocess.run([sys.executable, '-c', ros2, *shlex.split(line)[1:]], check=True, timeout=60)
        peer.wait_for(lambda: heard and told, 'the instruction', timeout_s=30.0)
    assert told[-1].data == heard[-1].data == 'pick up the cup'


@pytest.mark.graph
@pytest.mark.parametrize('launch_file', ['vla.launch.py', 'demo.launch.py'])
def test_a_parameter_file_that_would_do_nothing_is_an_error_before_anything_starts(
    tmp_path: Path, launch_file: str
) -> None:
    file = tmp_path / 'mine.yaml'
    file.write_text('/**: {ros__parameters: {replan_intervall: 3}}', encoding='utf-8')
    arguments = ['bundle:=.', f'params_file:={file}']
    if launch_file == 'vla.launch.py':
        arguments.append('robot:=tabletop')
    with launched(launch_file, *arguments) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "did you mean 'replan_interval'?" in output
    assert 'process started' not in output


@pytest.mark.graph
def test_a_section_of_another_node_is_let_be_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / 'mine.yaml'
    file.write_text('/**/camera: {ros__parameters: {fps: 30}}', encoding='utf-8')
    # Which no robot is called, so that nothing is started.
    arguments = ('bundle:=.', 'robot:=nobody', f'params_file:={file}')
    with launched('vla.launch.py', *arguments) as process:
        output, _ = process.communicate(timeout=60)
    assert f"{file}: section '/**/camera' matches none of vla_runtime's nodes" in output
    assert "robot 'nobody' is neither a file nor" in output


@pytest.mark.graph
@pytest.mark.parametrize('respawn', ['false', 'true'])
def test_a_bundle_that_is_not_there_ends_the_launch_and_says_so(
    tmp_path: Path, respawn: str
) -> None:
    missing = tmp_path / 'no_bundle'
    with launched(
        'vla.launch.py', f'bundle:={missing}', 'robot:=tabletop', f'respawn:={respawn}'
    ) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert 'could not start; its own error is above' in output
    assert str(missing) in output
    assert 'Destroyable' not in output and 'Abandoning' not in output


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
