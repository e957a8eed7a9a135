"""The page's application: one page, one socket for all that moves, the scene, pages of help.

Invariants:
- the event loop never computes: what a page shows is made in the source's own thread, so a stop is
  sent on at once;
- a page that takes nothing keeps back nobody else, and is given the newest when it takes again;
- what changes the robot comes over the socket alone, which pages of other sites cannot open.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from vla_runtime.pages.page import render
from vla_tools.serve.security import KeyCheck
from vla_tools.view.help_pages import help_page
from vla_tools.view.scene_proxy import SceneProxy
from vla_tools.view.source import Source

_TEMPLATE = Path(__file__).with_name('page.html.j2')
# More would be no person's.
_MOST_PAGES = 16
_LONGEST_COMMAND = 4096
LOOPBACK_HOSTS = ('localhost', '127.0.0.1', '[::1]')


class Pages:
    """Open pages and what they are sent; `publish` may be called by any thread.

    Attributes:
        app: the ASGI application.

    Args:
        keys: one of them is asked for, where there are any.
        hosts: names under which the page may be asked for; `*`: any.
    """

    def __init__(self, source: Source, *, keys: tuple[str, ...], hosts: tuple[str, ...]) -> None:
        self._source = source
        self._loop: asyncio.AbstractEventLoop | None = None
        self._text, self._number, self._begun = '', 0, 0
        self._news = asyncio.Event()
        self._sockets: set[WebSocket] = set()
        self._scene = SceneProxy(source)
        self.app = Starlette(
            routes=[
                Route('/', self._page),
                Route('/favicon.ico', lambda _: Response(status_code=204)),
                WebSocketRoute('/live', self._live),
                Route('/scene/', self._scene.page),
                WebSocketRoute('/scene', self._scene.socket),
                Route('/pages/{path:path}', self._help),
            ],
            middleware=[
                # A name that another site's owner points at this machine is none of ours.
                Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
                Middleware(KeyCheck, keys=keys),
            ],
            lifespan=self._lifespan,
        )

    def publish(self, news: Mapping[str, Any], *, anew: bool = False) -> None:
        """Show this on all pages; `anew`: after what a page needs first."""
        loop = self._loop
        if loop is None or not self._sockets:
            return
        text = json.dumps(news, allow_nan=False)
        # The loop may end meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._set, text, anew)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        yield

    def _set(self, text: str, anew: bool) -> None:
        self._text, self._number = text, self._number + 1
        self._begun += anew
        self._news.set()
        self._news = asyncio.Event()

    async def _page(self, _: Request) -> Response:
        title = (await asyncio.to_thread(self._source.hello))['title']
        return HTMLResponse(render(_TEMPLATE, title=title))

    async def _help(self, request: Request) -> Response:
        return await asyncio.to_thread(help_page, request.path_params['path'])

    async def _live(self, socket: WebSocket) -> None:
        if len(self._sockets) >= _MOST_PAGES:
            await socket.close(1013, 'too many pages are open')
            return
        await socket.accept()
        self._sockets.add(socket)
        self._source.pages = len(self._sockets)
        try:
            await self._serve(socket)
        finally:
            self._sockets.discard(socket)
            self._source.pages = len(self._sockets)

    async def _serve(self, socket: WebSocket) -> None:
        writing = asyncio.Lock()
        tasks = [
            asyncio.create_task(self._send(socket, writing)),
            asyncio.create_task(self._receive(socket, writing)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # A page that was closed is no fault.
                with suppress(WebSocketDisconnect, RuntimeError):
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, socket: WebSocket, writing: asyncio.Lock) -> None:
        shown, begun = self._number, -1
        sent: dict[str, int] = {}
        while True:
            if begun != self._begun:
                begun = self._begun
                hello = await asyncio.to_thread(self._source.hello)
                sent = {camera['name']: 0 for camera in hello['cameras']}
                async with writing:
                    await socket.send_text(json.dumps({'hello': hello}, allow_nan=False))
            for index, name in enumerate(sent):
                number, jpeg = self._source.pictures.get(name, (0, b''))
                if number != sent[name]:
                    sent[name] = number
                    async with writing:
                        await socket.send_bytes(bytes([index]) + jpeg)
            if shown == self._number:
                await self._news.wait()
                # What a page needs first comes before the news about it.
                if begun != self._begun:
                    continue
            shown = self._number
            async with writing:
                await socket.send_text(self._text)

    async def _receive(self, socket: WebSocket, writing: asyncio.Lock) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            text = await socket.receive_text()
            if len(text) > _LONGEST_COMMAND:
                continue
            # A home that takes seconds must not keep a stop waiting.
            task = asyncio.create_task(self._carry_out(text, socket, writing))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _carry_out(self, text: str, socket: WebSocket, writing: asyncio.Lock) -> None:
        begin_s, number = time.monotonic(), None
        try:
            command = json.loads(text)
            if not isinstance(command, dict):
                raise ValueError('a command is an object')
            number = command.get('id')
            said, done = await self._source.command(command), True
        # Numbers without end and brackets without end are no ValueError.
        except (ValueError, OverflowError, RecursionError) as error:
            said, done = str(error), False
        reply = {'reply': number, 'ok': done, 'text': said}
        reply['ms'] = round(1e3 * (time.monotonic() - begin_s), 1)
        with suppress(WebSocketDisconnect, RuntimeError):
            async with writing:
                await socket.send_text(json.dumps(reply))
