"""What a node says before it is imported: help, arguments without effect, what is missing."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from paths import ROOT

from vla_runtime.nodes import node_main

NODES = ('policy_node', 'executor_node', 'tabletop_node')


@pytest.fixture(scope='module')
def bare(tmp_path_factory):
    """A Python that has NumPy and nothing else."""
    venv = tmp_path_factory.mktemp('python') / 'bare'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(venv)], check=True)
    site = next((venv / 'lib').glob('python*/site-packages'))
    for folder in Path(np.__file__).parents[1].glob('numpy*'):
        (site / folder.name).symlink_to(folder)
    return venv / 'bin' / 'python'


def start(node, python, *arguments, **environment):
    code = f'import sys; from vla_runtime.nodes.node_main import {node}; sys.exit({node}())'
    kept = {name: os.environ[name] for name in ('PATH', 'HOME') if name in os.environ}
    return subprocess.run(
        [python, '-c', code, *arguments],
        env={**kept, 'PYTHONPATH': str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize('node', NODES)
def test_without_ros_it_says_so_and_what_brings_it(bare, node):
    done = start(node, bare)
    assert done.returncode == 2
    assert 'Traceback' not in done.stderr
    assert done.stderr.startswith(f'error: {node}: it needs ROS 2, and ')
    assert 'source /opt/ros/jazzy/setup.bash' in done.stderr
    assert f'./run exec {node}' in done.stderr


def test_a_sourced_ros_without_its_messages_names_their_package(bare):
    done = start('policy_node', bare, ROS_DISTRO='jazzy')
    assert done.returncode == 2
    assert 'sudo apt install ros-jazzy-diagnostic-msgs' in done.stderr


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        (ModuleNotFoundError("No module named 'mujoco'", name='mujoco'), "no package 'mujoco'"),
        (
            ModuleNotFoundError('no C extension', name='rclpy._rclpy_pybind11'),
            'cannot import its rclpy: no C extension; start the node with the Python that',
        ),
        (ImportError('libGL.so.1: cannot open shared object file', name='cv2'), 'libGL.so.1'),
    ],
    ids=['another package', 'the wrong Python', 'a library'],
)
def test_what_else_cannot_be_imported_is_said_as_it_is(monkeypatch, capsys, error, expected):
    def fail(name):
        raise error

    monkeypatch.setenv('ROS_DISTRO', 'jazzy')
    monkeypatch.setattr(node_main.importlib, 'import_module', fail)
    monkeypatch.setattr(node_main.sys, 'argv', ['tabletop_node'])
    assert node_main.tabletop_node() == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize('node', node_main.MODULES)
def test_help_needs_no_ros(bare, node):
    done = start(node, bare, '-h' if node == 'policy_node' else '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(f'usage: {node} [--ros-args ')
    assert 'docs/reference/parameters.md' in done.stdout
    assert done.stdout.count(f'\n  {node} --ros-args ') == 2


def test_help_to_a_full_disk_is_an_error_in_words():
    code = (
        'import sys; from vla_runtime.nodes.node_main import policy_node; sys.exit(policy_node())'
    )
    with open('/dev/full', 'w') as full:
        done = subprocess.run(
            [sys.executable, '-c', code, '--help'], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == 'error: standard output cannot be written: No space left on device\n'


@pytest.mark.parametrize(
    ('arguments', 'unread'),
    [
        (('foo',), 'foo'),
        (('--params-file', 'my file.yaml'), "--params-file 'my file.yaml'"),
        (('--ros-arg', '-p', 'seed:=3'), '--ros-arg -p seed:=3'),
        (('one', '--ros-args', '-p', 'seed:=3', '--', 'two'), 'one two'),
    ],
)
def test_arguments_that_nothing_reads_are_refused_with_the_right_form(
    monkeypatch, capsys, arguments, unread
):
    monkeypatch.setattr(node_main.importlib, 'import_module', lambda _: pytest.fail('imported'))
    monkeypatch.setattr(node_main.sys, 'argv', ['policy_node', *arguments])
    assert node_main.policy_node() == 2
    said = capsys.readouterr().err
    assert said.startswith(f'error: policy_node: nothing reads {unread!r} where it stands')
    assert 'policy_node --ros-args --params-file my.yaml -p NAME:=VALUE' in said


@pytest.mark.parametrize('arguments', [(), ('--ros-args', '-p', 'seed:=3'), ('--ros-args', '--')])
def test_arguments_of_ros_are_left_to_it(monkeypatch, arguments):
    monkeypatch.setattr(node_main.sys, 'argv', ['policy_node', *arguments])
    node = SimpleNamespace(main=lambda: 7)
    monkeypatch.setattr(node_main.importlib, 'import_module', lambda _: node)
    assert node_main.policy_node() == 7
