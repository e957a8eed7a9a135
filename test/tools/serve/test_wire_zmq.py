"""NVIDIA's wire: its clients' messages, sessions beside those of the other wire, refusals."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from family_contracts.robot import CAMERAS
from policy_servers import PATIENCE_S, Client, Running, request, running, tiny_bundle, wait_for
from tiny_policy import tiny_spec

from vla_runtime.remote.message_pack import MessageError, unpack
from vla_tools.serve import wire_zmq
from vla_tools.serve.modalities import Modalities
from vla_tools.serve.request_keys import KeysFile

KEY = 'k' * 32


def as_npy(array: np.ndarray) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {'__ndarray_class__': True, 'as_npy': file.getvalue()}


def as_msgpack_numpy(array: np.ndarray) -> dict[bytes, Any]:
    return {
        b'nd': True,
        b'type': array.dtype.str,
        b'kind': b'',
        b'shape': array.shape,
        b'data': array.tobytes(),
    }


class Robot:
    """A client as Isaac-GR00T's, with either form of arrays."""

    def __init__(self, port: int, form: Any = as_npy, token: str | None = None) -> None:
        self.socket = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f'tcp://127.0.0.1:{port}')
        self.form, self.token = form, token

    def __enter__(self) -> Robot:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def call(self, endpoint: Any, data: Any = None) -> Any:
        message = {'endpoint': endpoint, 'data': data}
        if self.token is not None:
            message['api_token'] = self.token
        self.socket.send(msgpack.packb(message, default=self.form))
        return unpack(self.socket.recv())

    def act(self, look: int, **changes: Any) -> Any:
        return self.call('get_action', {'observation': seen(look, **changes), 'options': None})


def seen(look: int, **changes: Any) -> dict[str, Any]:
    asked = request(look)
    return {
        'video': {name: asked[f'observation/image/{name}'][None, None] for name in CAMERAS},
        'state': {'state': asked['observation/state'].astype(np.float32)[None, None]},
        'language': {'annotation.human.task_description': [[asked['prompt']]]},
        **changes,
    }


@pytest.fixture(scope='module')
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp('bundle') / 'tiny')


@pytest.fixture(scope='module')
def server(bundle: Path) -> Iterator[Running]:
    with running(bundle, zmq=True) as found:
        yield found


@pytest.mark.parametrize('form', [as_npy, as_msgpack_numpy])
def test_a_chunk_is_that_of_the_other_wire(server: Running, form: Any) -> None:
    asked = request(1)
    asked['observation/state'] = asked['observation/state'].astype(np.float32)
    with Client(server.url) as client, Robot(server.zmq_port, form) as robot:
        for number in range(2):
            expected = client.actions(asked).astype(np.float32)
            chunk, info = robot.act(1)
            assert chunk['action'].dtype == np.float32
            assert np.array_equal(chunk['action'], expected[None])
            assert info['number'] == number


def test_it_says_that_it_is_there_and_what_it_takes(server: Running) -> None:
    with Robot(server.zmq_port) as robot:
        assert robot.call('ping')['status'] == 'ok'
        config = robot.call('get_modality_config')
        assert config['video']['modality_keys'] == [*CAMERAS]
        assert config['state']['modality_keys'] == ['state']
        assert config['action']['modality_keys'] == ['action']


def test_robots_at_once_have_sessions_of_their_own(server: Running) -> None:
    def run(look: int) -> list[np.ndarray]:
        with Robot(server.zmq_port) as robot:
            first = [robot.act(look + turn)[0]['action'] for turn in range(3)]
            assert robot.call('reset') == {}
            assert np.array_equal(robot.act(look)[0]['action'], first[0])
            return first

    looks = range(0, 50, 10)
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(run, looks))
    for look, chunks in zip(looks, together, strict=True):
        assert all(map(np.array_equal, chunks, run(look)))


REFUSED: dict[str, tuple[Any, Any]] = {
    'kill': ('kill', None),
    'endpoint': (7, None),
    'video.top': ('get_action', {'observation': seen(1, video={'top': np.zeros((1, 1, 4), 'u1')})}),
    'video.nose': (
        'get_action',
        {'observation': seen(1, video={'nose': np.zeros((1, 1, 4, 4, 3), np.uint8)})},
    ),
    'state.state': ('get_action', {'observation': seen(1, state={'state': np.zeros((1, 1, 2))})}),
    'state.legs': ('get_action', {'observation': seen(1, state={'legs': np.zeros((1, 1, 2))})}),
    'state.state: is missing': ('get_action', {'observation': seen(1, state={})}),
    'observation/image/wrist': (
        'get_action',
        {'observation': seen(1, video={'top': np.zeros((1, 1, 4, 4, 3), np.uint8)})},
    ),
    'language': ('get_action', {'observation': seen(1, language={'task': [['a', 'b']]})}),
    'prompt': ('get_action', {'observation': seen(1, language={})}),
    'language.b': ('get_action', {'observation': seen(1, language={'a': [['x']], 'b': [['y']]})}),
    'options/steps': ('get_action', {'observation': seen(1), 'options': {'steps': 4}}),
    'optionsfoo': ('get_action', {'observation': seen(1), 'optionsfoo': 4}),
    "'observation/smell'": ('get_action', {'observation': seen(1, smell=1)}),
    'map': ('get_action', None),
}


@pytest.mark.parametrize('says', REFUSED)
def test_what_does_not_fit_is_told_and_the_session_goes_on(server: Running, says: str) -> None:
    with Robot(server.zmq_port) as robot:
        before = robot.act(1)[0]['action']
        reply = robot.call(*REFUSED[says])
        assert says in reply['error'], reply
        assert robot.act(1)[1]['number'] == 1 and before.shape == (1, 8, 3)


