"""The one door of a fleet: openpi's wire and the pages, in front of the replicas.

Invariants:
- a connection is a session, and a session's requests go to the replica that has its cache;
- which bundle is served stands with Ray alone: the application `policy-N` with the largest N that
  runs. An ingress that is started again finds it there;
- a session keeps its bundle to its end; new sessions get the newest;
- a fault of a replica is told to its robots, once each; no request runs twice.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from vla_tools.serve.bundle_request import (
    BUNDLES_PATH,
    BUSY,
    UNKNOWN,
    UNUSABLE,
    asked_bundle,
)
from vla_tools.serve.fleet_config import POLICY_APP
from vla_tools.serve.fleet_placement import replica_for_name, replica_for_new, running
from vla_tools.serve.fleet_policies import has_room, policies
from vla_tools.serve.fleet_replica import Opened, Reply
from vla_tools.serve.security import KeyCheck, read_accepted_keys
from vla_tools.serve.sessions import SessionError
from vla_tools.serve.socket_connection import (
    GOING_AWAY,
    POLICY_VIOLATION,
    SHUTTING_DOWN,
    EndedError,
    SocketConnection,
    WireLimits,
    drain_connections,
)
from vla_tools.serve.status import METRICS_TYPE, status_page
from vla_tools.serve.wire_openpi import PATHS

logger = logging.getLogger(__name__)
T = TypeVar('T')

_TICK_S = 0.5
# A replica that cannot say how it is by then is left out of the page.
_STATE_TIMEOUT_S = 5.0
# Replicas that a request tries, where each is lost in turn before it has the session.
_TRIES = 3
_LOST = (
    'the replica of this session was lost with this request; the session goes on at another one '
    'with an empty cache: ask again'
)


def number_of(application: str) -> int:
    """Return N of `policy-N`; -1 for any other application."""
    digits = application.removeprefix(POLICY_APP)
    return int(digits) if digits != application and digits.isdigit() else -1


class FleetIngress:
    """The application in front of a fleet's replicas.

    Attributes:
        app: the ASGI application.

    Args:
        arguments: those of `fleet.ingress`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.name = secrets.token_hex(8)
        key_file = arguments.get('key_file')
        self.keys = () if key_file is None else read_accepted_keys(Path(key_file))
        self._limits = WireLimits(send_timeout_s=float(arguments.get('send_timeout', 10.0)))
        self._keep_s = float(arguments.get('keep_s', 60.0))
        self._started_s = time.monotonic()
        self._connections: set[SocketConnection] = set()
        self._draining = False
        self._handles: dict[str, Any] = {}
        # Steady time at which an older application was last seen with a session.
        self._used_s: dict[str, float] = {}
        self.current = ''
        # By session: the conversation that has it.
        self.talks: dict[str, FleetTalk] = {}
        self.opening = asyncio.Lock()
        self._rolling = False
        self.app = Starlette(
            routes=[
                *(WebSocketRoute(path, self._openpi) for path in PATHS),
                Route('/', self._status),
                Route('/healthz', self._health),
                Route('/ready', self._ready),
                Route('/status', self._status),
                Route('/metrics', self._prometheus),
                Route(BUNDLES_PATH, self._roll_out, methods=['POST']),
            ],
            middleware=[Middleware(KeyCheck, keys=self.keys)],
            lifespan=self._lifespan,
        )

    def sessions_of(self) -> Counter[str]:
        """Return the number of sessions by replica."""
        return Counter(talk.replica for talk in self.talks.values())

    def handle(self, application: str) -> Any:
        """Return the handle of an application's replicas."""
        return self._handles[application]

    async def drain(self, timeout_s: float) -> None:
        """Take no new session, answer what is asked, and close each connection with the reason."""
        self._draining = True
        await drain_connections(self._connections, timeout_s)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._look()
        looking = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            looking.cancel()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._look()
                await self._end_unused()
            except (RayError, RayServeException, OSError, RuntimeError):
                # Ray's controller is being started again.
                logger.exception('the state of the fleet cannot be read')

    async def _look(self) -> None:
        """Find which bundles are served, and which is the newest."""
        applications = (await asyncio.to_thread(serve.status)).applications
        ready = [name for name, one in applications.items() if one.status == 'RUNNING']
        # Ray has no handle of one that starts or ends; one that lost a replica still serves.
        usable = [
            name
            for name, one in applications.items()
            if number_of(name) >= 0
            and (one.status in ('RUNNING', 'UNHEALTHY') or name in self._handles)
        ]
        found = sorted(usable, key=number_of)
        for name in found:
            if name not in self._handles:
                self._handles[name] = serve.get_app_handle(name)
                # Its router learns of the replicas with the first call.
                _begin(_ignored(self._handles[name].arguments))
        for name in set(self._handles) - set(found):
            del self._handles[name]
            running.pop(name, None)
        newest = [name for name in found if name in ready]
        # A replica that died makes an application unhealthy, not another one newer.
        if newest and number_of(newest[-1]) > number_of(self.current):
            logger.warning('new sessions get %s', newest[-1])
            self.current = newest[-1]
        if self.current not in self._handles:
            self.current = newest[-1] if newest else ''

    async def _end_unused(self) -> None:
        """End older applications that no robot has, once none can come back to one."""
        now_s = time.monotonic()
        used = {talk.application for talk in self.talks.values()}
        for name in list(self._handles):
            if name in used or number_of(name) >= number_of(self.current):
                self._used_s[name] = now_s
            elif now_s - self._used_s.setdefault(name, now_s) > self._keep_s:
                logger.warning('%s has no session any more, and ends', name)
                await asyncio.to_thread(serve.delete, name)
                self._handles.pop(name, None)
                running.pop(name, None)

    async def _openpi(self, socket: WebSocket) -> None:
        if self._draining or not self.current:
            why = SHUTTING_DOWN if self._draining else 'no policy is ready yet'
            await socket.send_denial_response(PlainTextResponse(f'{why}\n', 503))
            return
        connection = SocketConnection(socket, FleetTalk(self), self._limits)
        self._connections.add(connection)
        try:
            await connection.run()
        except SessionError as error:
            await socket.send_denial_response(PlainTextResponse(f'{error}\n', 503))
        finally:
            self._connections.discard(connection)

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse('OK')

    async def _ready(self, _: Request) -> Response:
        ready = not self._draining and bool(running.get(self.current))
        return PlainTextResponse('ready' if ready else 'not ready', 200 if ready else 503)

    async def _status(self, request: Request) -> Response:
        found = await self._states()
        ready = not self._draining and bool(running.get(self.current))
        status = {
            'ready': ready,
            'draining': self._draining,
            'up_s': round(time.monotonic() - self._started_s, 1),
            'current': self.current,
            'policies': {name: state for name, (state, _) in found.items()},
        }
        if 'text/html' in request.headers.get('accept', ''):
            return HTMLResponse(await asyncio.to_thread(status_page, status))
        return JSONResponse(status)

    async def _prometheus(self, _: Request) -> Response:
        texts = [text for _, text in (await self._states()).values()]
        return Response(joined_metrics(texts), media_type=METRICS_TYPE)

    async def _states(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return status and metrics of all replicas, by application and replica."""
        names = [(app, one) for app in self._handles for one in running.get(app, ())]
        asked = [
            _begin(asyncio.wait_for(_state(self._handles[app], one), _STATE_TIMEOUT_S))
            for app, one in names
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for state in found:
            if isinstance(state, BaseException):
                logger.warning('a replica does not say how it is: %r', state)
        return {
            f'{app} {one}': state
            for (app, one), state in zip(names, found, strict=True)
            if not isinstance(state, BaseException)
        }

    async def _roll_out(self, request: Request) -> Response:
        """Serve another bundle from now on: `{"bundle": NAME}`, a folder beside the one served."""
        name = await asked_bundle(request, self.keys)
        if self._rolling or not self.current:
            raise HTTPException(BUSY, 'another bundle is being loaded\n')
        self._rolling = True
        try:
            return await self._start(name)
        finally:
            self._rolling = False

    async def _start(self, name: str) -> Response:
        arguments = await self._handles[self.current].arguments.remote()
        folder = Path(arguments['bundle']).parent / name
        if not (folder / 'policy.yaml').is_file():
            raise HTTPException(UNKNOWN, 'there is no bundle of this name\n')
        if not await asyncio.to_thread(has_room, arguments):
            raise HTTPException(
                BUSY, 'the cluster has no room for replicas beside those that run: add a machine\n'
            )
        application = f'{POLICY_APP}{max(map(number_of, self._handles)) + 1}'
        target = policies({**arguments, 'bundle': str(folder)})
        start = partial(serve.run, target, name=application, route_prefix=None)
        try:
            await asyncio.to_thread(start)
        except (RayError, RayServeException, RuntimeError, ValueError):
            logger.exception('%s cannot be served', name)
            await asyncio.to_thread(serve.delete, application)
            raise HTTPException(UNUSABLE, "it cannot be served; Ray's log says why\n") from None
        await self._look()
        return JSONResponse({'application': application, 'bundle': name})


class FleetTalk:
    """A robot's conversation with the replica that has its session.

    Attributes:
        replica: where the session is.
    """

    def __init__(self, ingress: FleetIngress) -> None:
        self._ingress = ingress
        self.application = self.replica = self._name = ''

    async def open(self) -> bytes:
        """Open a session at the replica that has the fewest (SessionError: it has no room)."""
        # One after the other, so that each sees where the one before went.
        async with self._ingress.opening:
            return (await self._opened('', self._ingress.current, None)).contract

    async def answer(self, data: bytes | None) -> bytes | str:
        """Return the reply of the session's replica; a text tells that it was lost."""
        for _ in range(_TRIES):
            try:
                handle = self._ingress.handle(self.application)
                reply = await handle.ask.remote(
                    self._ingress.name, self._name, data, replica=self.replica
                )
            except KeyError:
                raise EndedError('this policy was taken away; connect again', GOING_AWAY) from None
            except (RayError, RayServeException):
                logger.exception('replica %s was lost', self.replica)
                reply = Reply('unknown')
            if reply.kind == 'reply':
                return reply.data
            if reply.kind == 'end':
                raise EndedError(str(reply.data), reply.code)
            if reply.kind == 'unknown':
                await self._come_back()
                return _LOST
            await self._move(str(reply.data))
        return _LOST

    def leave(self) -> None:
        """Tell the replica that the robot has gone."""
        if self._ingress.talks.get(self._name) is self:
            del self._ingress.talks[self._name]
            self._tell_left()

    def _tell_left(self) -> None:
        try:
            handle = self._ingress.handle(self.application)
        except KeyError:
            return
        _begin(_ignored(handle.leave, self._ingress.name, self._name, replica=self.replica))

    async def _come_back(self) -> None:
        """Open the session at a replica that lives, with an empty cache."""
        try:
            await self._opened(self._name, self.application, self.replica)
        except SessionError as error:
            raise EndedError(str(error), POLICY_VIOLATION) from None

    async def _move(self, name: str) -> None:
        """Go on with the session of another name, which its robot had before."""
        if name in self._ingress.talks:
            raise EndedError(
                'session_id: this session has a connection already; one robot uses one session',
                POLICY_VIOLATION,
            )
        before = name.partition('.')[0]
        # Ray's router writes replicas down in a thread of its own.
        known = running.copy()
        application = next(
            (app for app, replicas in known.items() if before in replicas), self.application
        )
        left = (self.application, self.replica, self._name)
        self.leave()
        try:
            await self._opened(name, application, None)
        except SessionError as error:
            self.application, self.replica, self._name = left
            raise EndedError(str(error), POLICY_VIOLATION) from None

    async def _opened(self, name: str, application: str, lost: str | None) -> Opened:
        """Open a session and note where it is.

        Args:
            name: '': a new one.
            lost: replica that is not asked.
        """
        known = [one for one in running.get(application, ()) if one != lost]
        if name:
            # Two connections that name it at once must not both get it.
            self._ingress.talks[name] = self
            chosen = replica_for_name(name, known)
        else:
            chosen = replica_for_new(known, self._ingress.sessions_of())
        found: Opened | str
        for _ in range(_TRIES):
            try:
                handle = self._ingress.handle(application)
                found = await handle.open.remote(self._ingress.name, name, replica=chosen)
                break
            except (RayError, RayServeException, KeyError):
                logger.exception('replica %s opens no session', chosen)
                chosen = None
        else:
            found = 'no replica answers; ask again in a moment'
        if isinstance(found, str):
            self._ingress.talks.pop(name, None)
            raise SessionError(found)
        self.application, self.replica, self._name = application, found.replica, found.name
        self._ingress.talks[found.name] = self
        return found


# That of this process; one replica of Ray is one process.
front: FleetIngress | None = None
# The event loop itself keeps no task alive.
_tasks: set[asyncio.Task[Any]] = set()


def _begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call beside that of a request, in a context of its own.

    In the request's context Ray gives all calls one name, and mixes up those that wait together.
    """
    task = contextvars.Context().run(asyncio.create_task, work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _state(handle: Any, replica: str) -> tuple[dict[str, Any], str]:
    found: tuple[dict[str, Any], str] = await handle.state.remote(replica=replica)
    return found


async def _ignored(method: Any, *arguments: str, **named: str) -> None:
    """Wait for a call whose failure changes nothing: who should get it has gone."""
    try:
        await method.remote(*arguments, **named)
    except (RayError, RayServeException):
        logger.debug('a call to a replica failed', exc_info=True)


def joined_metrics(texts: list[str]) -> bytes:
    """Return the metrics of several replicas as one text: each family once, with all samples."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family

    class Joined:
        def collect(self) -> list[Metric]:
            return list(families.values())

    registry = CollectorRegistry()
    registry.register(Joined())
    return generate_latest(registry)
