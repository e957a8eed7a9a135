"""The client that the page shows, as it stands there."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_contracts.robot import CAMERAS
from pages import blocks
from policy_servers import PATIENCE_S, Client, request, running, tiny_bundle, wait_for
from websockets.exceptions import ConnectionClosed

SOURCE = next(block for block in blocks('docs/howto/serve.md', 'python') if 'class' in block)

MOST_LINES = 60


@pytest.fixture(scope='module')
def client_of_the_page() -> Any:
    names: dict[str, Any] = {'__name__': 'client'}
    exec(compile(SOURCE, 'serve.md', 'exec'), names)
    return names['PolicyClient']


def test_it_is_short_and_needs_three_packages() -> None:
    tree = ast.parse(SOURCE)
    imported = {
        name.split('.')[0]
        for node in ast.walk(tree)
        for name in (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module or '']
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {'msgpack', 'numpy', 'websockets'}
    assert len(SOURCE.splitlines()) <= MOST_LINES


def test_it_gets_the_chunks_that_any_client_gets(client_of_the_page: Any, tmp_path: Path) -> None:
    with running(tiny_bundle(tmp_path / 'tiny'), keys=('k' * 32,)) as server:
        headers = {'Authorization': f'Api-Key {"k" * 32}'}
        with Client(server.url, additional_headers=headers) as client:
            expected = client.actions(request(1))
        with client_of_the_page(server.url, key='k' * 32) as policy:
            assert [camera['name'] for camera in policy.contract['cameras']] == [*CAMERAS]
            with pytest.raises(RuntimeError, match='observation/image'):
                policy.ask(prompt='go')
            assert np.array_equal(policy.ask(**request(1))['actions'], expected)
            assert policy.ask(endpoint='reset')['status'] == 'reset'


def test_it_takes_no_answer_that_comes_too_late(
    client_of_the_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_of_the_page.receive, '__defaults__', (0.2,))
    with running(tiny_bundle(tmp_path / 'tiny')) as server:
        run, go = server.policy._engine.run_steps, threading.Event()

        def held() -> None:
            assert go.wait(PATIENCE_S)
            run()

        with client_of_the_page(server.url) as policy:
            with monkeypatch.context() as slow:
                slow.setattr(server.policy._engine, 'run_steps', held)
                with pytest.raises(TimeoutError):
                    policy.ask(**request(1))
                go.set()
                wait_for(lambda: server.served.statistics.answers)
            with pytest.raises(ConnectionClosed):
                policy.ask(**request(2))


def test_its_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tiny_bundle(tmp_path / 'tiny')) as server:
        source = SOURCE.replace('ws://127.0.0.1:8000', server.url)
        exec(compile(source, 'serve.md', 'exec'), {'__name__': '__main__'})
    assert capsys.readouterr().out.startswith('(8, 3)')
