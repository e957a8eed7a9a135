"""One connection to a policy server: openpi's wire, with a time limit on everything.

Invariants:
- a `ServerLostError` means that the connection is over: what it was asked may still be computed,
  and nobody waits for it;
- one thread asks at a time; `drop` may be called from any thread and ends what the other waits for.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from vla_runtime.engines.preflight import missing_package
from vla_runtime.files.quotes import one_line, quoted
from vla_runtime.remote.message_pack import MessageError, unpack

_SCHEMES = ('ws', 'wss')
# A contract with its statistics, or an answer: both are far smaller.
_LARGEST_MESSAGE = 64 << 20
_LONGEST_REASON = 300
_CLOSE_TIMEOUT_S = 1.0
# As the nodes' parameters and the verbs' options are called.
_KEY_FILE, _CA_FILE = 'server_key_file (--key-file)', 'server_ca_file (--ca-file)'
_INSTALL = "pip install '.[remote]' in the source folder"


class ServerLostError(ConnectionError):
    """No connection, or no answer in time; the message says what may mend it."""


class ServerRefusalError(ValueError):
    """The server refused a request; the connection goes on. `reason` is in its own words."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f'{url}: the server refuses the request: {reason}')
        self.reason = reason


@dataclass(frozen=True)
class ServerAddress:
    """Where a policy is served, and how it is asked.

    Attributes:
        url: `ws://HOST:PORT`, or `wss://` with TLS; a path names one of several policies.
        timeout_s: longest time to connect, and from a request to its answer.
        key: sent as `Authorization: Api-Key KEY`; empty: none.
        ca_file: certificates that a `wss` server's is checked with; None: this machine's.

    Raises:
        ValueError: no such URL.
    """

    url: str
    timeout_s: float = 2.0
    key: str = field(default='', repr=False)
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in _SCHEMES and parts.port != 0 and not parts.fragment
            # A name of the network, which has parts of up to 63 characters.
            usable = usable and bool((parts.hostname or '').encode('idna'))
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(
                f'server {quoted(self.url)} is no address of a policy server; expected '
                'ws://HOST:PORT, or wss://HOST:PORT with TLS'
            )

    @property
    def host_and_port(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return parts.hostname, parts.port or (443 if parts.scheme == 'wss' else 80)


def read_server_key(path: Path) -> str:
    """Return the key in a file: its first line that is no comment.

    Raises:
        ValueError: the file cannot be read, or has no key.
    """
    try:
        lines = path.expanduser().read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{_KEY_FILE} {path}: cannot be read: {error}') from None
    keys = [line.strip() for line in lines if line.strip() and line.lstrip()[0] != '#']
    if not keys or not keys[0].isascii() or len(keys[0].split()) > 1:
        raise ValueError(
            f"{_KEY_FILE} {path}: its first line is no key; copy a line of the server's "
            '--key-file into it'
        )
    return keys[0]


class ServerConnection:
    """An open connection.

    Attributes:
        metadata: the server's first message.

    Raises:
        ServerLostError: nobody answers there in time, or another kind of server does.
        ValueError: the key or the certificate is refused, or `websockets` is not installed.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._open = ExitStack()
        self._socket = _connect(address, self._open)
        try:
            self.metadata = self._receive(monotonic() + address.timeout_s)
            if isinstance(self.metadata, str):
                raise self._lost(f'the server says: {one_line(self.metadata, _LONGEST_REASON)}')
        except BaseException:
            self.drop()
            raise

    @property
    def is_open(self) -> bool:
        """False once the other side has closed, as far as that is known."""
        from websockets.protocol import State

        return bool(self._socket.protocol.state is State.OPEN)

    def ask(self, message: bytes) -> Any:
        """Send a request and return its answer.

        Raises:
            ServerLostError: no answer in time, or none that can be read; the connection is over.
            ServerRefusalError: the server's own words.
        """
        from websockets.exceptions import ConnectionClosed

        end_s = monotonic() + self._address.timeout_s
        try:
            with self._broken_off_after(self._address.timeout_s):
                self._socket.send(message)
        except ConnectionClosed as error:
            late = monotonic() >= end_s
            raise self._late() if late else self._lost(_why_closed(error)) from None
        reply = self._receive(end_s)
        if isinstance(reply, str):
            raise ServerRefusalError(self._address.url, one_line(reply, _LONGEST_REASON))
        return reply

    def ping(self) -> float:
        """Return the milliseconds of a message there and back; raises as `ask`."""
        from websockets.exceptions import ConnectionClosed

        begin_s = monotonic()
        try:
            with self._broken_off_after(self._address.timeout_s):
                pong = self._socket.ping()
            answered = pong.wait(self._address.timeout_s)
        except ConnectionClosed as error:
            raise self._lost(_why_closed(error)) from None
        if not answered:
            raise self._lost(f'no answer within {self._address.timeout_s:g} s')
        return (monotonic() - begin_s) * 1e3

    def close(self) -> None:
        """Close politely; waits a moment for the other side."""
        with self._broken_off_after(2.0 * _CLOSE_TIMEOUT_S):
            self._open.close()

    def drop(self) -> None:
        """Close at once, whatever the other side does."""
        self._break_off()
        self._open.close()

    @contextmanager
    def _broken_off_after(self, seconds: float) -> Iterator[None]:
        """End a send that takes longer: a server that stands still takes no bytes.

        A socket's own limit is of each write, and with TLS it ends none.
        """
        limit = Timer(seconds, self._break_off)
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def _break_off(self) -> None:
        # It may be closed already.
        with suppress(OSError):
            self._socket.socket.shutdown(socket.SHUT_RDWR)

    def _receive(self, end_s: float) -> Any:
        """Return the next message; a text as it is."""
        from websockets.exceptions import ConnectionClosed

        try:
            data = self._socket.recv(timeout=max(0.0, end_s - monotonic()))
        except TimeoutError:
            raise self._late() from None
        except ConnectionClosed as error:
            raise self._lost(_why_closed(error)) from None
        if isinstance(data, str):
            return data
        try:
            return unpack(data)
        except MessageError as error:
            raise self._lost(f'the answer cannot be read: {error}') from None

    def _late(self) -> ServerLostError:
        return self._lost(f'no answer within {self._address.timeout_s:g} s (server_timeout_s)')

    def _lost(self, why: str) -> ServerLostError:
        return ServerLostError(f'{self._address.url}: {why}')


def _connect(address: ServerAddress, opened_here: ExitStack) -> Any:
    """Return a websocket, whose end is put on the stack."""
    if missing := missing_package('msgpack', 'websockets'):
        raise ValueError(
            f"backend 'remote': the Python package '{missing}' is not installed: {_INSTALL}"
        )
    from websockets.exceptions import InvalidHandshake, InvalidStatus
    from websockets.sync.client import connect

    url = address.url
    start = f'start it there (vla_runtime serve BUNDLE), or mend the address {url}'
    encrypted = None
    try:
        if urlsplit(url).scheme == 'wss':
            encrypted = ssl.create_default_context(cafile=address.ca_file)
        opened = socket.create_connection(address.host_and_port, address.timeout_s)
    except ssl.SSLError as error:
        raise ValueError(f'{_CA_FILE} {address.ca_file}: no certificates: {error}') from None
    except OSError as error:
        if address.ca_file is not None and not address.ca_file.is_file():
            raise ValueError(f'{_CA_FILE} {address.ca_file}: is no file') from None
        raise ServerLostError(f'{url}: no server can be reached ({error}); {start}') from None
    opened.settimeout(None)
    try:
        connection = connect(
            url,
            sock=opened,
            ssl=encrypted,
            proxy=None,
            compression=None,
            max_size=_LARGEST_MESSAGE,
            open_timeout=address.timeout_s,
            close_timeout=_CLOSE_TIMEOUT_S,
            additional_headers={'Authorization': f'Api-Key {address.key}'} if address.key else {},
        )
        return opened_here.enter_context(connection)
    except InvalidStatus as error:
        opened.close()
        raise _refused(url, error.response.status_code, error.response.body) from None
    except ssl.SSLCertVerificationError as error:
        opened.close()
        raise ValueError(
            f'{url}: its certificate does not hold ({error.verify_message}); name the file that it '
            f"was signed with, or the certificate itself, as {_CA_FILE}, and use the server's "
            'name in it'
        ) from None
    except TimeoutError:
        opened.close()
        raise ServerLostError(
            f'{url}: no answer within {address.timeout_s:g} s (server_timeout_s); a server that '
            'still loads its policy answers once it is ready'
        ) from None
    except (InvalidHandshake, OSError, EOFError) as error:
        opened.close()
        raise ServerLostError(f'{url}: no policy server answers there ({error}); {start}') from None


def _refused(url: str, status: int, body: bytes | bytearray) -> Exception:
    said = one_line(body.decode(errors='replace'), _LONGEST_REASON).strip()
    if status in (401, 403):
        return ValueError(
            f'{url}: the server refuses the key (HTTP {status}); put a line of its --key-file into '
            f'the file that {_KEY_FILE} names'
        )
    if status == 404:
        return ValueError(f'{url}: {said or "no policy there"} (HTTP 404); mend the path')
    return ServerLostError(f'{url}: {said or "the server takes no robot"} (HTTP {status})')


def _why_closed(error: Any) -> str:
    close = error.rcvd
    if close is None:
        return 'the connection broke off'
    return f'the server closed the connection: {close.reason or close.code}'
