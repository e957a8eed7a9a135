"""The wire of Ai2's evaluation harness, frame by frame."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from policy_servers import PATIENCE_S, Client, Running, request, running, tiny_bundle
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from vla_runtime.remote.message_pack import pack, unpack


@pytest.fixture(scope='module')
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_bundle(tmp_path_factory.mktemp('eval') / 'tiny')) as made:
        yield made


def ask(socket: ClientConnection, kind: str, payload: Any, number: int = 1) -> dict[str, Any]:
    send(socket, kind, payload, number)
    return unpack(socket.recv(timeout=PATIENCE_S))


def send(socket: ClientConnection, kind: str, payload: Any, number: int = 1) -> None:
    socket.send(pack({'type': kind, 'payload': payload, 'seq': number, 'timestamp': 0.0}))


def benchmark(server: Running, query: str = '') -> Any:
    return connect(f'{server.url}/vla-eval{query}', compression=None, max_size=None)


def look(form: str = 'raw') -> dict[str, Any]:
    """The request of seed 0 as a benchmark sends it, its images in one of three forms."""
    fields = request()
    images = {
        key.removeprefix('observation/image/'): value
        for key, value in fields.items()
        if key.startswith('observation/image/')
    }
    if form != 'array':
        images = {name: encoded(image, form) for name, image in images.items()}
    return {
        'images': images,
        'states': fields['observation/state'],
        'controller_states': np.zeros(9),
        'task_description': fields['prompt'],
    }


def encoded(image: np.ndarray, form: str) -> dict[str, Any]:
    shape = list(image.shape)
    if form == 'raw':
        data = {'data': image.tobytes(), 'dtype': '|u1'}
    else:
        file = io.BytesIO()
        Image.fromarray(image).save(file, form.upper())
        data = {'data': file.getvalue()}
    return {'__image__': True, 'format': form, 'shape': shape, **data}


@pytest.mark.parametrize('form', ['array', 'raw', 'png'])
def test_rows_are_those_of_the_chunk_one_by_one(server: Running, form: str) -> None:
    with Client(server.url) as client:
        chunk = client.actions(request())
    with benchmark(server, '?replan_interval=3') as socket:
        said = ask(socket, 'hello', {'harness_version': '0.8.0', 'protocol_version': 1}, 7)
        assert (said['type'], said['seq'], said['payload']['protocol_version']) == ('hello', 7, 1)
        assert said['payload']['observation_params']['send_state'] is True
        send(socket, 'episode_start', {'task': {'name': 'cup'}})
        rows = [ask(socket, 'observation', look(form), step) for step in range(4)]
    assert [row['seq'] for row in rows] == [0, 1, 2, 3]
    found = np.array([row['payload']['actions'] for row in rows])
    np.testing.assert_array_equal(found[:3], chunk[:3].astype(np.float32))
    # A chunk of its own, with the next noise.
    assert not np.array_equal(found[3], found[0])


@pytest.mark.parametrize(
    ('kind', 'payload', 'named'),
    [
        ('observation', {**look(), 'images': {}}, 'observation/image'),
        ('observation', {**look(), 'gripper': 1.0}, 'gripper'),
        ('observation', {**look(), 'states': np.full(3, np.nan)}, 'state'),
        ('observation', {**look(), 'images': {'top': {'__image__': True}}}, 'top'),
        ('observation', 3, 'payload'),
        ('train', {}, 'type'),
        ('observation', {**look(), 'endpoint': 'reset'}, 'endpoint'),
        ('observation', {**look(), 'session_id': 'arm'}, 'session_id'),
    ],
)
def test_a_fault_is_a_message_and_the_session_goes_on(
    server: Running, kind: str, payload: Any, named: str
) -> None:
    with benchmark(server) as socket:
        said = ask(socket, kind, payload, 5)
        assert said['type'] == 'error' and named in said['payload']['error']
        assert said['seq'] == 5
        assert ask(socket, 'observation', look())['type'] == 'action'


@pytest.mark.parametrize('data', ['text', b'\xc1', pack([1, 2]), pack({'type': 'observation'})])
def test_what_is_no_message_is_an_error(server: Running, data: bytes | str) -> None:
    with benchmark(server) as socket:
        socket.send(data)
        assert unpack(socket.recv(timeout=PATIENCE_S))['type'] == 'error'
        assert ask(socket, 'observation', look())['type'] == 'action'


@pytest.mark.parametrize('interval', ['0', '-1', 'x', '9999'])
def test_an_interval_that_no_chunk_has_is_refused(server: Running, interval: str) -> None:
    with pytest.raises(InvalidStatus) as refused, benchmark(server, f'?replan_interval={interval}'):
        pass
    assert refused.value.response.status_code == 400


def test_an_episode_begins_with_a_new_chunk(server: Running) -> None:
    with benchmark(server) as socket:
        rows = []
        for _ in range(2):
            send(socket, 'episode_start', {})
            rows.append(ask(socket, 'observation', look())['payload']['actions'])
            send(socket, 'episode_end', {'success': True})
    np.testing.assert_array_equal(*rows)
