"""Pieces of launch descriptions for tests, and what a test asks of the nodes that run."""

from __future__ import annotations

import os
from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from diagnostic_msgs.msg import DiagnosticArray
from graph import Graph, statuses
from launch.actions import GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from std_srvs.srv import Trigger

from vla_runtime.messages.diagnostics import values_of


def included(file: str, **arguments: str) -> GroupAction:
    """One of the package's launch files with arguments of its own."""
    path = Path(get_package_share_directory('vla_runtime')) / 'launch' / file
    source = PythonLaunchDescriptionSource(str(path))
    # Scoped, so that a second one does not get the first one's arguments.
    return GroupAction([IncludeLaunchDescription(source, launch_arguments=arguments.items())])


def wait_active(peer: Graph, *nodes: str) -> None:
    """Wait until nodes are active; loading PyTorch alone can take half a minute."""
    for node in nodes:
        peer.wait_for(lambda node=node: peer.state(node) == 'active', f'{node} to be active')


def start_motion(peer: Graph, executor: str = '/vla_executor') -> None:
    """Call `~/start` until it succeeds: the first joint states may still be on their way."""
    request = Trigger.Request()
    peer.wait_for(lambda: peer.call(Trigger, f'{executor}/start', request).success, 'a start')


def newest_values(diagnostics: list[DiagnosticArray], name: str) -> dict[str, str]:
    """Values of the newest status of a name, with its text as `text`; empty before the first."""
    found = next(statuses(diagnostics, name), None)
    return {} if found is None else {**values_of(found), 'text': found.message}


def children(name: str) -> list[int]:
    """Processes that launch started from this one with a name in their command line."""
    own = os.getpid()
    found = Path(f'/proc/{own}/task/{own}/children').read_text().split()
    return [int(n) for n in found if name in _command_line(n)]


def _command_line(pid: str) -> str:
    try:
        return Path(f'/proc/{pid}/cmdline').read_text()
    except (FileNotFoundError, ProcessLookupError):
        # Launch has waited for its end since it was listed.
        return ''
