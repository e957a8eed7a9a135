"""The executables' first steps: what must be there before anything slow is imported.

Importing a node's module takes seconds; a Ctrl-C meanwhile ends the process quietly. Nothing here
imports ROS 2: help works without it, and a missing ROS 2 is an error in words.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from vla_runtime.files.quotes import quoted
from vla_runtime.files.standard_output import LostOutputError, watched_output
from vla_runtime.processes.interrupt import take_signals
from vla_runtime.processes.parent_death import end_with_launch

# What packages of ROS 2 are called: clients, messages, and what both are made with.
_ROS_PREFIXES = ('rcl', 'rpyutils', 'rosidl', 'ament_')
_ROS_SUFFIXES = ('_msgs', '_srvs', '_interfaces')

MODULES = {
    'policy_node': 'vla_runtime.nodes.policy.node',
    'executor_node': 'vla_runtime.nodes.executor.node',
    'recorder_node': 'vla_runtime.nodes.recorder.node',
    'task_node': 'vla_runtime.nodes.task.node',
    'tabletop_node': 'vla_tabletop.nodes.node',
}
# What each does, and the arguments of two examples.
_USAGE = {
    'policy_node': (
        'Runs a policy on camera images and joint states, and sends the executor its chunks.',
        '-p bundle:=path/to/bundle -p robot:=my_arm.yaml -p autostart:=true',
        "--params-file my.yaml -p device:=cuda -p instruction:='pick up the cup'",
    ),
    'executor_node': (
        "Moves the robot along the policy's chunks, after ~/start.",
        '-p bundle:=path/to/bundle -p robot:=my_arm.yaml -p autostart:=true',
        '-r __ns:=/left --params-file my.yaml -p replan_interval:=4',
    ),
    'recorder_node': (
        'Records what policy and executor say, with the frames that inferences used, to a bag.',
        '-p robot:=my_arm.yaml',
        '-p robot:=my_arm.yaml -p folder:=recordings/today -p keep_minutes:=10.0',
    ),
    'task_node': (
        'Takes tasks for the robot (action RunPolicy): sets the instruction, starts and stops.',
        '',
        '-r __ns:=/left',
    ),
    'tabletop_node': (
        'Simulates the tabletop robot, with cameras, joint states and controllers.',
        '-p seed:=3',
        '-r __ns:=/left --params-file my.yaml',
    ),
}


def run_module(name: str) -> int:
    """Import a node's module and run its `main`.

    Returns:
        Exit code: 0 after help, 2 where an argument has no effect or a package that the node needs
        cannot be imported.
    """
    take_signals(lambda *_: os._exit(0))
    end_with_launch()
    unread = _unread(sys.argv[1:])
    if {'-h', '--help'} & {*unread}:
        return _print_usage(name)
    if unread:
        print(
            f'error: {name}: nothing reads {quoted(shlex.join(unread))} where it stands; what is '
            f'for the node comes after --ros-args, as in: {name} --ros-args --params-file my.yaml '
            '-p NAME:=VALUE (--help says more)',
            file=sys.stderr,
        )
        return 2
    try:
        module = importlib.import_module(MODULES[name])
    except ImportError as error:
        print(f'error: {name}: {_problem(name, error)}', file=sys.stderr)
        return 2
    return int(module.main())


# The executables: `ros2 run vla_runtime policy_node --ros-args -p bundle:=... -p robot:=...`.
policy_node = partial(run_module, 'policy_node')
executor_node = partial(run_module, 'executor_node')
recorder_node = partial(run_module, 'recorder_node')
task_node = partial(run_module, 'task_node')
tabletop_node = partial(run_module, 'tabletop_node')


def _print_usage(name: str) -> int:
    try:
        with watched_output():
            print(_usage(name))
    except LostOutputError as lost:
        return lost.report()
    return 0


def _unread(arguments: Sequence[str]) -> list[str]:
    """Arguments that ROS 2 leaves alone: all but `--ros-args` ... `--`."""
    unread = []
    of_ros = False
    for argument in arguments:
        if argument in ('--ros-args', '--'):
            of_ros = argument == '--ros-args'
        elif not of_ros:
            unread.append(argument)
    return unread


def _usage(name: str) -> str:
    what, *examples = _USAGE[name]
    shown = '\n'.join(f'  {name} --ros-args {arguments}' for arguments in examples)
    return (
        f'usage: {name} [--ros-args [-p NAME:=VALUE] [--params-file FILE] [-r FROM:=TO]]\n\n'
        f'{what}\n\n'
        'docs/reference/parameters.md lists its parameters, docs/howto/launch.md says how a file '
        'of them is keyed.'
        f'\n\nexamples:\n{shown}'
    )


def _problem(node: str, error: ImportError) -> str:
    name = (error.name or '').partition('.')[0]
    python = f'{sys.executable} (Python {sys.version_info[0]}.{sys.version_info[1]})'
    distro = os.environ.get('ROS_DISTRO', '')
    if not isinstance(error, ModuleNotFoundError) and not name.startswith(_ROS_PREFIXES):
        return f'{python} cannot import what it needs: {error}'
    if not name.startswith(_ROS_PREFIXES) and not name.endswith(_ROS_SUFFIXES):
        return (
            f"{python} has no package '{name}'; `./run exec {node} …` brings everything, or: "
            "pip install '.[torch,sim]' in the source folder"
        )
    if not distro:
        return (
            f"it needs ROS 2, and {python} has no '{name}': source a ROS 2, such as "
            f'`source /opt/ros/jazzy/setup.bash`, or start `./run exec {node} …`, which brings one'
        )
    if name.startswith(_ROS_PREFIXES):
        return (
            f'ROS 2 {distro} is sourced, but {python} cannot import its {name}: {error}; start '
            'the node with the Python that this ROS 2 was built for (Humble 3.10, Jazzy 3.12)'
        )
    return (
        f"ROS 2 {distro} is sourced, but {python} has no '{name}': "
        f'sudo apt install ros-{distro}-{name.replace("_", "-")}'
    )