def test_bytes_that_are_no_message_are_told(server: Running) -> None:
    with Robot(server.zmq_port) as robot:
        robot.socket.send(b'\xc1\x00')
        assert 'error' in unpack(robot.socket.recv())
        assert robot.call('ping')['status'] == 'ok'


def test_frames_of_other_kinds_of_sockets_are_passed_over(server: Running) -> None:
    odd = zmq.Context.instance().socket(zmq.DEALER)
    odd.setsockopt(zmq.LINGER, 0)
    odd.connect(f'tcp://127.0.0.1:{server.zmq_port}')
    odd.send_multipart([b'a', b'b', b'c', b'd'])
    odd.send(b'x')
    with Robot(server.zmq_port) as robot:
        assert robot.call('ping')['status'] == 'ok'
    odd.close()


def test_without_the_key_nothing_is_told(bundle: Path) -> None:
    with running(bundle, zmq=True, keys=(KEY,)) as server:
        for token in (None, '', 'wrong', KEY[:-1]):
            with Robot(server.zmq_port, token=token) as robot:
                assert set(robot.call('ping')) == {'error'}
        with Robot(server.zmq_port, token=KEY) as robot:
            assert robot.call('ping')['status'] == 'ok'


@pytest.mark.parametrize('limit', ['requests', 'bytes'])
def test_only_so_many_requests_are_held_at_once(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    message = msgpack.packb({'endpoint': 'ping', 'api_token': 'wrong'})
    if limit == 'requests':
        monkeypatch.setattr(wire_zmq, '_MOST_OPEN', 2)
    with running(bundle, zmq=True, keys=(KEY,)) as server:
        wire = server.server._zmq
        assert wire is not None
        if limit == 'bytes':
            wire._most_bytes = len(message) + 1
        read, go, began = wire._read, threading.Event(), []

        def held(data: bytes) -> Any:
            began.append(len(data))
            assert go.wait(PATIENCE_S)
            return read(data)

        monkeypatch.setattr(wire, '_read', held)
        many = zmq.Context.instance().socket(zmq.DEALER)
        many.setsockopt(zmq.LINGER, 0)
        many.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        many.connect(f'tcp://127.0.0.1:{server.zmq_port}')
        for _ in range(6):
            many.send_multipart([b'', message])
        wait_for(lambda: len(began) == 2)
        # Whoever else asks finds the server's threads at work, not its memory full.
        assert len(wire._tasks) == 2
        go.set()
        assert all('error' in unpack(many.recv_multipart()[1]) for _ in range(6))
        many.close()


def test_a_client_that_asks_no_more_is_left(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_zmq, '_IDLE_S', 0.0)
    with running(bundle, zmq=True) as server:
        with Robot(server.zmq_port) as robot:
            robot.act(1)
        wait_for(lambda: not server.served.sessions.connected)


def test_groups_name_parts_of_state_and_actions(bundle: Path) -> None:
    file = KeysFile(
        images={'video/ego_view': 'top'}, groups={'arm': 'shoulder, elbow', 'hand': 'gripper'}
    )
    with running(bundle, zmq=True, mapped=file) as server, Robot(server.zmq_port) as robot:
        # One name a camera: a client fills every one that it is told.
        assert robot.call('get_modality_config')['video']['modality_keys'] == ['wrist', 'ego_view']
        state = request(1)['observation/state'].astype(np.float32)
        parts = {'arm': state[None, None, :2], 'hand': state[None, None, 2:]}
        video = seen(1)['video']
        chunk, _ = robot.act(
            1, state=parts, video={'ego_view': video['top'], 'wrist': video['wrist']}
        )
        assert {name: array.shape for name, array in chunk.items()} == {
            'arm': (1, 8, 2),
            'hand': (1, 8, 1),
        }


def test_two_videos_of_a_camera_are_refused() -> None:
    file = KeysFile(images={'video/ego_view': 'top', 'video/head': 'top'})
    with pytest.raises(ValueError, match='video/head'):
        Modalities.of(tiny_spec(), file)


@pytest.mark.parametrize(
    'groups',
    [
        {'arm': 'shoulder'},
        {'a': 'shoulder elbow gripper shoulder'},
        {'a': 'shoulder elbow gripper', 'b': 'tail'},
    ],
)
def test_groups_that_leave_a_name_out_are_refused(groups: dict[str, str]) -> None:
    with pytest.raises(ValueError, match='groups'):
        Modalities.of(tiny_spec(), KeysFile(groups=groups))


def npy_of(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def test_arrays_by_columns_are_read() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = msgpack.packb(as_npy(np.asfortranarray(array)))
    assert np.array_equal(unpack(packed), array)


HUGE = npy_of(np.zeros(3)).replace(b'(3,), ', b'(9**9,)')
BAD_FILES = {
    'a pickle': npy_of(np.array([{}], dtype=object), allow_pickle=True),
    'records': npy_of(np.zeros(2, dtype=[('a', 'f4')])),
    'no file': b'\x93NUMPY',
    'half a file': npy_of(np.zeros(8))[:-1],
    'a shape that is code': HUGE,
    'another version': npy_of(np.zeros(2)).replace(b'NUMPY\x01', b'NUMPY\x09'),
    'text': 'text',
}


@pytest.mark.parametrize('name', BAD_FILES)
def test_files_that_are_no_plain_arrays_are_refused(name: str) -> None:
    packed = msgpack.packb({'__ndarray_class__': True, 'as_npy': BAD_FILES[name]})
    with pytest.raises(MessageError):
        unpack(packed)
