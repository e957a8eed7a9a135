"""The server's application: the wires over websockets and the pages about the server's state.

It knows nothing of the process that runs it: uvicorn here, and whatever takes an ASGI application.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from vla_tools.serve import wire_vla_eval as vla_eval
from vla_tools.serve.bundle_request import (
    BUNDLES_PATH,
    BUSY,
    FORBIDDEN,
    UNUSABLE,
    asked_bundle,
)
from vla_tools.serve.security import KeyCheck
from vla_tools.serve.served_policy import ServedPolicy
from vla_tools.serve.sessions import SessionError
from vla_tools.serve.socket_connection import (
    PROBE,
    SHUTTING_DOWN,
    SocketConnection,
    Talk,
    WireLimits,
    drain_connections,
)
from vla_tools.serve.statistics import Metrics
from vla_tools.serve.status import METRICS_TYPE, metrics_text, status_of, status_page
from vla_tools.serve.wire_openpi import PATHS, Conversation
from vla_tools.serve.wire_zmq import ZmqWire

logger = logging.getLogger(__name__)

_TICK_S = 1.0


class PolicyServer:
    """Policies by name behind one application; the first is that of the usual paths.

    Attributes:
        app: the ASGI application. Its end closes the policies.

    Args:
        load: returns the policy of a bundle by its name, for `POST /bundles`; raises ValueError,
            RuntimeError or OSError where it cannot be served. None: the policies stay.
    """

    def __init__(
        self,
        policies: Mapping[str, ServedPolicy],
        metrics: Metrics,
        *,
        keys: tuple[str, ...] = (),
        limits: WireLimits | None = None,
        zmq: ZmqWire | None = None,
        load: Callable[[str], ServedPolicy] | None = None,
    ) -> None:
        self._policies, self._metrics = dict(policies), metrics
        self._keys, self._load = keys, load
        # Policies that another one has replaced, until their robots have gone.
        self._replaced: list[ServedPolicy] = []
        # Names that were served before, and whose robots get the bundle that came after.
        self._followed_by: dict[str, str] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix='load')
        self._loading: Future[ServedPolicy] | None = None
        self._limits, self._zmq = limits or WireLimits(), zmq
        self._first = next(iter(self._policies))
        self._connections: set[SocketConnection] = set()
        self._draining = False
        self._started_s = time.monotonic()
        self._decoders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix='decode')
        self.app = Starlette(
            routes=[
                *(WebSocketRoute(path, self._openpi) for path in PATHS),
                WebSocketRoute('/policies/{name}', self._openpi),
                WebSocketRoute(vla_eval.PATH, self._vla_eval),
                WebSocketRoute('/policies/{name}' + vla_eval.PATH, self._vla_eval),
                WebSocketRoute('/{path:path}', self._no_such_path),
                Route('/', self._status),
                Route('/healthz', self._health),
                Route('/ready', self._ready),
                Route('/status', self._status),
                Route('/metrics', self._prometheus),
                Route(BUNDLES_PATH, self._replace, methods=['POST']),
            ],
            middleware=[Middleware(KeyCheck, keys=keys)],
            lifespan=self._lifespan,
        )

    @property
    def _all(self) -> list[ServedPolicy]:
        return [*self._policies.values(), *self._replaced]

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def drain(self, timeout_s: float) -> None:
        """Take no new session, answer what is asked, and close each connection with the reason."""
        self._draining = True
        await drain_connections(self._connections, timeout_s)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        cleaner = asyncio.create_task(self._end_kept())
        answering = None
        if self._zmq is not None:
            answering = asyncio.create_task(self._zmq.run(self._decoders, lambda: self._draining))
        try:
            yield
        finally:
            cleaner.cancel()
            self._draining = True
            if answering is not None:
                await answering
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the policies' threads, after what they run; a second time it does nothing."""
        if self._zmq is not None:
            self._zmq.close()
        for served in self._all:
            served.close()
        # One whose request was given up at the end is nobody else's.
        self._loader.shutdown()
        loaded = self._loading
        if loaded is not None and not loaded.cancelled() and loaded.exception() is None:
            loaded.result().close()
        self._decoders.shutdown()

    async def _end_kept(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for served in self._all:
                served.sessions.end_kept()
            for served in list(self._replaced):
                if not served.sessions.connected:
                    self._replaced.remove(served)
                    await asyncio.to_thread(served.close)

    async def _openpi(self, socket: WebSocket) -> None:
        served = await self._served(socket)
        if served is not None:
            await self._run(
                socket, Conversation(served, self._limits, self._decoders, _probe_of(socket))
            )

    async def _vla_eval(self, socket: WebSocket) -> None:
        served = await self._served(socket)
        if served is None:
            return
        try:
            interval = vla_eval.read_replan_interval(
                socket.query_params.get('replan_interval'), served.spec.real_horizon
            )
        except ValueError as error:
            await socket.send_denial_response(PlainTextResponse(f'{error}\n', 400))
            return
        talk = vla_eval.EvalConversation(
            served, self._limits, self._decoders, interval, _probe_of(socket)
        )
        await self._run(socket, talk)

    async def _no_such_path(self, socket: WebSocket) -> None:
        paths = ', '.join((*PATHS, '/policies/NAME', vla_eval.PATH))
        await socket.send_denial_response(
            PlainTextResponse(f'no policy at this path; there are: {paths}\n', 404)
        )

    async def _served(self, socket: WebSocket) -> ServedPolicy | None:
        """Return the policy that a client asks for; None once it was told why there is none."""
        name = socket.path_params.get('name', self._first)
        while name not in self._policies and name in self._followed_by:
            name = self._followed_by[name]
        served = self._policies.get(name)
        if served is None:
            known = ', '.join(self._policies)
            await socket.send_denial_response(
                PlainTextResponse(f'no policy of that name; there are: {known}\n', 404)
            )
            return None
        if self._draining or not served.is_ready:
            why = SHUTTING_DOWN if self._draining else 'this policy has ended'
            await socket.send_denial_response(PlainTextResponse(f'{why}\n', 503))
            return None
        return served

    async def _run(self, socket: WebSocket, talk: Talk) -> None:
        connection = SocketConnection(socket, talk, self._limits)
        self._connections.add(connection)
        try:
            await connection.run()
        except SessionError as error:
            await socket.send_denial_response(PlainTextResponse(f'{error}\n', 503))
        finally:
            self._connections.discard(connection)

    async def _replace(self, request: Request) -> Response:
        """Put another bundle in the place of the first one, whose robots keep it to their end."""
        name = await asked_bundle(request, self._keys)
        if self._load is None or self._zmq is not None:
            raise HTTPException(FORBIDDEN, 'the bundles of this server stay as they are\n')
        if name in self._policies:
            raise HTTPException(BUSY, 'a bundle of this name is served; name the folder anew\n')
        if self._draining or not (self._loading is None or self._loading.done()):
            raise HTTPException(BUSY, 'another bundle is being loaded, or the server ends\n')
        self._loading = self._loader.submit(self._load, name)
        try:
            served = await asyncio.wrap_future(self._loading)
        except (ValueError, RuntimeError, OSError):
            logger.exception('%s cannot be served', name)
            raise HTTPException(
                UNUSABLE, "it cannot be served; the server's log says why\n"
            ) from None
        if self._draining:
            raise HTTPException(BUSY, f'{SHUTTING_DOWN}\n')
        self._replaced.append(self._policies.pop(self._first))
        self._policies[name] = served
        self._followed_by[self._first] = name
        self._followed_by.pop(name, None)
        self._first = name
        for one in self._policies.values():
            one.metadata['policies'] = list(self._policies)
        return JSONResponse({'bundle': name, 'bundle_sha256': served.metadata['bundle_sha256']})

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse('OK')

    async def _ready(self, _: Request) -> Response:
        ready = not self._draining and all(one.is_ready for one in self._policies.values())
        return PlainTextResponse('ready' if ready else 'not ready', 200 if ready else 503)

    async def _status(self, request: Request) -> Response:
        status = status_of(self._all, self._started_s, self._draining)
        if 'text/html' in request.headers.get('accept', ''):
            return HTMLResponse(await asyncio.to_thread(status_page, status))
        return JSONResponse(status)

    async def _prometheus(self, _: Request) -> Response:
        return Response(metrics_text(self._metrics, self._all), media_type=METRICS_TYPE)


def _probe_of(socket: WebSocket) -> Callable[[], Awaitable[bool]] | None:
    """Return what asks a client for a sign of life, where this server can."""
    probe: Callable[[], Awaitable[bool]] | None = socket.scope.get('extensions', {}).get(PROBE)
    return probe
