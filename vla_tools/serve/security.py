"""Who may ask: keys, origins, and how often.

Every path but `/healthz` and `/ready` asks for the key, where there is one: a path that is added is
closed until somebody opens it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

OPEN_PATHS = ('/healthz', '/ready')
_SHORTEST_KEY = 16


def read_accepted_keys(path: Path) -> tuple[str, ...]:
    """Read keys, one a line; lines that begin with # are comments.

    Raises:
        ValueError: no key, one that is short enough to be guessed, or a file of other things.
    """
    try:
        lines = path.read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'--key-file {path}: cannot be read: {error}') from None
    keys = tuple(line.strip() for line in lines if line.strip() and line.lstrip()[0] != '#')
    if not keys:
        raise ValueError(f'--key-file {path}: has no key; write one a line')
    if any(len(key.split()) > 1 for key in keys):
        raise ValueError(
            f'--key-file {path}: a line has several words, and a key is one; the file that maps '
            "a client's keys is --keys"
        )
    if any(len(key) < _SHORTEST_KEY or not key.isascii() for key in keys):
        raise ValueError(
            f'--key-file {path}: a key is shorter than {_SHORTEST_KEY} characters, or not ASCII; '
            'make one: openssl rand -hex 32'
        )
    return keys


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def required_keys(host: str, key_file: Path | None) -> tuple[str, ...]:
    """Return the keys that clients need; ValueError where strangers could ask without one."""
    if key_file is not None:
        return read_accepted_keys(key_file)
    if not is_loopback(host):
        raise ValueError(
            f'--host {host} lets other machines ask, so clients need a key: '
            '--key-file FILE (make one: openssl rand -hex 32 > key.txt)'
        )
    return ()


def is_key(keys: tuple[str, ...], given: object) -> bool:
    """Return whether a text is one of the keys, in a time that tells nothing about them."""
    text = given.encode() if isinstance(given, str) else b''
    # All are compared, whichever it is.
    same = [hmac.compare_digest(key.encode(), text) for key in keys]
    return any(same)


def allows(keys: tuple[str, ...], headers: Mapping[str, str]) -> bool:
    """Return whether a request has one of the keys.

    `Authorization: Api-Key KEY`, or for a browser the password of `Basic`.
    """
    kind, _, given = headers.get('authorization', '').partition(' ')
    if kind.lower() == 'basic':
        try:
            given = base64.b64decode(given, validate=True).decode().partition(':')[2]
        except (binascii.Error, ValueError):
            given = ''
    elif kind.lower() != 'api-key':
        given = ''
    return is_key(keys, given.strip())


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Return whether a page of another site sent the request; robots send no origin."""
    origin = headers.get('origin')
    return origin is not None and urlsplit(origin).netloc != headers.get('host')


class KeyCheck:
    """Middleware that refuses requests without a key (401), and pages of other sites (403)."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] not in ('http', 'websocket'):
            await self._app(scope, receive, send)
            return
        headers, refusal = Headers(scope=scope), None
        # Such a page reads no answer to a GET, and changes nothing with it.
        if scope.get('method') != 'GET' and is_foreign(headers):
            refusal = PlainTextResponse('pages of other sites may not ask\n', 403)
        elif self._keys and scope['path'] not in OPEN_PATHS and not allows(self._keys, headers):
            refusal = PlainTextResponse(
                'a key is needed: Authorization: Api-Key KEY\n',
                401,
                {'WWW-Authenticate': 'Basic realm="vla_runtime"'},
            )
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope['type'] == 'websocket':
            await WebSocket(scope, receive, send).send_denial_response(refusal)
        else:
            await refusal(scope, receive, send)


class RateLimit:
    """So many requests a second on average, and a second's worth at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left, self._last_s = per_s, time.monotonic()

    def take(self) -> bool:
        """Return whether one more may come now, and count it."""
        now_s = time.monotonic()
        gained = (now_s - self._last_s) * self._per_s
        self._left, self._last_s = min(self._per_s, self._left + gained), now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
