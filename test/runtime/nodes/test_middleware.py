"""The executor's process has no shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from discovery import far_profile
from graph import Graph, graph
from paths import ROOT
from thorough import thorough_but

from vla_runtime.nodes.middleware import (
    PROFILE_VARIABLES,
    REACH_VARIABLES,
    describe_reach,
    keep_to_udp,
    why_no_shared_memory,
)

CONFIG = ROOT / 'config'
SHIPPED = str(CONFIG / 'fastdds.xml')

SEGMENT = re.compile('/dev/shm/fast(rtps|dds)_')


def profile_with(environment: dict[str, str]) -> str:
    """Name of the file that is in force afterwards; '' for none."""
    keep_to_udp(environment, CONFIG)
    files = {Path(environment.get(name, '')).name for name in PROFILE_VARIABLES}
    assert len(files) == 1
    return files.pop()


UDP, UDP_HERE = 'fastdds_executor.xml', 'fastdds_executor_localhost.xml'
RANGE, LOCAL = REACH_VARIABLES


@pytest.mark.parametrize(
    ('environment', 'profile', 'reach'),
    [
        ({}, UDP, {}),
        (dict.fromkeys(PROFILE_VARIABLES, SHIPPED), UDP, {}),
        ({RANGE: 'LOCALHOST'}, UDP_HERE, {RANGE: 'SYSTEM_DEFAULT'}),
        (
            {RANGE: 'LOCALHOST', **dict.fromkeys(PROFILE_VARIABLES, SHIPPED)},
            UDP_HERE,
            {RANGE: 'SYSTEM_DEFAULT'},
        ),
        # As Jazzy and Humble take it.
        ({RANGE: 'SUBNET', LOCAL: '1'}, UDP_HERE, {RANGE: 'SYSTEM_DEFAULT'}),
        ({RANGE: 'SUBNET', LOCAL: '0'}, UDP, {RANGE: 'SUBNET', LOCAL: '0'}),
        ({RANGE: 'LOCALHOST', 'ROS_DISTRO': 'humble'}, UDP, {RANGE: 'LOCALHOST'}),
        ({RANGE: 'LOCALHOST', 'ROS_STATIC_PEERS': '192.168.0.5'}, '', {RANGE: 'LOCALHOST'}),
        ({'RMW_IMPLEMENTATION': 'rmw_cyclonedds_cpp'}, '', {}),
    ],
)
def test_the_profile_without_shared_memory_is_taken_in_the_shipped_ones_place(
    environment: dict[str, str], profile: str, reach: dict[str, str]
) -> None:
    given = dict(environment)
    assert profile_with(given) == profile
    assert {name: given[name] for name in REACH_VARIABLES if name in given} == reach


@pytest.mark.parametrize(
    'given',
    [{}, {RANGE: 'LOCALHOST', 'ROS_DOMAIN_ID': '7'}, {RANGE: 'OFF'}],
)
def test_the_reach_is_described_as_it_was_given(given: dict[str, str]) -> None:
    environment = dict(given)
    keep_to_udp(environment, CONFIG)
    said = describe_reach(environment)
    assert said == describe_reach(given)
    assert given.get(RANGE, 'SUBNET') in said and given.get('ROS_DOMAIN_ID', '0') in said


MB = 1 << 20


@pytest.mark.parametrize(
    ('environment', 'free_mb', 'fits'),
    [
        (dict.fromkeys(PROFILE_VARIABLES, SHIPPED), 64, False),
        (dict.fromkeys(PROFILE_VARIABLES, SHIPPED), 66, True),
        ({}, 0, False),
        ({}, 8, True),
        # They take none.
        (dict.fromkeys(PROFILE_VARIABLES, str(CONFIG / UDP)), 0, True),
        ({'RMW_IMPLEMENTATION': 'rmw_cyclonedds_cpp'}, 0, True),
    ],
)
def test_a_full_shared_memory_is_told_in_our_words(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    free_mb: int,
    fits: bool,
) -> None:
    usage = shutil._ntuple_diskusage(64 * MB, 0, free_mb * MB)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
    said = why_no_shared_memory(environment, tmp_path)
    assert (said == '') == fits
    if not fits:
        assert str(tmp_path) in said and '--shm-size' in said


def test_a_profile_of_the_users_own_stays_in_force(tmp_path: Path) -> None:
    mine = tmp_path / 'fastdds.xml'
    mine.write_text('<profiles/>', encoding='utf-8')
    for reach in ('SUBNET', 'LOCALHOST'):
        environment = {RANGE: reach, **dict.fromkeys(PROFILE_VARIABLES, str(mine))}
        assert profile_with(environment) == 'fastdds.xml'
        assert environment[RANGE] == reach


@pytest.mark.graph
@pytest.mark.parametrize('profile', thorough_but([SHIPPED], ['', SHIPPED]))
@pytest.mark.parametrize('reach', thorough_but(['LOCALHOST'], ['SUBNET', 'LOCALHOST']))
def test_the_running_node_maps_no_shared_memory_of_fast_dds(
    monkeypatch: pytest.MonkeyPatch, profile: str, reach: str
) -> None:
    for name in PROFILE_VARIABLES:
        monkeypatch.setenv(name, profile)
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', reach)
    with graph() as made:
        executor = made.start('vla_runtime.nodes.executor.node')
        tabletop = made.start('vla_tabletop.nodes.node')
        # Both are found, and answer.
        assert made.state('/vla_executor') == 'unconfigured'
        assert made.set_parameter('/tabletop', 'seed', 1).successful
        mapped = {
            process.pid: bool(SEGMENT.search(Path(f'/proc/{process.pid}/maps').read_text()))
            for process in (executor, tabletop)
        }
    # The other node shows that it would be seen.
    assert mapped == {executor.pid: False, tabletop.pid: True}


@pytest.mark.graph
def test_the_tests_own_node_has_no_shared_memory_to_be_cut_off_from() -> None:
    def locked() -> set[str]:
        """Ports that this process listens on."""
        links = (os.readlink(link) for link in Path('/proc/self/fd').iterdir() if link.is_symlink())
        return {link for link in links if SEGMENT.search(link) and '_port' in link}

    before = locked()
    with graph() as made:
        made.start('vla_tabletop.nodes.node')
        assert made.set_parameter('/tabletop', 'seed', 1).successful
        assert locked() <= before


def namespaces(made: Graph) -> set[str]:
    """Namespaces of the nodes that a test's own node knows."""
    return {space for _, space in made.node.get_node_names_and_namespaces()}


