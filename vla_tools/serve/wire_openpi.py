"""openpi's wire: MessagePack over a websocket, the server speaking first.

A fault of a request is a text frame, which openpi's client raises, and the session goes on. A close
with 1011 follows only where it cannot. Nothing that a stranger reads has a path or a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

from vla_runtime.inference.request import cache_words
from vla_runtime.remote.message_pack import MessageError, flatten, pack, unpack
from vla_runtime.remote.report_fields import fields_of
from vla_tools.serve.batcher import Batched
from vla_tools.serve.faults import told
from vla_tools.serve.robot_request import RobotRequest
from vla_tools.serve.security import RateLimit
from vla_tools.serve.served_policy import Answer, ServedPolicy
from vla_tools.serve.sessions import RobotSession
from vla_tools.serve.socket_connection import (
    WireLimits,
)

logger = logging.getLogger(__name__)

PATHS = ('/', '/v1/realtime/robot/openpi')


class Conversation:
    """One robot's requests in openpi's messages, without the socket that they come through.

    Attributes:
        session: the robot's session, from `open` on.

    Args:
        probe: asks the client for a sign of life; None: nobody can.
    """

    session: RobotSession

    def __init__(
        self,
        served: ServedPolicy,
        limits: WireLimits,
        decoders: Executor,
        probe: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._served, self._limits, self._decoders = served, limits, decoders
        self._rate = RateLimit(limits.requests_per_s)
        self._probe = probe
        self._previous_ms: float | None = None

    async def open(self, name: str | None = None) -> bytes:
        """Take a session, a new one or the one of this name; return what a client is told first.

        Raises:
            SessionError: there is none.
        """
        self.session = await self._served.open(name)
        self.session.probe = self._probe
        return pack({**self._served.metadata, 'session_id': self.session.name})

    def leave(self) -> None:
        """Note that the client has gone."""
        self._served.leave(self.session)

    async def answer(self, data: bytes | None) -> bytes | str:
        """Return the reply to a message: bytes, or text for a fault.

        Args:
            data: None for a text frame.

        Raises:
            EndedError: the session cannot go on.
        """
        start_s = time.monotonic()
        served = self._served
        try:
            if not self._rate.take():
                limit = self._limits.requests_per_s
                raise MessageError(f'more than {limit:g} requests a second on this connection')
            if data is None:
                raise MessageError('expected a binary frame, a MessagePack map; got a text frame')
            loop = asyncio.get_running_loop()
            request, submitted = await loop.run_in_executor(self._decoders, self._begin, data)
            if submitted is None:
                if request.session_id not in (None, self.session.name):
                    await self.move(request)
                if request.endpoint == 'reset':
                    await served.reset(self.session, request)
                    return pack({'status': 'reset', 'session_id': self.session.name})
                submitted = served.submit(self.session, request)
            answer = await served.answer(self.session, submitted)
        except Exception as error:
            return told(error, served, self.session)
        total_ms = (time.monotonic() - start_s) * 1e3
        served.statistics.count(answer.batched, total_ms)
        reply = reply_of(answer, request, total_ms, self._previous_ms)
        if request.wants_report:
            identity = self._served.metadata['bundle_sha256']
            reply['report'] = fields_of(answer.chunk, answer.report, identity)
        self._previous_ms = total_ms
        return pack(reply)

    async def move(self, request: RobotRequest) -> None:
        """Go on with the session that a request names."""
        await self._served.sessions.free(request.session_id)
        self.session = self._served.move(self.session, request)
        self.session.probe = self._probe

    def _begin(self, data: bytes) -> tuple[RobotRequest, Future[Batched] | None]:
        """Read a request, in a decoder's thread, and queue one that goes on with this session."""
        request = self._served.reader.read(flatten(unpack(data)))
        is_own = request.session_id in (None, self.session.name) and self.session.requests
        if request.endpoint == 'infer' and is_own:
            return request, self._served.submit(self.session, request)
        return request, None


def reply_of(
    answer: Answer, request: RobotRequest, total_ms: float, previous_ms: float | None
) -> dict[str, Any]:
    """Return an answer as openpi's clients read it.

    `actions` is the only array, and there are no lists: openpi's `ActionChunkBroker` takes a row of
    each. `(H, actions)` float64 in the robot's units.
    """
    report = answer.report
    timing = {'infer_ms': total_ms, 'queue_ms': answer.batched.wait_ms}
    if previous_ms is not None:
        timing['prev_total_ms'] = previous_ms
    words = cache_words(report.cache)
    facts: dict[str, Any] = {
        'number': report.number,
        'seed': report.seed,
        'together': report.together,
        'denoise_steps': report.denoise_steps,
        'rtc_mode': report.rtc_mode,
        'cache_vision': words['vision'],
        'cache_prefix': words['prefix'],
    }
    if request.age_s is not None:
        facts['observation_age_ms'] = request.age_s * 1e3 + total_ms
    return {
        'actions': answer.chunk.actions,
        'policy_timing': {'infer_ms': report.milliseconds['total']},
        'server_timing': timing,
        'vla_runtime': facts,
    }
