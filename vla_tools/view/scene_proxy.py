"""The scene behind the page's own address: one port, and one key, for both.

viser serves on a port of this machine alone and asks for no key; its page and its socket are handed
through here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from vla_tools.view.source import Source

_NOT_FOUND, _GOING_AWAY = 404, 1001


class SceneProxy:
    """Hands a browser through to the scene of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def page(self, _: Request) -> Response:
        """The scene's page."""
        if self._source.scene_port is None:
            return PlainTextResponse('there is no scene\n', _NOT_FOUND)
        return FileResponse(await asyncio.to_thread(_page_of_viser))

    async def socket(self, socket: WebSocket) -> None:
        """The scene's socket, message by message in both directions."""
        port = self._source.scene_port
        if port is None:
            await socket.close(_GOING_AWAY)
            return
        wanted = socket.scope.get('subprotocols', [])
        try:
            async with connect(
                f'ws://127.0.0.1:{port}',
                subprotocols=wanted,
                max_size=None,
                compression=None,
                open_timeout=5.0,
            ) as scene:
                await socket.accept(subprotocol=scene.subprotocol)
                await _hand_through(socket, scene)
        except (OSError, InvalidHandshake):
            await socket.close(_GOING_AWAY)


async def _hand_through(socket: WebSocket, scene: ClientConnection) -> None:
    async def inwards() -> None:
        while True:
            await scene.send(await socket.receive_bytes())

    async def outwards() -> None:
        async for message in scene:
            await socket.send_bytes(message if isinstance(message, bytes) else message.encode())

    tasks = [asyncio.create_task(inwards()), asyncio.create_task(outwards())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in done:
        with suppress(WebSocketDisconnect, ConnectionClosed, RuntimeError, KeyError):
            task.result()


def _page_of_viser() -> Path:
    import viser

    return Path(viser.__file__).parent / 'client' / 'build' / 'index.html'
