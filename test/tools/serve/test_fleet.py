"""A fleet on Ray Serve: two replicas on the CPU, one of them killed, a bundle rolled out."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import psutil
import pytest
import yaml
from local_ray import needs_ray
from paths import ROOT
from policy_servers import Client, running

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.family.declaration import image_sizes
from vla_tools.serve.fleet_config import INGRESS_APP
from vla_tools.serve.fleet_placement import replica_for_name, replica_for_new

DEMO = ROOT / 'engines' / 'demo'
KEY = 'a-key-of-the-tests-of-a-fleet'
HEADERS = {'Authorization': f'Api-Key {KEY}'}
ROBOTS = 4
# Ray starts within ten seconds on an idle machine.
PATIENCE_S = 180.0
JSON = {'Content-Type': 'application/json'}
needs_serve = pytest.mark.skipif(
    find_spec('fastapi') is None,
    reason="Ray Serve is not installed: pip install '.[fleet]'",
)


@dataclass
class Fleet:
    """A fleet that runs, and the process that started it."""

    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f'ws://127.0.0.1:{self.port}'

    def client(self) -> Client:
        return Client(self.url, additional_headers=HEADERS)

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f'http://127.0.0.1:{self.port}{path}', data, {**HEADERS, **JSON}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.read().decode()

    @property
    def replicas(self) -> list[psutil.Process]:
        """Processes of the replicas."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if 'ServeReplica:policy-' in ' '.join(one.cmdline()):
                    found.append(one)
            except psutil.Error:
                continue
        return found

    @property
    def policies(self) -> dict[str, Any]:
        return json.loads(self.get('/status'))['policies']


def look(robot: int, turn: int) -> dict[str, Any]:
    """What a robot sends; its noise depends on robot and turn alone."""
    spec = read_bundle(DEMO).spec
    random = np.random.default_rng(1000 * robot + turn - (turn % 3 == 2))
    images = {
        f'observation/image/{camera.name}': random.integers(0, 256, (*size, 3), dtype=np.uint8)
        for camera, size in zip(spec.cameras, image_sizes(spec.dims), strict=True)
    }
    state = random.uniform(-0.1, 0.1, len(spec.state))
    words = 'touch the red block'
    return {**images, 'observation/state': state, 'prompt': words, 'seed': robot, 'number': turn}


@pytest.fixture(scope='module')
def alone() -> Any:
    """Return a function that gives the chunk of a robot's turn, from a server without Ray."""
    known: dict[tuple[int, int], np.ndarray] = {}
    with running(DEMO) as server, Client(server.url) as client:

        def chunk(robot: int, turn: int) -> np.ndarray:
            if (robot, turn) not in known:
                known[robot, turn] = client.actions(look(robot, turn))
            return known[robot, turn]

        yield chunk


