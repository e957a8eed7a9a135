"""A browser's end of a view's page, and a page served in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 60.0


class Page:
    """A browser's end of the page's socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.pictures: dict[int, bytes] = {}
        self.hello: dict[str, Any] = {}
        self.now: dict[str, Any] = {}
        self.offered: list[str] = []
        # Of the newest command, and what came after it.
        self.replies: list[dict[str, Any]] = []
        self.wait_for(lambda: self.hello)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Read on until a condition holds; fails with what is shown when it never does."""
        end_s = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < end_s, f'{self.now} {self.offered}'
            self._take(self._socket.recv(timeout=PATIENCE_S))
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its reply."""
        self._number += 1
        replies = self.replies = []
        self._socket.send(json.dumps({**command, 'id': self._number}))
        self.wait_for(lambda: [one for one in replies if one['reply'] == self._number])
        return replies[-1]

    def send(self, text: str) -> None:
        self._socket.send(text)

    def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self.pictures[message[0]] = message[1:]
            return
        read = json.loads(message)
        if 'hello' in read:
            self.hello = read['hello']
        elif 'reply' in read:
            self.replies.append(read)
        else:
            self.now = read['now']
            self.offered = read.get('offered', [])


@contextmanager
def open_page(port: int, **options: Any) -> Iterator[Page]:
    with connect(f'ws://127.0.0.1:{port}/live', max_size=None, **options) as socket:
        yield Page(socket)


@contextmanager
def served(source: Any, options: Any) -> Iterator[int]:
    """Serve a source in a thread; yields the port."""
    from vla_tools.serve.listener import address_of, listen
    from vla_tools.view.serving import make_server

    with listen('127.0.0.1', 0) as listener:
        server = make_server(source, options)
        thread = threading.Thread(target=server.run, kwargs={'sockets': [listener]})
        thread.start()
        try:
            yield address_of(listener)[1]
        finally:
            server.should_exit = True
            thread.join()
            source.close()
