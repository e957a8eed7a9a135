"""The wire of Ai2's evaluation harness: MessagePack over a websocket, the client speaking first.

A message is `{type, payload, seq, timestamp}`, its type one of `hello`, `episode_start`,
`observation` and `episode_end`. Each observation gets one row of actions: a chunk's rows are
handed out one by one, and a new chunk is computed after `replan_interval` of them. A fault is a
message of type `error`, and the session goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np

from vla_runtime import __version__
from vla_runtime.files.quotes import quoted
from vla_runtime.remote.message_pack import MessageError, array_from, flatten, pack, unpack
from vla_tools.serve.faults import told
from vla_tools.serve.robot_request import RobotRequest
from vla_tools.serve.security import RateLimit
from vla_tools.serve.served_policy import ServedPolicy
from vla_tools.serve.sessions import RobotSession
from vla_tools.serve.socket_connection import (
    WireLimits,
)

logger = logging.getLogger(__name__)

PATH = '/vla-eval'
_PROTOCOL = 1
# What benchmarks call the state and the task. `controller_states` is a second form of the first.
_KEYS = {'states': 'state', 'task_description': 'prompt'}
_IGNORED = frozenset({'controller_states'})
# Fields of a request that this wire has other means for.
_OF_SESSIONS = frozenset({'endpoint', 'session_id'})
_IMAGE = '__image__'


def read_replan_interval(text: str | None, horizon: int) -> int:
    """Return rows executed of a chunk, by an address' `?replan_interval=`; default: all.

    Raises:
        ValueError: no whole number from 1 to the horizon.
    """
    if text is None:
        return horizon
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= horizon:
        raise ValueError(
            f'replan_interval: {quoted(text)}; expected a whole number from 1 to {horizon}'
        )
    return int(text)


class EvalConversation:
    """One benchmark's messages.

    Attributes:
        session: from `open` on.

    Args:
        replan_interval: rows executed of a chunk.
        probe: as of `Conversation`.
    """

    session: RobotSession

    def __init__(
        self,
        served: ServedPolicy,
        limits: WireLimits,
        decoders: Executor,
        replan_interval: int,
        probe: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._served, self._limits, self._decoders = served, limits, decoders
        self._rate = RateLimit(limits.requests_per_s)
        self._replan_interval, self._probe = replan_interval, probe
        self._rows: deque[np.ndarray] = deque()

    async def open(self) -> None:
        """Take a session (SessionError: there is none)."""
        self.session = await self._served.open()
        self.session.probe = self._probe

    def leave(self) -> None:
        """Note that the client has gone."""
        self._served.leave(self.session)

    async def answer(self, data: bytes | None) -> bytes | None:
        """Return the reply to a message; None where it has none.

        Raises:
            EndedError: the session cannot go on.
        """
        number = 0
        try:
            if data is None:
                raise MessageError('expected a binary frame, a MessagePack map; got a text frame')
            loop = asyncio.get_running_loop()
            message = await loop.run_in_executor(self._decoders, _message, data)
            number = message['seq']
            kind, request = await loop.run_in_executor(self._decoders, self._read, message)
            payload = await self._reply(kind, request)
            if payload is None:
                return None
            kind = 'hello' if kind == 'hello' else 'action'
        except Exception as error:
            kind, payload = 'error', {'error': told(error, self._served, self.session)}
        return pack({'type': kind, 'payload': payload, 'seq': number, 'timestamp': time.time()})

    async def _reply(self, kind: str, request: RobotRequest | None) -> dict[str, Any] | None:
        served = self._served
        if kind == 'hello':
            return self._contract()
        if kind == 'episode_start':
            self._rows.clear()
            await served.reset(self.session, RobotRequest('reset'))
        if request is None:
            return None
        if not self._rate.take():
            limit = self._limits.requests_per_s
            raise MessageError(f'more than {limit:g} requests a second on this connection')
        if not self._rows:
            start_s = time.monotonic()
            answer = await served.answer(self.session, served.submit(self.session, request))
            served.statistics.count(answer.batched, (time.monotonic() - start_s) * 1e3)
            self._rows.extend(answer.chunk.actions[: self._replan_interval])
        return {'actions': self._rows.popleft().astype(np.float32)}

    def _contract(self) -> dict[str, Any]:
        spec = self._served.spec
        cameras = sum(camera.present for camera in spec.cameras)
        return {
            'harness_version': f'vla_runtime {__version__}',
            'protocol_version': _PROTOCOL,
            'model_server': self._served.name,
            'capabilities': {},
            # A benchmark takes those that it knows.
            'observation_params': {
                'send_wrist_image': cameras > 1,
                'send_state': bool(spec.state_names),
            },
        }

    def _read(self, message: Mapping[str, Any]) -> tuple[str, RobotRequest | None]:
        """Return the type of a message, and the request of an observation."""
        kind, payload = message.get('type'), message.get('payload')
        if not isinstance(payload, Mapping):
            raise MessageError('payload: expected a map')
        if isinstance(kind, str) and kind in ('hello', 'episode_start', 'episode_end'):
            return kind, None
        if not isinstance(kind, str) or kind != 'observation':
            raise MessageError(f'type: {quoted(kind)} is no message of a benchmark')
        fields = {}
        for key, value in flatten(_with_images(payload)).items():
            if key in _OF_SESSIONS:
                raise MessageError(
                    f'{key}: no field of an observation on this wire, where a connection is a '
                    'session and episode_start begins an episode'
                )
            if key not in _IGNORED:
                fields[_KEYS.get(key, key)] = value
        return kind, self._served.reader.read(fields)


def _message(data: bytes) -> dict[str, Any]:
    """Return a message with its number, `seq`."""
    message = unpack(data)
    if not isinstance(message, dict):
        raise MessageError('expected a map of type, payload, seq and timestamp')
    number = message.setdefault('seq', 0)
    if not isinstance(number, int) or isinstance(number, bool):
        raise MessageError('seq: expected a whole number')
    return message


def _with_images(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return an observation whose images are arrays, or the bytes of a JPEG or PNG."""
    found = dict(payload)
    images = found.get('images')
    if isinstance(images, Mapping):
        found['images'] = {name: _image(name, image) for name, image in images.items()}
    return found


def _image(name: Any, image: Any) -> Any:
    if not isinstance(image, Mapping) or image.get(_IMAGE) is not True:
        return image
    data = image.get('data')
    if not isinstance(data, bytes):
        raise MessageError(f'images/{quoted(name)}: an image without bytes')
    if image.get('format') != 'raw':
        return data
    return array_from(data, image.get('dtype'), image.get('shape'))
