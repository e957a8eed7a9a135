"""NVIDIA's wire for policies: MessagePack over ZeroMQ's request and reply.

A request is `{endpoint, data, api_token}`, its endpoint one of `ping`, `get_modality_config`,
`get_action` and `reset`; `kill` is refused. A fault is `{error: text}`. Arrays have a batch of one
and one step of time in front. Each client is a session, by the identity that its socket has; one
that asks nothing for a minute is left, since ZeroMQ does not tell who has gone.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from vla_runtime.files.quotes import quoted
from vla_runtime.remote.message_pack import MessageError, flatten, unpack
from vla_tools.serve.modalities import Modalities
from vla_tools.serve.request_keys import IMAGE, STATE, KeysFile
from vla_tools.serve.robot_request import RobotRequest
from vla_tools.serve.security import RateLimit, is_key
from vla_tools.serve.served_policy import ServedPolicy, ServerFaultError
from vla_tools.serve.sessions import RobotSession, SessionError

logger = logging.getLogger(__name__)

_IDLE_S = 60.0
# Requests that are held at once; more stay with who sent them.
_MOST_OPEN = 64
_MOST_WAITING = 2
_VIDEO, _STATE, _LANGUAGE = 'observation/video/', 'observation/state/', 'observation/language/'


@dataclass
class _Client:
    """One client's session; `busy` while a request of it is answered."""

    session: RobotSession
    rate: RateLimit
    busy: bool = False
    asked_s: float = field(default_factory=time.monotonic)


