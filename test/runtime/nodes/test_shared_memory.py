"""No shared memory of a killed process stays, and a node whose port was lost joins anew."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from graph import LATCHED, TIMEOUT_S, Graph, Process, graph, popen
from rcl_interfaces.srv import GetParameters
from rclpy.parameter import parameter_value_to_python
from std_msgs.msg import String
from tabletop_policy import write_tabletop_policy
from thorough import thorough_but

from vla_runtime.nodes.shared_memory import PortWatch, remove_dead_segments

MEMORY = Path('/dev/shm')
RED, GREEN, BLUE = (f'touch the {colour} block' for colour in ('red', 'green', 'blue'))
LINUX = pytest.mark.skipif(sys.platform != 'linux', reason='Fast DDS has its segments elsewhere')


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
            ('fastdds_dead', 100.0, False),
            ('fastrtps_alive', 100.0, True),
            ('fastrtps_young', 1.0, False),
            ('fastrtps_port7412', 100.0, False),
            ('another', 100.0, False),
        ):
            stack.enter_context(segment(tmp_path, name, age_s, alive=alive))
        assert remove_dead_segments(tmp_path) == 2
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith('_el')}
    assert left == {'fastrtps_alive', 'fastrtps_young', 'fastrtps_port7412', 'another'}
    assert not (tmp_path / 'fastrtps_dead_el').exists()


@pytest.mark.graph
@LINUX
def test_the_segment_of_a_killed_node_is_removed_and_that_of_a_living_one_stays() -> None:
    """Fast DDS locks its segments as `remove_dead_segments` takes it to."""

    with graph() as made:
        dead, alive = (
            made.start('vla_tabletop.nodes.node', '--ros-args', '-r', f'__ns:=/{name}')
            for name in ('dead', 'alive')
        )
        for name in ('dead', 'alive'):
            assert made.set_parameter(f'/{name}/tabletop', 'seed', 1).successful
        of_dead, of_alive = (locked(one, r'fast(?:rtps|dds)_[0-9a-f]{16}') for one in (dead, alive))
        assert of_dead
        assert of_alive
        dead.stop(signal.SIGKILL)
        for path in (*of_dead, *of_alive):
            os.utime(f'{path}_el', (0, 0))
        remove_dead_segments()
        assert not any(path.exists() for path in of_dead)
        assert all(path.exists() for path in of_alive)


def locked(process: Process, name: str) -> set[Path]:
    """Files of shared memory whose lock a process holds; `name` is a pattern."""
    found = set()
    for link in Path(f'/proc/{process.pid}/fd').iterdir():
        # The process closes files meanwhile.
        with suppress(OSError):
            if match := re.search(rf'/({name})_el$', os.readlink(link)):
                found.add(MEMORY / match[1])
    return found


@pytest.fixture
def port() -> Iterator[Path]:
    """A port that this process listens on, as Fast DDS makes it: mapped, its lock held."""
    path = MEMORY / f'fastrtps_port{10_000_000 + os.getpid()}'
    lock = path.with_name(f'{path.name}_el')
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with lock.open('wb'), path.open('r+b') as file, mmap.mmap(file.fileno(), 0):
            yield path
    finally:
        path.unlink()
        lock.unlink()


def give_to_a_new_file(port: Path) -> None:
    """Do what a sender does that takes the port's listener for dead."""
    newer = port.with_suffix('.new')
    newer.write_bytes(bytes(mmap.PAGESIZE))
    newer.rename(port)


@LINUX
def test_a_lost_port_is_confirmed_half_a_second_after_it_was_first_seen(port: Path) -> None:
    watch = PortWatch()
    asked_s = [0.1 * tick for tick in range(60)]
    assert not any(watch.lost(now_s) for now_s in asked_s[:25])
    give_to_a_new_file(port)
    lost_s = [now_s for now_s in asked_s[25:] if watch.lost(now_s) == {port.name}]
    # Looks at 0, 2, 4 and 4.5 s.
    assert lost_s[0] == pytest.approx(4.5)


@LINUX
def test_a_port_lost_after_a_stop_of_the_process_is_noticed_within_a_second(port: Path) -> None:
    watch = PortWatch()
    assert not any(watch.lost(0.1 * tick) for tick in range(25))
    asked_s = [10.0 + 0.1 * tick for tick in range(40)]
    assert not watch.lost(asked_s[0])
    give_to_a_new_file(port)
    lost_s = [now_s for now_s in asked_s[1:] if watch.lost(now_s) == {port.name}]
    assert lost_s[0] == pytest.approx(11.0)


