"""The executor's process has no shared memory, and none of a killed process stays."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from graph import graph
from paths import ROOT

from vla_runtime.ros.middleware import PROFILE_VARIABLES, keep_to_udp, remove_dead_segments

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


@contextmanager
def segment(folder: Path, name: str, age_s: float, *, alive: bool = False) -> Iterator[None]:
    """A segment as Fast DDS makes it: the memory, and a lock file that a living process holds."""
    lock = folder / f'{name}_el'
    with lock.open('wb') as file:
        (folder / name).write_bytes(b'memory')
        if alive:
            fcntl.flock(file, fcntl.LOCK_EX)
        made_s = time.time() - age_s
        os.utime(lock, (made_s, made_s))
        yield


def test_only_the_shared_memory_of_dead_processes_is_removed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name, age_s, alive in (
            ('fastrtps_dead', 100.0, False),
            ('fastrtps_alive', 100.0, True),
            ('fastrtps_young', 1.0, False),
            ('fastrtps_port7412', 100.0, False),
            ('another', 100.0, False),
        ):
            stack.enter_context(segment(tmp_path, name, age_s, alive=alive))
        assert remove_dead_segments(tmp_path) == 1
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith('_el')}
    assert left == {'fastrtps_alive', 'fastrtps_young', 'fastrtps_port7412', 'another'}
    assert not (tmp_path / 'fastrtps_dead_el').exists()


@pytest.mark.graph
@pytest.mark.skipif(sys.platform != 'linux', reason='Fast DDS has its segments elsewhere')
def test_the_segment_of_a_killed_node_is_removed_and_that_of_a_living_one_stays() -> None:
    """Fast DDS locks its segments as `remove_dead_segments` takes it to."""
    memory = Path('/dev/shm')

    def segments(pid: int) -> set[Path]:
        maps = Path(f'/proc/{pid}/maps').read_text(encoding='utf-8')
        names = set(re.findall(r'fastrtps_[0-9a-f]{16}', maps))
        return {memory / name for name in names if (memory / f'{name}_el').exists()}

    with graph() as made:
        dead, alive = (
            made.start('vla_runtime.tabletop.ros.node', '--ros-args', '-r', f'__ns:=/{name}')
            for name in ('dead', 'alive')
        )
        for name in ('dead', 'alive'):
            assert made.set_parameter(f'/{name}/tabletop', 'seed', 1).successful
        own = {
            process.pid: segments(process.pid) - segments(os.getpid()) for process in (dead, alive)
        }
        of_dead, of_alive = (own[a.pid] - own[b.pid] for a, b in ((dead, alive), (alive, dead)))
        assert of_dead
        assert of_alive
        dead.stop(signal.SIGKILL)
        for path in (*of_dead, *of_alive):
            os.utime(f'{path}_el', (0, 0))
        remove_dead_segments()
        assert not any(path.exists() for path in of_dead)
        assert all(path.exists() for path in of_alive)