@pytest.fixture(scope='module')
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a fleet of two replicas; afterwards no process of it is left."""
    folder = tmp_path_factory.mktemp('fleet')
    for name in ('first', 'second'):
        shutil.copytree(DEMO, folder / name)
    text = (folder / 'second' / 'policy.yaml').read_text()
    document = yaml.safe_load(text)
    text = text.replace(f'name: {document["name"]}\n', 'name: second\n', 1)
    (folder / 'second' / 'policy.yaml').write_text(text)
    (folder / 'key.txt').write_text(KEY)
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    words = ['serve', '--ray', str(folder / 'first'), '--replicas', '2', '--threads', '1']
    words += ['--device', 'cpu', '--port', str(port), '--keep', '2', '--max-rate', '10000']
    words += ['--key-file', str(folder / 'key.txt'), '--backend', 'torch']
    log = folder / 'log.txt'
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    environment = {**os.environ, 'PYTHONPATH': path, 'RAY_raylet_start_wait_time_s': '120'}
    environment.pop('RAY_ADDRESS', None)
    with log.open('w') as output:
        process = subprocess.Popen(
            [sys.executable, '-c', 'from vla_runtime.cli.main import main; main()', *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            text=True,
        )
    try:
        wait_for(lambda: process.poll() is not None or 'ready: ws://' in log.read_text())
        assert process.poll() is None, log.read_text()
        yield Fleet(port, process)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
        _, left = psutil.wait_procs(started, 30)
        assert not left
    finally:
        if process.poll() is None:
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
            process.kill()
            process.wait()


def wait_for(condition: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, 'waited in vain'
        time.sleep(0.1)


@contextmanager
def asking(fleet: Fleet, alone: Any) -> Any:
    """Have robots ask without a pause; yields the turns of each and its faults so far.

    Every chunk is compared with the one alone.
    """
    turns, faults, stop = [0] * ROBOTS, [[] for _ in range(ROBOTS)], threading.Event()

    def robot(number: int) -> None:
        with fleet.client() as client:
            while not stop.is_set():
                turn = turns[number] % 6
                reply = client.ask(look(number, turn))
                if isinstance(reply, str):
                    faults[number].append(reply)
                    continue
                np.testing.assert_array_equal(reply['actions'], alone(number, turn))
                turns[number] += 1

    for number in range(ROBOTS):
        for turn in range(6):
            alone(number, turn)
    with ThreadPoolExecutor(ROBOTS) as pool:
        try:
            found = [pool.submit(robot, number) for number in range(ROBOTS)]
            wait_for(lambda: min(turns) > 2 or any(one.done() for one in found))
            yield turns, faults
        finally:
            stop.set()
            for one in found:
                one.result(PATIENCE_S)


@needs_ray
@needs_serve
@pytest.mark.thorough
def test_robots_of_two_replicas_get_the_chunks_they_get_alone(fleet, alone):
    with asking(fleet, alone) as (_, faults):
        connected = [one['connected'] for one in fleet.policies.values()]
        assert connected == [2, 2]
    assert not any(faults)


@needs_ray
@needs_serve
@pytest.mark.thorough
def test_a_robot_comes_back_to_the_replica_that_has_its_cache(fleet):
    with fleet.client() as client:
        name = client.metadata['session_id']
        assert client.ask(look(0, 0))['vla_runtime']['cache_prefix'].startswith('miss')
    # Others are at the replica with the fewest sessions by now.
    with fleet.client(), fleet.client(), fleet.client() as client:
        reply = client.ask({**look(0, 0), 'session_id': name})
        assert reply['vla_runtime']['cache_prefix'].startswith('hit')
        other = fleet.client()
        refused = other.ask({**look(1, 0), 'session_id': name})
        assert isinstance(refused, str) and 'session_id' in refused


@needs_ray
@needs_serve
@pytest.mark.thorough
def test_robots_of_a_killed_replica_go_on_at_another_one(fleet, alone):
    with asking(fleet, alone) as (turns, faults):
        fleet.replicas[0].send_signal(signal.SIGKILL)
        # All go on before the replica is there again.
        wait_for(lambda: sum(map(bool, faults)) == 2)
        at_fault = list(turns)
        wait_for(lambda: all(now > before + 3 for now, before in zip(turns, at_fault, strict=True)))
    assert sorted(map(len, faults)) == [0, 0, 1, 1]
    wait_for(lambda: len(fleet.policies) == 2)


@needs_ray
@needs_serve
@pytest.mark.thorough
def test_a_bundle_is_rolled_out_without_dropping_a_session(fleet, alone):
    with asking(fleet, alone) as (turns, faults):
        old = {one['policy'] for one in fleet.policies.values()}
        found = json.loads(fleet.get('/bundles', {'bundle': 'second'}))
        assert found['application'] == 'policy-2'
        with fleet.client() as client:
            assert client.metadata['policy'] == 'second' not in old
            assert isinstance(client.ask(look(0, 0)), dict)
        before = list(turns)
        wait_for(lambda: all(now > then + 3 for now, then in zip(turns, before, strict=True)))
        assert not any(faults)
    wait_for(lambda: {one['policy'] for one in fleet.policies.values()} == {'second'})


@needs_ray
@needs_serve
@pytest.mark.thorough
def test_strangers_and_bundles_elsewhere_are_refused(fleet):
    for body, code in (({'bundle': '../first'}, 400), ({'bundle': 'none'}, 404), ({}, 400)):
        with pytest.raises(HTTPError) as caught:
            fleet.get('/bundles', body)
        assert caught.value.code == code
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(f'http://127.0.0.1:{fleet.port}/status')
    assert caught.value.code == 401
    assert 'vla_answers_total{policy="' in fleet.get('/metrics')


@needs_ray
@needs_serve
def test_a_cluster_that_cannot_be_had_is_told(monkeypatch, capsys):
    def init(*_: Any, **__: Any) -> None:
        # As Ray does where its processes do not come up in time.
        raise Exception('the node timed out')

    monkeypatch.setattr('ray.init', init)
    assert main(['serve', '--ray', str(DEMO)]) == 2
    assert 'error: Ray cannot be started: the node timed out' in capsys.readouterr().err


def test_the_file_for_ray_is_written_without_a_cluster(tmp_path: Path):
    path = tmp_path / 'fleet.yaml'
    words = ['serve', str(DEMO), '--ray-config', str(path), '--replicas', '3', '--keep', '5']
    assert main(words) == 0
    written = yaml.safe_load(path.read_text())
    policies, ingress = written['applications']
    assert policies['args']['bundle'] == str(DEMO.resolve())
    assert policies['args']['replicas'] == 3
    assert policies['route_prefix'] is None
    assert ingress['name'] == INGRESS_APP and ingress['args']['keep_s'] == 5
    assert written['http_options']['port'] == 8000


@pytest.mark.parametrize(
    'words',
    [
        ['--port', '0'],
        ['--zmq-port', '5555'],
        ['--host', '0.0.0.0'],
        [str(ROOT / 'engines' / 'demo_act')],
    ],
)
def test_options_that_are_not_for_a_fleet_are_refused(words, tmp_path, capsys):
    path = tmp_path / 'fleet.yaml'
    assert main(['serve', str(DEMO), '--ray-config', str(path), *words]) == 2
    assert not path.exists()
    assert '--' in capsys.readouterr().err


def test_a_session_is_at_the_same_replica_whoever_asks():
    replicas = ['a', 'b', 'c']
    assert replica_for_name('b.0123', replicas) == 'b'
    names = [f'arm{number}' for number in range(300)]
    found = {name: replica_for_name(name, replicas) for name in names}
    assert all(list(found.values()).count(one) > 60 for one in replicas)
    without = {name: replica_for_name(name, ['c', 'a']) for name in names}
    assert all(without[name] == one for name, one in found.items() if one != 'b')
    assert replica_for_new(replicas, {'a': 2, 'c': 1}) == 'b'
    assert replica_for_name('arm', []) is None is replica_for_new([], {})
