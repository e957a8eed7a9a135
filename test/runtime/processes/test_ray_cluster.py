"""Work on a Ray cluster: results, a killed worker, and clear errors where one cannot be used."""

import builtins
import operator
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import as_completed
from importlib.util import find_spec
from pathlib import Path

import pytest
from local_ray import Addresses, local_cluster, needs_ray
from paths import ROOT

from vla_runtime.processes import ray_cluster
from vla_runtime.processes.ray_cluster import ClusterError, ClusterUse, cluster_workers

_PATIENCE_S = 120.0


@pytest.fixture
def closed_port():
    with socket.socket() as found:
        found.bind(('127.0.0.1', 0))
        return found.getsockname()[1]


@pytest.fixture(scope='module')
def addresses(tmp_path_factory):
    """Yield the addresses of a cluster whose workers find the package and its tests."""
    folder = tmp_path_factory.mktemp('ray')
    with local_cluster(folder, ROOT, ROOT / 'test', Path(__file__).parent) as addresses:
        yield addresses


@pytest.fixture
def cluster(addresses):
    return addresses.member


@pytest.fixture
def cluster_without_package(tmp_path, monkeypatch):
    """Yield the address of a cluster that has another package of our name."""
    package = tmp_path / 'other' / 'vla_runtime'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text('')
    # Ray has workers on this machine look in this process's folder first.
    monkeypatch.chdir(tmp_path)
    with local_cluster(tmp_path, package.parent) as addresses:
        yield addresses.member


@pytest.mark.parametrize('address', ['', 'nonsense', 'host:', 'host:0', 'host:70000', ':6379'])
def test_what_is_no_address_is_refused(address, with_ray):
    with pytest.raises(ClusterError, match='expected HOST:PORT'), _open(address):
        pass


def test_where_nothing_answers_it_says_so_at_once(closed_port, with_ray):
    begin_s = time.monotonic()
    for prefix in ('', 'ray://'):
        address = f'{prefix}127.0.0.1:{closed_port}'
        with pytest.raises(ClusterError, match=f'--ray {address}: nothing answers'), _open(address):
            pass
    assert time.monotonic() - begin_s < 20.0


@pytest.mark.parametrize(
    ('said', 'expected'),
    [
        (
            '[2026-11-23 00:40:00,001 E 9 9] rpc.cc:1: retried\nAuthenticationError: Failed to '
            'connect: InvalidAuthToken: Authentication token is missing or incorrect. Note: '
            "RAY_AUTH_MODE is currently 'disabled' (not 'token'). Ensure that the token is there",
            'InvalidAuthToken: Authentication token is missing or incorrect; the cluster asks for '
            'a token: export RAY_AUTH_MODE=token, and keep',
        ),
        (
            'AuthenticationError: Token authentication is enabled but no authentication token was '
            'found. Ensure that the token for the cluster is available in a local file',
            'no authentication token was found; write the token of the machine that started',
        ),
        (
            'RuntimeError: Version mismatch: The cluster was started with: Ray: 2.40.0 Python: '
            '3.10.2 This process on 192.0.2.2 was started with: Ray: 2.60.0 Python: 3.11.7',
            'Version mismatch: The cluster was started with: Ray: 2.40.0 Python: 3.10.2 This '
            'process on 192.0.2.2 was started with: Ray: 2.60.0 Python: 3.11.7; install the same '
            'Ray and the same Python on this machine and the cluster',
        ),
        (
            'UserWarning: Ray Client connection timed out.\nConnectionError: ray client connection '
            'timeout',
            'ray client connection timeout; no client server of Ray answers there (its port is',
        ),
        ('a log line\nConnectionError: no answer', 'ConnectionError: no answer'),
        ('', 'Ray does not say why'),
    ],
)
def test_a_refusal_is_one_line_with_the_reason_of_ray_and_what_mends_it(said, expected):
    refused = str(ray_cluster._refusal('host:6379', said))
    assert refused.startswith(f'--ray host:6379: {expected}')
    assert len(refused.splitlines()) == 1


def test_without_ray_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *words, **options):
        if name == 'ray':
            raise ModuleNotFoundError("No module named 'ray'", name='ray')
        return real(name, *words, **options)

    monkeypatch.setattr(builtins, '__import__', without_ray)
    with pytest.raises(ClusterError), _open('auto'):
        pass


