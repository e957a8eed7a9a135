"""The executor's process has no shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph import graph
from paths import ROOT

from vla_runtime.ros.middleware import PROFILE_VARIABLES, keep_to_udp

CONFIG = ROOT / 'config'
SHIPPED = str(CONFIG / 'fastdds.xml')


def profile_with(environment: dict[str, str]) -> str:
    """Name of the file that is in force afterwards; '' for none."""
    keep_to_udp(environment, CONFIG)
    files = {Path(environment.get(name, '')).name for name in PROFILE_VARIABLES}
    assert len(files) == 1
    return files.pop()


@pytest.mark.parametrize(
    ('environment', 'profile', 'discovery'),
    [
        ({}, 'fastdds_executor.xml', None),
        (dict.fromkeys(PROFILE_VARIABLES, SHIPPED), 'fastdds_executor.xml', None),
        ({'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST'}, '', 'LOCALHOST'),
        ({'RMW_IMPLEMENTATION': 'rmw_cyclonedds_cpp'}, '', None),
    ],
)
def test_the_profile_without_shared_memory_is_taken_in_the_shipped_ones_place(
    environment: dict[str, str], profile: str, discovery: str | None
) -> None:
    assert profile_with(environment) == profile
    assert environment.get('ROS_AUTOMATIC_DISCOVERY_RANGE') == discovery


def test_a_profile_of_the_users_own_stays_in_force(tmp_path: Path) -> None:
    mine = tmp_path / 'fastdds.xml'
    mine.write_text('<profiles/>', encoding='utf-8')
    assert profile_with(dict.fromkeys(PROFILE_VARIABLES, str(mine))) == 'fastdds.xml'


@pytest.mark.graph
@pytest.mark.parametrize('profile', ['', SHIPPED])
def test_the_running_node_maps_no_shared_memory_of_fast_dds(
    monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    for name in PROFILE_VARIABLES:
        monkeypatch.setenv(name, profile)
    monkeypatch.setenv('ROS_AUTOMATIC_DISCOVERY_RANGE', 'SUBNET')
    with graph() as made:
        executor = made.start('vla_runtime.ros.executor.node')
        tabletop = made.start('vla_runtime.tabletop.ros.node')
        # Both are found, and answer.
        assert made.state('/vla_executor') == 'unconfigured'
        assert made.set_parameter('/tabletop', 'seed', 1).successful
        mapped = {
            process.pid: '/dev/shm/fastrtps_' in Path(f'/proc/{process.pid}/maps').read_text()
            for process in (executor, tabletop)
        }
    # The other node shows that it would be seen.
    assert mapped == {executor.pid: False, tabletop.pid: True}


@pytest.mark.graph
def test_the_tests_own_node_has_no_shared_memory_to_be_cut_off_from() -> None:
    def mapped() -> set[str]:
        lines = Path('/proc/self/maps').read_text().splitlines()
        return {line.split()[-1] for line in lines if '/dev/shm/fastrtps_' in line}

    before = mapped()
    with graph() as made:
        made.start('vla_runtime.tabletop.ros.node')
        assert made.set_parameter('/tabletop', 'seed', 1).successful
        assert mapped() <= before
