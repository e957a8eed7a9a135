"""Other domains on this machine: where a robot is that this graph does not have.

RTPS gives each participant two UDP ports side by side, 7400 + 250 * domain + 10 + 2 * number and
the next (DDSI-RTPS 2.5, 9.6.1). The kernel lists them (/proc/net/udp).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import rclpy
from rclpy.context import Context
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from vla_runtime.nodes.middleware import HIGHEST_DOMAIN

_BASE, _OF_DOMAIN, _UNICAST = 7400, 250, 10
_PORTS = Path('/proc/net/udp')

_MEETS_WITHIN_S, _LOOKS_S = 3.0, 0.05


def domains_here(ports: Path = _PORTS) -> list[int]:
    """Return the domains that participants on this machine are in."""
    try:
        lines = ports.read_text().splitlines()[1:]
    except OSError:
        return []
    bound = {int(line.split()[1].rpartition(':')[2], 16) for line in lines if line.strip()}
    found = set()
    for port in bound:
        domain, place = divmod(port - _BASE, _OF_DOMAIN)
        is_unicast = place >= _UNICAST and place % 2 == 0 and port + 1 in bound
        if is_unicast and 0 <= domain <= HIGHEST_DOMAIN:
            found.add(domain)
    return sorted(found)


def topics_in(domain: int, wanted: Collection[str]) -> list[str]:
    """Join another domain for a moment; return which of these topics are published there."""
    context = Context()
    rclpy.init(
        args=[], context=context, domain_id=domain, signal_handler_options=SignalHandlerOptions.NO
    )
    try:
        node = Node(
            '_vla_doctor',
            context=context,
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )
        end_s = time.monotonic() + _MEETS_WITHIN_S
        found: list[str] = []
        while not found and time.monotonic() < end_s:
            found = [topic for topic in wanted if node.count_publishers(topic)]
            time.sleep(_LOOKS_S)
        node.destroy_node()
        return found
    finally:
        rclpy.shutdown(context=context)
