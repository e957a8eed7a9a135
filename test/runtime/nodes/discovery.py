"""Fast DDS profiles of the tests: nodes find each other at once, and a test stays reachable."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import rclpy
from paths import ROOT
from rclpy.node import Node

from vla_runtime.nodes.middleware import PROFILE_VARIABLES

_NAMESPACE = 'http://www.eprosima.com/XMLSchemas/fastRTPS_Profiles'
_PERIOD_NS = 200_000_000
ElementTree.register_namespace('', _NAMESPACE)


def announce_often() -> None:
    """Let the nodes that this process starts announce themselves every 0.2 s.

    A participant that starts is often not heard by one that runs already. They then meet at the
    running one's next announcement, and by default there is one in 3 s: most of a node's start.
    All else is as in the shipped profile.
    """
    os.environ.update(dict.fromkeys(PROFILE_VARIABLES, str(_written('nodes', nodes_profile()))))


@contextmanager
def by_udp() -> Iterator[None]:
    """Let this process itself join the graph by UDP alone; around `rclpy.init`.

    On a machine that stands still for a second, as virtual machines do, every process takes the
    others' shared memory for a dead process's, and now and then one is cut off from then on
    (`vla_runtime.nodes.shared_memory`). A node then joins anew, which a test cannot do. With
    LOCALHOST, ROS 2 adds shared memory to any profile; here the profile keeps the test on this
    machine, as ROS 2 does.
    """
    reach = {'ROS_AUTOMATIC_DISCOVERY_RANGE': 'SYSTEM_DEFAULT'}
    if 'ROS_LOCALHOST_ONLY' in os.environ:
        reach['ROS_LOCALHOST_ONLY'] = '0'
    profile = dict.fromkeys(PROFILE_VARIABLES, str(_written('test', own_profile())))
    with mock.patch.dict(os.environ, {**profile, **reach}):
        yield


@pytest.fixture(scope='session', autouse=True)
def udp_profile() -> None:
    """Make the test's first node: Fast DDS reads its profile then, and never again."""
    context = rclpy.Context()
    with by_udp():
        rclpy.init(context=context)
        Node('first', context=context).destroy_node()
    rclpy.shutdown(context=context)


def _written(name: str, profile: str) -> Path:
    path = Path(os.environ['VLA_RUNTIME_TEST_SCRATCH']) / f'fastdds_{name}_{os.getpid()}.xml'
    path.write_text(profile, encoding='utf-8')
    return path


def nodes_profile() -> str:
    """The shipped profile with that period."""
    root = ElementTree.parse(ROOT / 'config' / 'fastdds.xml').getroot()
    _announce_often(root)
    return ElementTree.tostring(root, encoding='unicode')


def own_profile() -> str:
    """The executor's profile with that period, which hears and speaks to this machine alone."""
    root = ElementTree.parse(ROOT / 'config' / 'fastdds_executor.xml').getroot()
    (transport,) = root.iterfind('.//{*}transport_descriptor')
    # Participants that are looked for at each address; 4 by default.
    _add(transport, 'maxInitialPeersRange').text = '100'
    _announce_often(root)
    (builtin,) = root.iterfind('.//{*}builtin')
    # A list that names no address takes the place of the multicast one.
    _add(_add(builtin, 'metatrafficUnicastLocatorList'), 'locator')
    peer = _add(_add(_add(builtin, 'initialPeersList'), 'locator'), 'udpv4')
    _add(peer, 'address').text = '127.0.0.1'
    return ElementTree.tostring(root, encoding='unicode')


def far_profile(address: str) -> str:
    """The profile of a robot on another computer, which uses the device of that address alone."""
    root = ElementTree.parse(ROOT / 'config' / 'fastdds_executor.xml').getroot()
    (transport,) = root.iterfind('.//{*}transport_descriptor')
    _add(_add(transport, 'interfaceWhiteList'), 'address').text = address
    _announce_often(root)
    return ElementTree.tostring(root, encoding='unicode')


def _announce_often(root: ElementTree.Element) -> None:
    (element,) = root.iterfind('.//{*}rtps')
    for name in ('builtin', 'discovery_config', 'leaseAnnouncement'):
        element = _child(element, name)
    for name, value in (('sec', 0), ('nanosec', _PERIOD_NS)):
        _child(element, name).text = str(value)


def _child(parent: ElementTree.Element, name: str) -> ElementTree.Element:
    found = parent.find(f'{{*}}{name}')
    return _add(parent, name) if found is None else found


def _add(parent: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(parent, f'{{{_NAMESPACE}}}{name}')
