"""Serves the page of a live robot or of a recording until a signal."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from vla_runtime.files.package_files import share_folder
from vla_runtime.processes.parent_death import end_with_launch
from vla_runtime.robot.file import find_robot, load_robot
from vla_runtime.robot.schema import Robot
from vla_tools.serve.security import is_loopback
from vla_tools.view.app import LOOPBACK_HOSTS, Pages
from vla_tools.view.source import Source, ViewOptions

if TYPE_CHECKING:
    from vla_runtime.nodes.graph_status import GraphStatus

# A page that does not answer is gone.
_PING_S = 5.0


def named_robot(name: str | None) -> Robot | None:
    """Read the robot file that a person named; ValueError where there is none."""
    if name is None:
        return None
    return load_robot(find_robot(name, share_folder() / 'config' / 'robots'))


def serve_live(options: ViewOptions, listener: socket.socket, tell: Callable[[], None]) -> None:
    """Show the robot in the graph; `tell` is called when the page is there.

    Raises:
        ValueError: the environment names no graph, or several robots are in it and none was chosen.
    """
    from vla_runtime.nodes.graph_status import GraphStatus, full_namespace, graph_node
    from vla_tools.view.live import LiveSource

    end_with_launch()
    wanted = full_namespace(options.namespace)
    with graph_node('_vla_view') as node:
        status = GraphStatus(node)
        namespace = _only_robot(status) if wanted is None else wanted
        source = LiveSource(status, namespace, options)
        try:
            server = make_server(source, options)
            tell()
            server.run(sockets=[listener])
        finally:
            source.close()


def serve_bag(
    bag: Path, options: ViewOptions, listener: socket.socket, tell: Callable[[], None]
) -> None:
    """Show a recording; ValueError: there is none, or nothing in it can be shown."""
    from vla_runtime.recording.bag_reader import BagReader
    from vla_tools.view.bag import BagSource

    source = BagSource(BagReader(bag), options)
    try:
        server = make_server(source, options)
        tell()
        server.run(sockets=[listener])
    finally:
        source.close()


def _only_robot(status: GraphStatus) -> str:
    """Return the namespace of the one robot that is in the graph; the root where none is yet."""
    found = [report.namespace for report in status.wait()]
    if len(found) > 1:
        names = ', '.join(name or '/' for name in found)
        raise ValueError(f'several robots are in the graph: {names}; choose one with --namespace')
    return found[0] if found else ''


def make_server(source: Source, options: ViewOptions) -> uvicorn.Server:
    """Return the server of a source's page; the source begins to show what comes."""
    hosts = LOOPBACK_HOSTS if is_loopback(options.host) else ('*',)
    pages = Pages(source, keys=options.keys, hosts=hosts)
    source.begin(pages.publish)
    return uvicorn.Server(
        uvicorn.Config(
            pages.app,
            ws='websockets-sansio',
            ws_ping_interval=_PING_S,
            ws_ping_timeout=_PING_S,
            ws_per_message_deflate=False,
            log_level='warning',
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
