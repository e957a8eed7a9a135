"""Options of the verbs that ask a policy server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_runtime.remote.connection import ServerAddress
    from vla_runtime.remote.contract import Contract


def add_server_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare them; return their group."""
    group = parser.add_argument_group('with ws://HOST:PORT or wss://HOST:PORT in place of BUNDLE')
    group.add_argument('--key-file', type=Path, metavar='FILE', help="file with the server's key")
    group.add_argument(
        '--ca-file', type=Path, metavar='FILE', help="certificates to check the server's with, PEM"
    )
    return group


def is_server(text: str) -> bool:
    """Return whether a word on the command line is a server's address, not a folder."""
    return text.startswith(('ws://', 'wss://'))


def contract_at(url: str, arguments: argparse.Namespace) -> Contract:
    """Ask a server for its contract (ServerLostError, ValueError: why there is none)."""
    from vla_runtime.remote.link import fetch_contract

    return fetch_contract(server_at(url, arguments))


def server_at(url: str, arguments: argparse.Namespace) -> ServerAddress:
    """Return a server's address with the key (ValueError: a key file that cannot be read)."""
    from vla_runtime.remote.connection import ServerAddress, read_server_key

    key = read_server_key(arguments.key_file) if arguments.key_file else ''
    return ServerAddress(url, key=key, ca_file=arguments.ca_file)
