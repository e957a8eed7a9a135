"""uvicorn with an end that answers running requests, and with an end to clients that hang.

Invariants:
- SIGTERM and Ctrl-C drain: no new session, running requests get their answers, each connection is
  closed with the reason; a second signal ends the process without waiting;
- the event loop never computes, so pings are answered however long a policy takes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from vla_runtime.files.quotes import one_line
from vla_tools.serve.app import PolicyServer
from vla_tools.serve.socket_connection import PROBE

logger = logging.getLogger(__name__)

_LONGEST_REASON = 200
# A request's head is there at once, or the client means no request.
_HEAD_TIMEOUT_S = 10.0
# A client that is there answers a ping within a round trip.
_PROBE_TIMEOUT_S = 2.0
# As asyncio has it, a client may take a minute.
_TLS_TIMEOUT_S = 5.0
# Connections that have no session yet, beside those that have one.
_MOST_CONNECTIONS = 512


@dataclass(frozen=True)
class HttpOptions:
    """How the server listens.

    Attributes:
        max_message_bytes: of a frame, or of a message in several.
        ping_s: time between two pings, and time for the answer of each.
        drain_s: time that running requests get after a signal.
    """

    max_message_bytes: int = 64 << 20
    ping_s: float = 20.0
    drain_s: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None


class _TimedHttp(H11Protocol):
    """Drops a connection whose request does not come."""

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
            return
        self.head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._check_head)

    def _check_head(self) -> None:
        is_asking = self.cycle is not None and not self.cycle.response_complete
        if self.transport.get_protocol() is self and not is_asking:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.head_timer is not None:
            self.head_timer.cancel()
        self.head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._check_head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
        super().connection_lost(exc)


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    """Drops a client that is dead, and what one does not take once the application has ended."""

    answered: asyncio.Event | None = None
    asked = b''
    probing: asyncio.Task[bool] | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            extensions: dict[str, Any] = self.scope['extensions']
            extensions[PROBE] = self.is_alive

    def handle_pong(self, event: Frame) -> None:
        if self.answered is not None and bytes(event.data) == self.asked:
            self.answered.set()
        super().handle_pong(event)

    async def is_alive(self) -> bool:
        """Ask for a sign of life, once for all who want to know at a time.

        The connection is dropped where none comes in time.
        """
        if self.probing is None:
            self.probing = self.loop.create_task(self._probe())
        # One who asks no longer ends nobody else's question.
        return await asyncio.shield(self.probing)

    async def _probe(self) -> bool:
        self.answered, self.asked = asyncio.Event(), secrets.token_bytes(8)
        try:
            if not (self.close_sent or self.transport.is_closing()):
                self.conn.send_ping(self.asked)
                self.transport.write(b''.join(self.conn.data_to_send()))
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.answered.wait(), _PROBE_TIMEOUT_S)
                    return True
            self.transport.abort()
            return False
        finally:
            self.probing = None

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.close_sent and self.initial_response is not None and not self.handshake_complete:
            # uvicorn takes a refusal for a handshake that was forgotten, and says so.
            self.handshake_complete = True
            status, _, body = self.initial_response
            peer = ':'.join(map(str, self.client or ('somebody',)))
            why = one_line(body.decode(errors='replace'), _LONGEST_REASON).strip()
            logger.warning('%s was refused (HTTP %d): %s', peer, status, why)

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.abort)


class UvicornServer(uvicorn.Server):
    """Runs a `PolicyServer` on a socket until a signal.

    Args:
        listener: bound already, so that its port is known.
    """

    def __init__(self, server: PolicyServer, listener: socket.socket, options: HttpOptions) -> None:
        super().__init__(
            uvicorn.Config(
                server.app,
                http=_TimedHttp,
                ws=_BoundedWebSocket,
                ws_max_size=options.max_message_bytes,
                ws_ping_interval=options.ping_s,
                ws_ping_timeout=options.ping_s,
                ws_per_message_deflate=False,
                log_level='warning',
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=5,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=None if options.tls_key is None else str(options.tls_key),
            )
        )
        self._server, self._listener, self._options = server, listener, options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._was_asked = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            # uvicorn hands no such option through.
            self._loop.create_server = partial(  # type: ignore[method-assign]
                self._loop.create_server, ssl_handshake_timeout=_TLS_TIMEOUT_S
            )
        await super().startup(sockets)

    def run_until_signal(self) -> None:
        """Serve; returns after the drain."""
        self.run(sockets=[self._listener])

    def stop(self) -> None:
        """Begin the drain, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain at a first signal; end at a second."""
        if self._was_asked or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._was_asked = True
        self.stop()

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._server.drain(self._options.drain_s)
        self.should_exit = True
