"""Strangers, clients that hang, and the end of a server."""

from __future__ import annotations

import base64
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from paths import ROOT
from policy_servers import (
    PATIENCE_S,
    Client,
    Running,
    request,
    running,
    status_of,
    tiny_bundle,
    wait_for,
)
from websockets.exceptions import InvalidStatus

from vla_runtime.cli.main import main
from vla_runtime.remote.message_pack import pack
from vla_tools.serve import uvicorn_server
from vla_tools.serve.security import RateLimit, allows, is_foreign, is_loopback, read_accepted_keys
from vla_tools.serve.served_policy import ServeOptions
from vla_tools.serve.socket_connection import WireLimits
from vla_tools.serve.uvicorn_server import HttpOptions

KEY, OTHER = 'k' * 32, 'o' * 32


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp('bundle') / 'tiny')


@pytest.fixture(scope='module')
def server(bundle: Path) -> Iterator[Running]:
    with running(bundle, http=HttpOptions(max_message_bytes=100_000)) as found:
        yield found


# --- keys


def test_without_the_key_nothing_but_health_is_told(bundle: Path) -> None:
    with running(bundle, keys=(OTHER, KEY)) as server:
        for authorization in ('', 'Api-Key wrong', f'Bearer {KEY}', 'Basic !', 'Api-Key'):
            assert status_of(server, '/status', authorization) == 401
            assert status_of(server, '/metrics', authorization) == 401
            with pytest.raises(InvalidStatus) as refused:
                Client(server.url, additional_headers={'Authorization': authorization})
            assert refused.value.response.status_code == 401
        assert status_of(server, '/healthz') == status_of(server, '/ready') == 200
        basic = base64.b64encode(f'me:{KEY}'.encode()).decode()
        assert status_of(server, '/status', f'Basic {basic}') == 200
        for key in (KEY, OTHER):
            with Client(server.url, additional_headers={'Authorization': f'Api-Key {key}'}) as one:
                one.actions(request())


def test_keys_are_compared_whole() -> None:
    assert allows((KEY,), {'authorization': f'Api-Key {KEY}'})
    for wrong in (KEY[:-1], KEY + 'k', '', KEY.upper()):
        assert not allows((KEY,), {'authorization': f'Api-Key {wrong}'})


@pytest.mark.parametrize(
    'text', ['', '# none\n\n', 'short\n', 'ü' * 40, f'{KEY}\nimages: {{eye: front_camera}}\n']
)
def test_a_file_without_a_good_key_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / 'keys').write_text(text)
    with pytest.raises(ValueError, match='--key-file'):
        read_accepted_keys(tmp_path / 'keys')


def test_pages_of_other_sites_may_not_ask(server: Running) -> None:
    assert is_foreign({'origin': 'http://evil.example', 'host': '127.0.0.1:8000'})
    assert not is_foreign({'origin': 'http://box:8000', 'host': 'box:8000'})
    assert not is_foreign({'host': 'box:8000'})
    with pytest.raises(InvalidStatus) as refused:
        Client(server.url, origin='http://evil.example')
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize(
    ('host', 'own'), [('127.0.0.1', True), ('::1', True), ('localhost', True), ('0.0.0.0', False)]
)
def test_loopback_is_this_machine_alone(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_a_refused_handshake_is_one_line_that_says_why(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(bundle, keys=(KEY,)) as server:
        headers = {'Authorization': f'Api-Key {KEY}'}
        for path, sent in (('', {}), ('/policies/none', headers), ('/nowhere', headers)):
            with pytest.raises(InvalidStatus):
                Client(server.url + path, additional_headers=sent)
        wait_for(lambda: len(caplog.records) == 3)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    for (level, line), status in zip(said, (401, 404, 404), strict=True):
        assert level == 'WARNING' and '127.0.0.1' in line and str(status) in line


def test_a_rate_allows_a_seconds_worth_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, 'monotonic', lambda: now_s)
    limit = RateLimit(3.0)
    assert [limit.take() for _ in range(4)] == [True, True, True, False]
    now_s = 0.4
    assert [limit.take() for _ in range(2)] == [True, False]


REFUSED: dict[str, list[str]] = {
    'PEM': ['--tls-cert', str(ROOT / 'setup.py'), '--tls-key', str(ROOT / 'setup.py')],
    'a key': ['--host', '0.0.0.0'],
    '--max-batch': ['--max-batch', '16'],
    'belong together': ['--tls-cert', 'setup.py'],
    'no such file': ['--tls-cert', 'nothing.pem', '--tls-key', 'nothing.pem'],
    '--key-file': ['--key-file', 'nothing.txt'],
    'keys.yaml': ['--keys', 'nothing/keys.yaml'],
    'backend': ['--backend', 'abacus'],
    'device': ['--device', 'abacus'],
}


@pytest.mark.parametrize('says', REFUSED)
def test_options_that_cannot_be_are_refused(
    says: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['serve', str(bundle), '--port', '0', *REFUSED[says]]) == 2
    assert says in capsys.readouterr().err


def test_bundles_of_one_name_and_a_port_in_use_are_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['serve', str(bundle), str(bundle), '--port', '0']) == 2
    assert 'one name' in capsys.readouterr().err
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(['serve', str(bundle), '--port', port]) == 2
        assert port in capsys.readouterr().err
        assert main(['serve', str(bundle), '--port', '0', '--zmq-port', port]) == 2
        assert port in capsys.readouterr().err


