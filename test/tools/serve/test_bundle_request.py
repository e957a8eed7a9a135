"""`POST /bundles`: another bundle in the place of the served one, without a gap."""

from __future__ import annotations

import json
import threading
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from policy_servers import PATIENCE_S, Client, Running, request, running, tiny_bundle, wait_for
from tiny_policy import tiny_spec

KEY = 'a-key-that-nobody-guesses'
HEADERS = {'Authorization': f'Api-Key {KEY}'}
JSON = {'Content-Type': 'application/json'}


def post(server: Running, body: Any, headers: dict[str, str] | None = None) -> Any:
    asked = urllib.request.Request(
        f'http://127.0.0.1:{server.port}/bundles',
        json.dumps(body).encode(),
        {**JSON, **(headers or HEADERS)},
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


def client(server: Running, path: str = '') -> Client:
    return Client(server.url + path, additional_headers=HEADERS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_bundle(tmp_path / 'first')
    tiny_bundle(tmp_path / 'second', replace(tiny_spec(), name='second'))
    return tmp_path


def test_new_sessions_get_the_new_bundle_and_old_ones_keep_theirs(folder):
    with running(folder / 'first', keys=(KEY,), beside=True) as server, client(server) as old:
        chunk = old.actions(request(1, number=0))
        asking, faults = threading.Event(), []

        def robot() -> None:
            with client(server) as other:
                while not asking.is_set():
                    reply = other.ask(request(1, number=0))
                    if isinstance(reply, str) or not np.array_equal(reply['actions'], chunk):
                        faults.append(reply)

        thread = threading.Thread(target=robot)
        thread.start()
        found = post(server, {'bundle': 'second'})
        with client(server) as new:
            assert new.metadata['policy'] == 'second' != old.metadata['policy']
            with client(server, '/policies/tiny') as by_its_old_name:
                assert by_its_old_name.metadata['policy'] == 'second'
            assert new.metadata['bundle_sha256'] == found['bundle_sha256']
            new.actions(request(1))
            np.testing.assert_array_equal(old.actions(request(1, number=0)), chunk)
        asking.set()
        thread.join()
        assert not faults
        assert server.served.is_ready
        old.__exit__()
        wait_for(lambda: not server.served.is_ready)


@pytest.mark.parametrize(
    ('body', 'status'),
    [
        ({'bundle': '../second'}, 400),
        ({'bundle': '..'}, 400),
        ({'bundle': 'second' * 1000}, 400),
        ({'bundle': 7}, 400),
        ([], 400),
        ({'bundle': 'none'}, 422),
        ({'bundle': 'tiny'}, 409),
    ],
)
def test_what_cannot_be_served_leaves_the_old_one(folder, body, status):
    with running(folder / 'first', keys=(KEY,), beside=True) as server:
        with pytest.raises(HTTPError) as caught:
            post(server, body)
        assert caught.value.code == status
        assert str(folder) not in caught.value.read().decode()
        with client(server) as robot:
            robot.actions(request())


def test_pages_of_other_sites_put_no_bundle_in_place(folder):
    with running(folder / 'first', keys=(KEY,), beside=True) as server:
        for headers, status in (
            ({'Origin': 'http://evil.example'}, 403),
            ({'Content-Type': 'text/plain'}, 415),
        ):
            with pytest.raises(HTTPError) as caught:
                post(server, {'bundle': 'second'}, {**HEADERS, **headers})
            assert caught.value.code == status
        own = {**HEADERS, 'Origin': f'http://127.0.0.1:{server.port}'}
        assert post(server, {'bundle': 'second'}, own)['bundle'] == 'second'


def told(server: Running, path: str) -> str:
    asked = urllib.request.Request(f'http://127.0.0.1:{server.port}{path}', headers=HEADERS)
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def test_robots_of_a_replaced_bundle_are_seen_until_they_go(folder):
    with running(folder / 'first', keys=(KEY,), beside=True) as server, client(server) as old:
        old.actions(request(1))
        post(server, {'bundle': 'second'})
        found = json.loads(told(server, '/status'))['policies']
        assert [(name, one['connected']) for name, one in found.items()] == [
            ('second', 0),
            ('tiny', 1),
        ]
        assert 'vla_sessions{policy="tiny",state="connected"} 1.0' in told(server, '/metrics')
        with client(server) as new:
            assert new.metadata['policies'] == ['second']
        old.__exit__()
        wait_for(lambda: len(json.loads(told(server, '/status'))['policies']) == 1)
        assert 'vla_sessions{policy="tiny"' not in told(server, '/metrics')


def test_a_bundle_that_loads_while_the_server_ends_is_freed(folder, monkeypatch):
    began, go, made = threading.Event(), threading.Event(), []
    with running(folder / 'first', keys=(KEY,), beside=True) as server:
        load = server.server._load

        def held(name):
            began.set()
            assert go.wait(PATIENCE_S)
            made.append(load(name))
            return made[0]

        server.server._load = held
        server.runner.config.timeout_graceful_shutdown = 0

        def ask() -> None:
            with suppress(OSError):
                post(server, {'bundle': 'second'})

        asking = threading.Thread(target=ask)
        asking.start()
        assert began.wait(PATIENCE_S)
        server.runner.stop()
        # The request was given up.
        asking.join()
        go.set()
    assert not made[0].is_ready


def test_strangers_put_no_bundle_in_place(folder):
    with running(folder / 'first', keys=(KEY,), beside=True) as server:
        with pytest.raises(HTTPError) as caught:
            post(server, {'bundle': 'second'}, {'Authorization': 'Api-Key of-somebody-else'})
        assert caught.value.code == 401
    with running(folder / 'first', beside=True) as server:
        with pytest.raises(HTTPError) as caught:
            post(server, {'bundle': 'second'})
        assert caught.value.code == 403
