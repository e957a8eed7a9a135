"""Look at the nodes of this package in a graph from outside, without disturbing them.

By UDP alone, as the executor itself does: a newcomer's shared memory can keep a node from sending.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rclpy
from rclpy.exceptions import InvalidNamespaceException
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.validate_namespace import validate_namespace

from vla_runtime.files.package_files import share_folder
from vla_runtime.files.quotes import quoted
from vla_runtime.nodes.middleware import HIGHEST_DOMAIN, describe_reach, keep_to_udp
from vla_runtime.nodes.polled_topics import HeardStatus
from vla_runtime.nodes.robot_report import RobotReport, robot_reports

_NAME = '_vla_status'
# What nodes of this package publish beside their names, and others do not.
_REPORT_TYPE = 'diagnostic_msgs/msg/DiagnosticArray'
_LOOKS_S = 0.05

# Nodes that announce themselves every 0.5 s are all there after so long.
_MEET_S = 1.3
# Without the shipped profile a node announces itself every 3 s.
_GIVE_UP_S = 2.8
# A person waits for the whole of the process, which a busy machine starts slowly.
_END_S, _SHORTEST_S = 4.5, 0.8


class GraphStatus:
    """Hears what the nodes say; see `joined`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._heard = HeardStatus(node)
        self._begin_s = time.monotonic()

    def wait(self, namespace: str | None = None) -> list[RobotReport]:
        """Listen until all nodes that are in the graph were heard, within seconds."""
        longest_s = max(min(_GIVE_UP_S, _END_S - _process_age_s()), _SHORTEST_S)
        while True:
            reports = self.look(namespace)
            waited_s = time.monotonic() - self._begin_s
            complete = reports and all(node.claim for one in reports for node in one.nodes)
            if waited_s > min(longest_s, _MEET_S if complete else _GIVE_UP_S):
                return reports
            time.sleep(_LOOKS_S)

    def look(
        self, namespace: str | None = None, in_graph: Sequence[str] | None = None
    ) -> list[RobotReport]:
        """Return what was heard; `in_graph` is asked for anew where it is None."""
        self._heard.take()
        known = self.in_graph() if in_graph is None else in_graph
        return robot_reports(self._heard.items(), known, namespace)

    def namespaces(self) -> list[str]:
        return [one.namespace or '/' for one in self.look()]

    def in_graph(self) -> list[str]:
        """Return the full names of this package's nodes, whether they say anything or not."""
        reports = (
            topic.rpartition('/')[0]
            for topic, types in self._node.get_topic_names_and_types()
            if topic.endswith('/report') and _REPORT_TYPE in types
        )
        return [
            name
            for name in reports
            if any(
                f'{info.node_namespace.rstrip("/")}/{info.node_name}' == name
                for info in self._node.get_publishers_info_by_topic(f'{name}/report')
            )
        ]


def full_namespace(given: str | None) -> str | None:
    """Return the full name of a namespace, '' for the graph's root; ValueError if it is none."""
    if given is None:
        return None
    name = f'/{given.removeprefix("/").removesuffix("/")}'
    try:
        validate_namespace(name)
    except InvalidNamespaceException as error:
        why = str(error).partition(':')[2].strip().splitlines()[0].rstrip(':')
        raise ValueError(f'--namespace: {quoted(given)} is no namespace: {why}') from None
    return name.rstrip('/')


def _process_age_s() -> float:
    """Return the time since this process was started; 0.0 where the system does not say."""
    try:
        # The name of the program may have spaces.
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        started_s = int(fields[19]) / os.sysconf('SC_CLK_TCK')
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError):
        return 0.0


def check_domain() -> None:
    """Refuse a ROS_DOMAIN_ID that names no graph (ValueError)."""
    domain = os.environ.get('ROS_DOMAIN_ID') or '0'
    if not domain.isdecimal() or int(domain) > HIGHEST_DOMAIN:
        raise ValueError(
            f'ROS_DOMAIN_ID is {quoted(domain)}: it must be a whole number of 0 to {HIGHEST_DOMAIN}'
        )


@contextmanager
def joined() -> Iterator[GraphStatus]:
    """Join the graph that the environment names; ValueError where there is none."""
    with graph_node(_NAME) as node:
        yield GraphStatus(node)


@contextmanager
def graph_node(name: str) -> Iterator[Node]:
    """A node in the root of the graph that the environment names, by UDP.

    Raises:
        ValueError: the environment names no graph.
    """
    check_domain()
    keep_to_udp(os.environ, share_folder() / 'config')
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    node = quiet_node(name)
    try:
        yield node
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


def quiet_node(name: str, namespace: str = '') -> Node:
    """Return a node without parameters' services and log topic."""
    return Node(
        name,
        namespace=namespace,
        use_global_arguments=False,
        enable_rosout=False,
        start_parameter_services=False,
    )


def where() -> str:
    return describe_reach(os.environ)
