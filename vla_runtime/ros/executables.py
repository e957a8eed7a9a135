"""The nodes' executables: what to tell where a node cannot be imported, ROS 2 missing for example.

Nothing here imports ROS 2 before it can be told that it is missing.
"""

from __future__ import annotations

import importlib
import os
import sys

# What packages of ROS 2 are called: clients, messages, and what both are made with.
_ROS_PREFIXES = ('rcl', 'rpyutils', 'rosidl', 'ament_')
_ROS_SUFFIXES = ('_msgs', '_srvs', '_interfaces')


def policy_node() -> int:
    """Run the policy node."""
    return _run('policy_node')


def executor_node() -> int:
    """Run the executor node."""
    return _run('executor_node')


def tabletop_node() -> int:
    """Run the simulated tabletop robot."""
    return _run('tabletop_node')


def _run(node: str) -> int:
    """Run a node; 2 where a package that it needs cannot be imported."""
    try:
        module = importlib.import_module(f'vla_runtime.ros.{node}')
    except ImportError as error:
        print(f'error: {node}: {_problem(node, error)}', file=sys.stderr)
        return 2
    return int(module.main())


def _problem(node: str, error: ImportError) -> str:
    """What is missing, and what mends it."""
    name = (error.name or '').partition('.')[0]
    python = f'{sys.executable} (Python {sys.version_info[0]}.{sys.version_info[1]})'
    distro = os.environ.get('ROS_DISTRO', '')
    if not isinstance(error, ModuleNotFoundError) and not name.startswith(_ROS_PREFIXES):
        return f'{python} cannot import what it needs: {error}'
    if not name.startswith(_ROS_PREFIXES) and not name.endswith(_ROS_SUFFIXES):
        return (
            f"{python} has no package '{name}'; `./run exec {node} …` brings everything, or: "
            "pip install 'vla_runtime[torch,sim]'"
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
