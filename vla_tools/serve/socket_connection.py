"""A websocket of one client: its messages in order, its limits, and its end.

Nothing here knows what is in a message; a `Talk` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect

# RFC 6455, 7.4.1, and the registry beside it.
GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1001, 1008, 1011
# Extension of a websocket's scope: a coroutine function that is False for a dead connection, which
# it drops.
PROBE = 'vla_runtime.probe'
SHUTTING_DOWN = 'the server is shutting down'
# What has arrived by a signal is handed over well within it.
_LAST_S = 0.02


@dataclass(frozen=True)
class WireLimits:
    """Limits of a connection.

    Attributes:
        requests_per_s: on average; more are refused, one by one.
        send_timeout_s: time in which a client takes an answer.
    """

    requests_per_s: float = 200.0
    send_timeout_s: float = 10.0


class Talk(Protocol):
    """What a connection needs of a conversation, here or on another machine."""

    async def open(self) -> bytes | None:
        """Take a session; return what the client is told first, None for nothing."""

    async def answer(self, data: bytes | None) -> bytes | str | None:
        """Return the reply to a message, None where it has none; `data` is None for text."""

    def leave(self) -> None:
        """Note that the client has gone."""


class SocketConnection:
    """One client's connection, from its first frame to its close."""

    def __init__(self, socket: WebSocket, talk: Talk, limits: WireLimits) -> None:
        self._socket, self._talk, self._limits = socket, talk, limits
        self._drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._had_last = False

    async def run(self) -> None:
        """Answer requests until one side closes (SessionError: there is no session)."""
        contract = await self._talk.open()
        try:
            await self._socket.accept()
            await self._send(contract)
            while (message := await self._next()) is not None:
                if message['type'] == 'websocket.disconnect':
                    return
                await self._send(await self._talk.answer(message.get('bytes')))
            await self._socket.close(GOING_AWAY, SHUTTING_DOWN)
        except EndedError as end:
            await self._end(end)
        except (WebSocketDisconnect, asyncio.CancelledError):
            # Gone, or it takes no answers: the socket is dropped.
            return
        finally:
            self._talk.leave()

    def drain(self) -> None:
        """Have `run` answer what has arrived, and close with the reason."""
        if not self._drained.done():
            self._drained.set_result(None)

    async def _next(self) -> Mapping[str, Any] | None:
        """Return the next message; None where the server ends, and the last one was answered."""
        if self._had_last:
            return None
        receiving = asyncio.ensure_future(self._socket.receive())
        either: set[asyncio.Future[Any]] = {receiving, self._drained}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._drained.done():
                self._had_last = True
                await asyncio.wait({receiving}, timeout=_LAST_S)
            return receiving.result() if receiving.done() else None
        finally:
            receiving.cancel()

    async def _send(self, reply: bytes | str | None) -> None:
        """Send a frame, if any; end this connection's task where it is not taken in time."""
        if reply is None:
            return
        task = asyncio.current_task()
        assert task is not None
        # Cheaper than a task of its own for each frame, as `wait_for` makes one.
        timer = asyncio.get_running_loop().call_later(self._limits.send_timeout_s, task.cancel)
        try:
            if isinstance(reply, str):
                await self._socket.send_text(reply)
            else:
                await self._socket.send_bytes(reply)
        finally:
            timer.cancel()

    async def _end(self, end: EndedError) -> None:
        try:
            await self._send(str(end))
            # A reason has at most 123 bytes.
            await self._socket.close(end.code, str(end).encode()[:120].decode(errors='ignore'))
        except (WebSocketDisconnect, asyncio.CancelledError):
            pass


class EndedError(Exception):
    """A fault after which the session cannot go on; `code` is that of the close."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


async def drain_connections(connections: set[SocketConnection], timeout_s: float) -> None:
    """Answer what is asked and close each connection with the reason; wait until all have gone."""
    end_s = time.monotonic() + timeout_s
    for one in connections:
        one.drain()
    # One that takes nothing is left to the end of the process.
    while connections and time.monotonic() < end_s:
        await asyncio.sleep(0.02)