@pytest.mark.thorough
@pytest.mark.graph
@LINUX
def test_a_node_that_nobody_can_reach_joins_anew_as_it_was(tmp_path: Path) -> None:
    options = {
        'bundle': write_tabletop_policy(tmp_path / 'bundle'),
        'robot': 'tabletop',
        'torch_threads': 1,
    }
    words = [word for name, value in options.items() for word in ('-p', f'{name}:={value}')]
    with graph() as made:
        process = made.start('vla_runtime.nodes.policy.node', '--ros-args', *words)
        assert made.transition('/vla_policy', 'configure')
        # A latched message is delivered again to the new process, and is older than the parameter.
        task = made.node.create_publisher(String, '/vla_policy/instruction', LATCHED)
        task.publish(String(data=RED))
        made.wait_for(lambda: parameters_of(made)['instruction'] == RED, 'the message')
        # The last is valid only beside the two before it.
        changed = {
            'instruction': GREEN,
            'cache_max_age_s': 1.0,
            'cache_max_reuses': 3,
            'cache_mode': 'bounded',
        }
        for name, value in changed.items():
            assert made.set_parameter('/vla_policy', name, value).successful
        unlink_ports(process)
        made.wait_for(lambda: 'cut off' in process.text(), 'the node to notice')
        made.wait_for(lambda: task.get_subscription_count() == 0, 'the node to leave')
        # A participant that comes now finds the files of its name: the node answers there.
        with graph() as newcomer:
            said = newcomer.collect(String, '/vla_policy/current_instruction', LATCHED)
            newcomer.wait_for(
                lambda: newcomer.state('/vla_policy') == 'inactive', 'the state it had'
            )
            assert parameters_of(newcomer).items() >= changed.items()
            made.wait_for(lambda: task.get_subscription_count() == 1, 'the node to listen')
            task.publish(String(data=BLUE))
            newcomer.wait_for(lambda: bool(said) and said[-1].data == BLUE, 'a newer message')
            assert RED not in {message.data for message in said}
        assert process.stop() == 0
    assert process.text().count('cut off') == 1


def unlink_ports(process: Process) -> None:
    """Do as senders do with the ports of a process that they take for dead."""
    for port in locked(process, r'fast(?:rtps|dds)_port\d+'):
        port.unlink()


def parameters_of(made: Graph) -> dict[str, object]:
    names = ['instruction', 'cache_mode', 'cache_max_age_s', 'cache_max_reuses']
    request = GetParameters.Request(names=names)
    values = made.call(GetParameters, '/vla_policy/get_parameters', request).values
    return {
        name: parameter_value_to_python(value) for name, value in zip(names, values, strict=True)
    }


@pytest.mark.graph
@LINUX
def test_a_node_that_is_cut_off_while_it_configures_comes_up_all_the_same() -> None:
    with graph() as made:
        process = made.start('cut_off_node')
        with graph() as newcomer:
            newcomer.wait_for(lambda: 'cut off' in process.text(), 'the node to notice')
        with graph() as newcomer:
            newcomer.wait_for(lambda: newcomer.state('/cut_off') == 'active', 'it to be active')
        assert process.stop() == 0


# Python runs a file of this name before anything else: the fresh process waits there for a signal.
WAIT = """
import os, signal, time
if 'VLA_RUNTIME_NODE_STATE' in os.environ:
    print('begins again', flush=True)
    while not signal.sigpending():
        time.sleep(0.01)
"""


@pytest.mark.graph
@LINUX
@pytest.mark.parametrize('kind', ['plain', 'lifecycle'])
def test_a_node_that_starts_again_leaves_its_port_to_those_who_have_made_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """rclpy closes the participant of a plain node with the node, any other with the process."""
    (tmp_path / 'sitecustomize.py').write_text(WAIT, encoding='utf-8')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
    gate = tmp_path / 'gate'
    # Nobody else is on its graph: who maps the old file too would end that later.
    process = Process(popen('idle_node', [kind, str(gate)]), 'idle_node')
    with ExitStack() as stack:
        stack.callback(process.stop, signal.SIGKILL)
        wait_for_line(process, 'runs')
        # Others are for single endpoints, and of all domains.
        first = 7400 + 250 * int(os.environ['ROS_DOMAIN_ID'])
        (port,) = (
            path
            for path in locked(process, r'fast(?:rtps|dds)_port\d+')
            if first <= int(path.name.partition('_port')[2]) < first + 250
        )
        unlink_ports(process)
        wait_for_line(process, 'cut off')
        stack.callback(port.unlink, missing_ok=True)
        port.write_bytes(b'a file of a sender')
        inode = port.stat().st_ino
        gate.touch()
        wait_for_line(process, 'begins again')
        assert port.exists() and port.stat().st_ino == inode
        # Whoever comes would take it for a dead process's, and remove the file.
        assert not port.with_name(f'{port.name}_el').exists()
        assert process.stop() == 0, process.output()


def wait_for_line(process: Process, words: str) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while words not in process.text():
        assert process.running and time.monotonic() < end_s, process.output()
        time.sleep(0.02)


def cut_off_recorder(made: Graph, folder: Path) -> Process:
    """A recorder that runs, and whose ports are taken away."""
    process = made.start(
        'vla_runtime.nodes.recorder.node',
        *('--ros-args', '-p', 'robot:=tabletop', '-p', f'folder:={folder}'),
    )
    made.wait_for(lambda: 'recording to' in process.text(), 'the recorder to run')
    unlink_ports(process)
    return process


@pytest.mark.graph
@LINUX
@pytest.mark.parametrize('number', thorough_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_while_a_node_that_was_cut_off_starts_again_ends_it_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (tmp_path / 'sitecustomize.py').write_text(WAIT, encoding='utf-8')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / 'recording'
    with graph() as made:
        process = cut_off_recorder(made, folder)
        made.wait_for(lambda: 'begins again' in process.text(), 'the fresh process')
        assert process.stop(number) == 0, process.output()
    assert 'Traceback' not in process.text()
    assert process.text().count('recording to') == 1


@pytest.mark.thorough
@pytest.mark.graph
@LINUX
def test_a_recorder_that_is_cut_off_goes_on_in_a_folder_beside(tmp_path: Path) -> None:
    folder = tmp_path / 'recording'
    with graph() as made:
        process = cut_off_recorder(made, folder)
        again = tmp_path / 'recording_2'
        made.wait_for(lambda: f'recording to {again}' in process.text(), 'it to go on')
        assert process.stop() == 0
    assert any(folder.iterdir()) and any(again.iterdir())