@pytest.fixture
def with_ray(monkeypatch):
    """Stand in for Ray where it is not installed: what is tested comes before it is used."""
    if find_spec('ray') is None:
        monkeypatch.setitem(sys.modules, 'ray', object())


def _open(address, **options):
    return cluster_workers(ClusterUse(address, **options))


@needs_ray
@pytest.mark.parametrize('kind', Addresses._fields)
def test_what_is_submitted_is_run_by_workers_in_this_folder(addresses, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    with _open(getattr(addresses, kind), inputs=[tmp_path]) as submit:
        places = [submit(os.getcwd) for _ in range(4)]
        assert {place.result(_PATIENCE_S) for place in places} == {str(tmp_path)}
        assert submit(os.getpid).result(_PATIENCE_S) != os.getpid()
        # As the function raised it, and not as Ray wraps it.
        error = submit(operator.truediv, 1, 0).exception(_PATIENCE_S)
        assert type(error) is ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is handler


@needs_ray
def test_work_of_a_killed_worker_is_done_all_the_same(cluster, tmp_path):
    with _open(cluster) as submit:
        busy = submit(_die_once, tmp_path / 'died')
        others = [submit(pow, 2, power) for power in range(8)]
        assert busy.result(_PATIENCE_S) == 'done'
        assert sorted(one.result() for one in as_completed(others)) == [2**n for n in range(8)]


def _die_once(mark: Path) -> str:
    if not mark.exists():
        mark.write_text('')
        os.kill(os.getpid(), signal.SIGKILL)
    return 'done'


@needs_ray
def test_work_that_kills_every_worker_is_an_error_not_a_hang(cluster):
    with pytest.raises(ChildProcessError, match='retries'), _open(cluster) as submit:
        submit(signal.raise_signal, signal.SIGKILL).result(_PATIENCE_S)


@needs_ray
def test_machines_that_lack_something_are_named(cluster, tmp_path, monkeypatch):
    file = tmp_path / 'bag.mcap'
    file.write_bytes(b'1234')
    with pytest.raises(ClusterError, match="'no_such_package'"):
        _refused(cluster, packages=['no_such_package'])
    with pytest.raises(ClusterError):
        _refused(cluster, cpus=3)
    with pytest.raises(ClusterError):
        _refused(cluster, gpus=1)
    for size, found in ((5, 'has another file'), (None, 'has no folder')):
        # As on a machine with another file system.
        monkeypatch.setattr(ray_cluster, '_described', lambda path, size=size: (str(path), size))
        with pytest.raises(ClusterError, match=rf'{found} .*bag\.mcap.* mount the folder'):
            _refused(cluster, inputs=[file])


def _refused(address, **options):
    with _open(address, **options):
        raise AssertionError('the cluster was used')


@needs_ray
def test_a_cluster_without_the_package_is_an_error_within_seconds(cluster_without_package):
    begin_s = time.monotonic()
    with pytest.raises(ClusterError, match='vla_runtime'):
        _refused(cluster_without_package)
    assert time.monotonic() - begin_s < 60.0


@needs_ray
def test_a_cluster_that_asks_for_a_token_says_so(tmp_path):
    with local_cluster(tmp_path, ROOT, token='0123456789abcdef') as addresses:
        with pytest.raises(ClusterError):
            _refused(addresses.member)
        # Ray's client hides the reason.
        with pytest.raises(ClusterError):
            _refused(addresses.client)


@needs_ray
def test_a_cluster_started_here_leaves_no_token_behind(tmp_path):
    code = (
        'import os\n'
        'from vla_runtime.processes.ray_cluster import ClusterUse, cluster_workers\n'
        'if __name__ == "__main__":\n'
        '    with cluster_workers(ClusterUse("local", local_cpus=1)) as submit:\n'
        '        print(submit(pow, 2, 5).result(120))\n'
        '    print([name for name in os.environ if name.startswith("RAY_AUTH")])\n'
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith('RAY_AUTH')}
    environment |= {'HOME': str(tmp_path), 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * _PATIENCE_S,
    )
    assert done.stdout.split() == ['32', '[]'], done.stderr
    assert not (tmp_path / '.ray' / 'auth_token').exists()


@needs_ray
def test_a_port_of_something_else_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(ray_cluster, '_TRIAL_S', 5.0)
    with socket.create_server(('127.0.0.1', 0)) as server:
        begin_s = time.monotonic()
        with pytest.raises(ClusterError):
            _refused(f'127.0.0.1:{server.getsockname()[1]}')
        assert time.monotonic() - begin_s < 60.0