@pytest.mark.graph
def test_a_test_finds_no_robot_on_another_computer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that uses this machine's network device alone plays that robot."""
    listed = ''
    if shutil.which('ip'):
        words = ['ip', '-4', '-o', 'addr', 'show', 'scope', 'global']
        listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    address = re.search(r' inet ([0-9.]+)', listed)
    if address is None:
        pytest.skip('no network device but the loopback')
    profile = tmp_path / 'far.xml'
    profile.write_text(far_profile(address[1]), encoding='utf-8')
    with graph() as made:
        with monkeypatch.context() as elsewhere:
            for name in PROFILE_VARIABLES:
                elsewhere.setenv(name, str(profile))
            elsewhere.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'SUBNET')
            elsewhere.setenv('PYTHONPATH', os.pathsep.join(sys.path))
            names = ('--ros-args', '-r', '__ns:=/far')
            far = made.start('idle_node', 'plain', str(tmp_path), *names)
            made.wait_for(lambda: 'runs' in far.text(), 'the robot elsewhere')
        # Found, though it starts later.
        made.start('vla_tabletop.nodes.node', '--ros-args', '-r', '__ns:=/near')
        assert made.set_parameter('/near/tabletop', 'seed', 1).successful
        # Its services may be known before its name is.
        made.wait_for(lambda: '/near' in namespaces(made), 'the name of the robot here')
        assert '/far' not in namespaces(made)
