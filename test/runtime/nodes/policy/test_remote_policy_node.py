"""An arm that moves with its policy on a server, and servers that fail under it.

The server is a process of its own with the tiny policy's bundle, which neither node has.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from graph import graph
from remote_robot import POLICY, Running, remote_files
from served_process import ServedProcess
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.success import spec_identity

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return remote_files(tmp_path_factory.mktemp('remote'))


@pytest.fixture(scope='module')
def server(files: tuple[Path, Path]) -> Iterator[ServedProcess]:
    process = ServedProcess(files[0])
    yield process
    process.kill()


@pytest.fixture(scope='module')
def running(files: tuple[Path, Path], server: ServedProcess) -> Iterator[Running]:
    with graph() as made:
        running = Running(made, files[1], server.url)
        running.start()
        yield running


def test_the_status_names_the_server_and_its_policy(
    running: Running, files: tuple[Path, Path], server: ServedProcess
) -> None:
    said = running.say(POLICY, 'server', server.url)
    assert said['bundle_sha256'] == spec_identity(read_bundle(files[0]).spec)
    assert (said['backend'], said['device'], said['server']) == ('torch', 'cpu', server.url)
    assert float(said['network_ms']) > 0.0 and said['mode'] == 'connected'


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGSTOP])
def test_an_arm_holds_without_its_server_and_goes_on_with_it(
    running: Running, files: tuple[Path, Path], server: ServedProcess, how: signal.Signals
) -> None:
    running.move()
    if how is signal.SIGKILL:
        server.kill()
    else:
        server.send(how)
    running.hold()
    held = running.arm.arm[-1]
    running.say(POLICY, 'observation', server.url)
    running.hold()
    # Nothing that comes late moves it, and it stays where it was.
    assert running.arm.arm[-1] == held
    if how is signal.SIGKILL:
        server.start(files[0])
    else:
        server.send(signal.SIGCONT)
    running.move()
    assert int(running.say(POLICY, 'server', server.url)['reconnects']) >= 1


def test_another_bundle_moves_nothing_until_the_first_is_back(
    running: Running, files: tuple[Path, Path], server: ServedProcess, tmp_path: Path
) -> None:
    other = write_tiny_policy(tmp_path / 'other', tiny_spec())
    running.move()
    server.kill()
    server.start(other)
    said = running.say(POLICY, 'server', 'another bundle')['text']
    for bundle in (files[0], other):
        assert spec_identity(read_bundle(bundle).spec)[:12] in said
    running.hold()
    server.kill()
    server.start(files[0])
    running.move()


def test_a_setting_that_a_server_has_no_use_for_is_refused(running: Running) -> None:
    result = running.graph.set_parameter(POLICY, 'pipeline', 'throughput')
    assert not result.successful and 'pipeline' in result.reason
    assert running.graph.set_parameter(POLICY, 'cfg_beta', 1.5).successful
    running.graph.wait_for(lambda: running.arm.moves, 'motion')