# --- clients that hang


def upgraded(server: Running, buffer_bytes: int = 0) -> socket.socket:
    """A bare socket after the handshake."""
    one = socket.socket()
    if buffer_bytes:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    one.settimeout(PATIENCE_S)
    one.connect(('127.0.0.1', server.port))
    one.sendall(
        b'GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n'
        b'Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n'
    )
    assert one.recv(12) == b'HTTP/1.1 101'
    return one


def frame(payload: bytes) -> bytes:
    """A whole binary frame of a client; a mask of zeros changes nothing."""
    return b'\x82\xff' + struct.pack('!Q', len(payload)) + bytes(4) + payload


# Kinds of frames (RFC 6455, 5.2).
BINARY, PING = 2, 9


def frames_of(one: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each frame after the rest of the handshake; answers no ping."""
    file = one.makefile('rb')
    while file.readline().strip():
        pass
    while head := file.read(2):
        size = head[1]
        if size > 125:
            size = int.from_bytes(file.read(2 if size == 126 else 8), 'big')
        yield head[0] & 15, file.read(size)


def is_dropped(one: socket.socket) -> bool:
    """Read what there is until the other side ends."""
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_half_a_frame_ends_with_the_keepalive_and_hinders_nobody(bundle: Path) -> None:
    with running(bundle, http=HttpOptions(ping_s=1.0)) as server:
        half = upgraded(server)
        half.sendall(frame(pack(request()))[:500])
        with Client(server.url) as client:
            client.actions(request(number=0))
            assert is_dropped(half)
            client.actions(request(number=0))
        half.close()


@pytest.mark.parametrize('announced', [100_001, 1 << 30, (1 << 63) - 1])
def test_a_frame_that_is_too_large_closes_before_it_came(server: Running, announced: int) -> None:
    before = psutil.Process().memory_info().rss
    big = upgraded(server)
    big.sendall(b'\x82\xff' + struct.pack('!Q', announced) + bytes(4) + b'x' * 100)
    data = b''
    try:
        while got := big.recv(1 << 16):
            data += got
    except ConnectionError:
        pass
    # Message too big (RFC 6455, 7.4.1).
    assert struct.pack('!H', 1009) in data
    assert psutil.Process().memory_info().rss - before < 50e6
    big.close()


def test_a_request_that_never_comes_is_dropped(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, '_HEAD_TIMEOUT_S', 0.2)
    silent, slow = (socket.create_connection(('127.0.0.1', server.port)) for _ in range(2))
    for one in (silent, slow):
        one.settimeout(PATIENCE_S)
    slow.sendall(b'GET /status HTTP/1.1\r\nHost:')
    second = socket.create_connection(('127.0.0.1', server.port))
    second.settimeout(PATIENCE_S)
    second.sendall(b'GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /hea')
    for one in (silent, slow, second):
        assert is_dropped(one)
        one.close()


def test_a_robot_whose_dead_link_is_not_yet_known_comes_back_to_its_session(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, '_PROBE_TIMEOUT_S', 0.5)
    dead = upgraded(server)
    dead.sendall(frame(pack(request(1, session_id='arm'))))
    wait_for(lambda: any(one.name == 'arm' and one.engine for one in server.served.sessions.all))
    with Client(server.url) as client:
        # It answers no ping.
        facts = client.ask(request(1, session_id='arm'))['vla_runtime']
        assert facts['number'] == 1 and facts['cache_prefix'].startswith('hit')
    assert is_dropped(dead)
    dead.close()


def test_a_full_server_lets_a_robot_back_whose_link_is_dead(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, '_PROBE_TIMEOUT_S', 0.5)
    with running(bundle, options=ServeOptions(max_sessions=1)) as server:
        dead = upgraded(server)
        dead.sendall(frame(pack(request(1, session_id='arm'))))
        wait_for(lambda: any(one.engine for one in server.served.sessions.all))
        with Client(server.url) as client:
            facts = client.ask(request(1, session_id='arm'))['vla_runtime']
            assert facts['number'] == 1 and facts['cache_prefix'].startswith('hit')
            with pytest.raises(InvalidStatus):
                Client(server.url)
        wait_for(lambda: not server.served.sessions.connected)
        # And cleanly.
        with Client(server.url) as client:
            assert client.ask(request(1, session_id='arm'))['vla_runtime']['number'] == 2
        dead.close()


def test_a_robot_that_two_others_ask_after_at_once_keeps_its_session(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, asked = server.served.sessions.free, []

    async def counted(name: str | None) -> None:
        asked.append(name)
        await free(name)

    monkeypatch.setattr(server.served.sessions, 'free', counted)
    robot = upgraded(server)
    robot.sendall(frame(pack(request(1, session_id='leg'))))
    frames = frames_of(robot)
    assert [next(frames)[0] for _ in range(2)] == [BINARY, BINARY]
    asked.clear()
    with Client(server.url) as one, Client(server.url) as other:
        for client in (one, other):
            client.socket.send(pack(request(1, session_id='leg')))
        wait_for(lambda: len(asked) == 2)
        kind, payload = next(frames)
        assert kind == PING
        # A robot far away answers late.
        robot.sendall(b'\x8a\x88' + bytes(4) + payload)
        assert all('session_id' in client.reply() for client in (one, other))
    robot.sendall(frame(pack(request(1))))
    assert next(frames)[0] == BINARY
    robot.close()


def test_many_connections_leave_room_for_the_robots(bundle: Path) -> None:
    with running(bundle, options=ServeOptions(max_sessions=300)) as server:
        clients = [Client(server.url) for _ in range(200)]
        try:
            assert len(server.served.sessions) == 200
            # No cache but those of the check of the batches, until somebody asks.
            assert len(server.policy._free_caches) == 8
            clients[0].actions(request())
            clients[199].actions(request())
        finally:
            for client in clients:
                client.__exit__()
        wait_for(lambda: server.server.open_connections == 0)
        wait_for(lambda: len(server.served.sessions.connected) == 0)


def test_connections_beyond_the_most_are_dropped(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, '_MOST_CONNECTIONS', 0)
    with socket.create_connection(('127.0.0.1', server.port)) as one:
        one.settimeout(PATIENCE_S)
        assert is_dropped(one)


def test_a_client_that_never_reads_is_dropped(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, '_HEAD_TIMEOUT_S', 1.0)
    limits = WireLimits(requests_per_s=1e6, send_timeout_s=0.3)
    with running(bundle, limits=limits) as server:
        deaf = upgraded(server, buffer_bytes=4096)
        deaf.settimeout(0.2)
        text = b'\x81\x80' + bytes(4)
        try:
            # Each gets a reply that nobody takes.
            while server.server.open_connections:
                deaf.sendall(text * 100)
        except (TimeoutError, ConnectionError):
            pass
        wait_for(lambda: server.server.open_connections == 0)
        with Client(server.url) as client:
            client.actions(request())
        deaf.close()


def test_a_robot_that_goes_while_its_request_runs_hinders_nobody(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(bundle, options=ServeOptions(keep_s=0.0)) as server:
        run, began, go = server.policy._engine.run_steps, threading.Event(), threading.Event()

        def held() -> None:
            began.set()
            assert go.wait(PATIENCE_S)
            run()

        monkeypatch.setattr(server.policy._engine, 'run_steps', held)
        gone = upgraded(server)
        gone.sendall(frame(pack(request())))
        assert began.wait(PATIENCE_S)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        gone.close()
        go.set()
        wait_for(lambda: len(server.served.sessions) == 0)
        with Client(server.url) as client:
            client.actions(request())
