"""The socket that a server listens on, bound before anything slow is loaded."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; ValueError where the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ValueError(f'--host {host} --port {port}: cannot listen: {error.strerror}') from None


def address_of(listener: socket.socket) -> tuple[str, int]:
    """Return host and port that a socket listens on."""
    host, port, *_ = listener.getsockname()
    return str(host), int(port)