class ZmqWire:
    """Answers clients of one policy.

    Args:
        address: such as `tcp://127.0.0.1:5555`; port 0 is any that is free (`port`).
        keys: one of them is each request's `api_token`; empty: none is asked for.

    Raises:
        ValueError: the address cannot be had, or the groups of the file do not fit.
    """

    def __init__(
        self,
        served: ServedPolicy,
        address: str,
        *,
        keys: tuple[str, ...] = (),
        file: KeysFile | None = None,
        max_message_bytes: int = 64 << 20,
        requests_per_s: float = 200.0,
    ) -> None:
        self._served, self._keys, self._per_s = served, keys, requests_per_s
        self._modalities = Modalities.of(served.spec, file)
        self._clients: dict[bytes, _Client] = {}
        # Requests that are read, waited for or answered, and the bytes that they came in.
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._most_bytes = 2 * max_message_bytes
        self._context = zmq.Context()
        self._bound = self._context.socket(zmq.ROUTER)
        self._bound.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._bound.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        # Answers that a client does not take are dropped.
        self._bound.setsockopt(zmq.SNDHWM, 4)
        self._bound.setsockopt(zmq.LINGER, 1000)
        self._bound.setsockopt(zmq.IPV6, 1)
        try:
            self._bound.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f'{address}: cannot listen: {error.strerror}') from None
        self.port = int(self._bound.get_string(zmq.LAST_ENDPOINT).rpartition(':')[2])

    async def run(self, decoders: Executor, is_draining: Callable[[], bool]) -> None:
        """Answer until the server drains; then requests that run get their answers."""
        socket = zmq.asyncio.Socket.shadow(self._bound)
        try:
            while not is_draining():
                self._leave_idle()
                if self._is_full:
                    await asyncio.wait(
                        self._tasks, timeout=0.2, return_when=asyncio.FIRST_COMPLETED
                    )
                    continue
                if not await socket.poll(200):
                    continue
                frames = await socket.recv_multipart()
                # An identity, nothing, and the message: what a REQ socket sends.
                if len(frames) == 3 and not frames[1]:
                    answered = self._answer(socket, decoders, frames[0], frames[2])
                    task = asyncio.get_running_loop().create_task(answered)
                    self._tasks[task] = len(frames[2])
                    task.add_done_callback(self._tasks.pop)
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            for client in self._clients.values():
                self._served.leave(client.session)
            self._clients.clear()
            socket.close(linger=1000)

    def close(self) -> None:
        """Free the address."""
        self._bound.close(linger=1000)
        self._context.term()

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) >= _MOST_OPEN or sum(self._tasks.values()) >= self._most_bytes

    def _leave_idle(self) -> None:
        now_s = time.monotonic()
        for identity, client in list(self._clients.items()):
            if not client.busy and now_s - client.asked_s > _IDLE_S:
                del self._clients[identity]
                self._served.leave(client.session)

    async def _answer(
        self, socket: zmq.asyncio.Socket, decoders: Executor, identity: bytes, data: bytes
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
            endpoint, request = await loop.run_in_executor(decoders, self._read, data)
            reply = await self._reply(identity, endpoint, request)
        except (ValueError, ServerFaultError) as error:
            known = self._clients.get(identity)
            self._served.count_fault(None if known is None else known.session)
            reply = {'error': str(error)}
        except Exception:
            logger.exception('%s: a request failed', self._served.name)
            reply = {'error': 'the server failed; the reason is in its log'}
        as_npy = b'as_npy' in data
        packed = msgpack.packb(reply, default=_as_npy if as_npy else _as_msgpack_numpy)
        await socket.send_multipart([identity, b'', packed])

    async def _reply(self, identity: bytes, endpoint: str, request: RobotRequest | None) -> Any:
        if endpoint == 'ping':
            return {'status': 'ok', 'message': 'Server is running'}
        if endpoint == 'get_modality_config':
            return self._modalities.config()
        client = await self._client(identity)
        if client.busy:
            raise MessageError('a request of this client is being answered: one at a time')
        if not client.rate.take():
            raise MessageError(f'more than {self._per_s:g} requests a second of this client')
        client.busy, client.asked_s = True, time.monotonic()
        try:
            if request is None:
                await self._served.reset(client.session, RobotRequest('reset'))
                return {}
            start_s = time.monotonic()
            answer = await self._served.answer(
                client.session, self._served.submit(client.session, request)
            )
        finally:
            client.busy = False
        self._served.statistics.count(answer.batched, (time.monotonic() - start_s) * 1e3)
        actions = answer.chunk.actions.astype(np.float32)[None]
        chunk = {
            name: np.ascontiguousarray(actions[:, :, list(columns)])
            for name, columns in self._modalities.actions.items()
        }
        return [chunk, {'number': answer.report.number, 'together': answer.report.together}]

    async def _client(self, identity: bytes) -> _Client:
        if identity not in self._clients:
            name = f'zmq {identity.hex()}'
            try:
                session = await self._served.open(name)
            except SessionError as error:
                raise MessageError(str(error)) from None
            self._clients[identity] = _Client(session, RateLimit(self._per_s))
        return self._clients[identity]

    def _read(self, data: bytes) -> tuple[str, RobotRequest | None]:
        """Return the endpoint, and the request of `get_action`."""
        message = unpack(data)
        if not isinstance(message, Mapping):
            raise MessageError('expected a map of endpoint, data and api_token')
        if self._keys and not is_key(self._keys, message.get('api_token')):
            raise MessageError('api_token: is none of the keys of this server')
        endpoint = message.get('endpoint', 'get_action')
        if not isinstance(endpoint, str):
            raise MessageError('endpoint: expected a text')
        if endpoint == 'get_action':
            return endpoint, self._request(message.get('data'))
        if endpoint in ('ping', 'get_modality_config', 'reset'):
            return endpoint, None
        raise MessageError(f'endpoint: {quoted(endpoint)} is not served')

    def _request(self, data: Any) -> RobotRequest:
        fields: dict[str, Any] = {}
        state, given = np.full(len(self._served.spec.state), np.nan), set[str]()
        for key, value in flatten(data).items():
            if key.startswith(_VIDEO):
                name = key.removeprefix(_VIDEO)
                camera = self._modalities.videos.get(name)
                if camera is None:
                    raise MessageError(f'video.{name[:60]}: this policy has no such camera')
                fields[f'{IMAGE}/{camera}'] = _only(f'video.{name}', value, 5)
            elif key.startswith(_STATE):
                name = key.removeprefix(_STATE)
                columns = self._modalities.state.get(name)
                if columns is None:
                    raise MessageError(f'state.{name[:60]}: no part of the state of this policy')
                numbers = _only(f'state.{name}', value, 3)
                if numbers.shape != (len(columns),) or numbers.dtype.kind not in 'fiu':
                    raise MessageError(f'state.{name}: expected {len(columns)} numbers')
                state[list(columns)] = numbers
                given.add(name)
            elif key.startswith(_LANGUAGE):
                name = key.removeprefix(_LANGUAGE)
                if 'prompt' in fields:
                    raise MessageError(f'language.{name[:60]}: a second text; send one')
                fields['prompt'] = _words(name, value)
            elif key != 'options' or value is not None:
                raise MessageError(f'{quoted(key)}: no field of a request, which has no options')
        if missing := [name for name in self._modalities.state if name not in given]:
            raise MessageError(f'state.{missing[0]}: is missing')
        return self._served.reader.read({**fields, STATE: state})


def _only(name: str, value: Any, axes: int) -> np.ndarray:
    """Return what a batch of one has at its only step."""
    if not isinstance(value, np.ndarray) or value.ndim != axes or value.shape[:2] != (1, 1):
        raise MessageError(f'{name}: expected an array of {axes} axes, the first two of size 1')
    return value[0, 0]


def _words(name: str, value: Any) -> str:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise MessageError(f'language.{name[:60]}: expected one text, in lists of one')
    return value


def _as_npy(array: np.ndarray) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {'__ndarray_class__': True, 'as_npy': file.getvalue()}


def _as_msgpack_numpy(array: np.ndarray) -> dict[bytes, Any]:
    return {
        b'nd': True,
        b'type': array.dtype.str,
        b'kind': b'',
        b'shape': array.shape,
        b'data': array.tobytes(),
    }
