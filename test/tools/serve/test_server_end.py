"""Signals, and what a server does with its robots then; its wire under TLS."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from paths import ROOT
from policy_servers import (
    PATIENCE_S,
    Client,
    request,
    running,
    status_of,
    tiny_bundle,
    wait_for,
)
from websockets.exceptions import ConnectionClosed, InvalidStatus

from vla_runtime.cli.main import main
from vla_runtime.remote.message_pack import pack
from vla_tools.serve import uvicorn_server
from vla_tools.serve.uvicorn_server import HttpOptions

KEY = 'k' * 32


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp('bundle') / 'tiny')


def test_a_drain_answers_what_runs_and_closes_with_the_reason(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(bundle) as server, Client(server.url) as idle, Client(server.url) as busy:
        expected = busy.actions(request(1, number=0))
        run, began, go = server.policy._engine.run_steps, threading.Event(), threading.Event()

        def held() -> None:
            began.set()
            assert go.wait(PATIENCE_S)
            run()

        monkeypatch.setattr(server.policy._engine, 'run_steps', held)
        busy.socket.send(pack(request(1, number=0)))
        assert began.wait(PATIENCE_S)
        server.runner.stop()
        with pytest.raises(ConnectionClosed) as closed:
            idle.reply()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert 'shutting down' in closed.value.rcvd.reason
        with pytest.raises(InvalidStatus):
            Client(server.url)
        assert status_of(server, '/ready') == 503 and status_of(server, '/healthz') == 200
        go.set()
        assert (busy.reply()['actions'] == expected).all()
        with pytest.raises(ConnectionClosed) as closed:
            busy.reply()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


def test_a_request_that_has_arrived_by_a_signal_is_answered(bundle: Path) -> None:
    with running(bundle) as server, Client(server.url) as client:
        expected = client.actions(request(1, number=0))
        loop, go = server.runner._loop, threading.Event()
        assert loop is not None
        # Both wait for the event loop, the signal in front.
        loop.call_soon_threadsafe(go.wait, PATIENCE_S)
        server.runner.stop()
        client.socket.send(pack(request(1, number=0)))
        go.set()
        assert (client.reply()['actions'] == expected).all()
        with pytest.raises(ConnectionClosed) as closed:
            client.reply()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


def test_a_second_signal_ends_without_waiting(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    with running(bundle) as server, Client(server.url) as client:
        began = threading.Event()

        def held() -> None:
            began.set()
            assert go.wait(PATIENCE_S)

        monkeypatch.setattr(server.policy._engine, 'run_steps', held)
        client.socket.send(pack(request()))
        assert began.wait(PATIENCE_S)
        for _ in range(2):
            server.runner.handle_exit(signal.SIGTERM, None)
        with pytest.raises(ConnectionClosed):
            client.reply()
        assert server.served.is_ready
        go.set()
        server.server.close()
        assert not server.served.is_ready


@contextmanager
def process(bundle: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`vla_runtime serve` as a process of its own, and its address."""
    command = [sys.executable, '-m', 'vla_runtime', 'serve', str(bundle), '--port', '0', *options]
    started = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        line = next((line for line in started.stdout if line.startswith('ready: ')), '')
        assert line, started.communicate()
        yield started, line.split()[1]
    finally:
        started.kill()
        started.communicate()


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_well(bundle: Path, number: signal.Signals) -> None:
    with process(bundle, '--threads', '1') as (started, url), Client(url) as client:
        client.actions(request())
        started.send_signal(number)
        with pytest.raises(ConnectionClosed) as closed:
            client.reply()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        out, errors = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 0, errors
        assert not errors and 'Traceback' not in out


def test_a_killed_server_leaves_no_process(bundle: Path) -> None:
    with process(bundle, '--threads', '1') as (started, url), Client(url) as client:
        client.actions(request())
        family = psutil.Process(started.pid).children(recursive=True)
        os.kill(started.pid, signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            client.reply()
        started.wait(PATIENCE_S)
        wait_for(lambda: not any(one.is_running() for one in family))


@pytest.fixture(scope='module')
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    cert, key = (tmp_path_factory.mktemp('pem') / name for name in ('c.pem', 'k.pem'))
    words = ['req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', '-subj', '/CN=box']
    words += ['-addext', 'subjectAltName=IP:127.0.0.1', '-keyout', str(key), '-out', str(cert)]
    try:
        subprocess.run(['openssl', *words], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip('openssl is not installed')
    return cert, key


def test_with_a_certificate_the_wire_is_encrypted(
    bundle: Path, pem: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / 'keys').write_text(f'{KEY}\n')
    options = ['--tls-cert', str(pem[0]), '--tls-key', str(pem[1])]
    options += ['--key-file', str(tmp_path / 'keys'), '--host', '0.0.0.0']
    with process(bundle, *options) as (_, url):
        port = int(re.findall(r'\d+', url)[-1])
        assert url.startswith('wss://')
        context = ssl.create_default_context(cafile=pem[0])
        headers = {'Authorization': f'Api-Key {KEY}'}
        address = f'wss://127.0.0.1:{port}'
        with Client(address, ssl=context, additional_headers=headers) as client:
            client.actions(request())
        with pytest.raises(InvalidStatus):
            Client(address, ssl=context)


def test_a_certificate_and_a_key_in_each_others_place_are_refused_before_anything_loads(
    bundle: Path, pem: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ['--tls-cert', str(pem[1]), '--tls-key', str(pem[0])]
    assert main(['serve', str(bundle), '--port', '0', *words]) == 2
    told = capsys.readouterr()
    assert '--tls-cert' in told.err and not told.out


def test_a_client_that_begins_no_encryption_is_dropped(
    bundle: Path, pem: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, '_TLS_TIMEOUT_S', 0.3)
    http = HttpOptions(tls_cert=pem[0], tls_key=pem[1])
    with (
        running(bundle, http=http) as server,
        socket.create_connection(('127.0.0.1', server.port), PATIENCE_S) as silent,
    ):
        assert silent.recv(1) == b''
